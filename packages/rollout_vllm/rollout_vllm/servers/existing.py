"""Existing servers that are given by URL: checks, and waiting for one."""

import json
import time
from typing import Any

from plinth_base import Endpoint
from plinth_base.endpoint import NO_ANSWER, call, error_message

from ..config import RolloutConfig
from ..errors import RequestTooLongError, RolloutConfigError, ServerStartError

_CALL_TIMEOUT_S = 30.0


def check_running(config: RolloutConfig) -> None:
    """Check that each server in `config.urls` can be used with `config`. Generates one token on each.

    Raises RolloutConfigError if a server does not answer, rejects the API key, returns log-probs of a distribution
    other than the one it samples from, or lacks the experts of config.routes or the routes of config.control_routes.
    RequestTooLongError: its context is shorter than max_model_len.
    """
    for url in config.urls:
        _check(Endpoint(url.rstrip("/"), config.read_api_key()), config)


def is_paused(endpoint: Endpoint, *, timeout_s: float = _CALL_TIMEOUT_S) -> bool:
    """True if the server is paused, as after an interrupted weight update.

    A server that does not answer, or has no control routes, counts as not paused.
    """
    try:
        status, text = call(endpoint, "GET", "/is_paused", timeout_s=timeout_s)
        return status == 200 and bool(json.loads(text)["is_paused"])
    except (*NO_ANSWER, ValueError, LookupError, TypeError, RecursionError):
        return False


def try_generation(endpoint: Endpoint, *, timeout_s: float) -> str | None:
    """Generate one token. Returns None on success, else the problem in a few words."""
    body = {"prompt": [1, 2], "max_tokens": 1, "temperature": 1.0, "seed": 0, "n": 1, "logprobs": 0}
    if endpoint.model is not None:
        body["model"] = endpoint.model
    try:
        status, text = call(endpoint, "POST", "/v1/completions", body, timeout_s=timeout_s)
    except NO_ANSWER as error:
        return f"{type(error).__name__}: {error}"
    return None if status == 200 else error_message(status, text)


def wait_for_existing(index: int, endpoint: Endpoint, deadline: float) -> None:
    """Wait for an existing server. A paused server counts as ready: the first weight push resumes it.

    Raises ServerStartError. deadline: time.monotonic().
    """
    while True:
        if is_paused(endpoint):
            return
        problem = try_generation(endpoint, timeout_s=max(0.1, deadline - time.monotonic()))
        if problem is None:
            return
        if problem.startswith("HTTP 4") or time.monotonic() > deadline:
            raise ServerStartError(f"{endpoint.url}: {problem}", index, None)
        time.sleep(0.5)


def _check(endpoint: Endpoint, config: RolloutConfig) -> None:
    models = _request(endpoint, "GET", "/v1/models")
    context = _first(models, "data").get("max_model_len")
    if config.max_model_len is not None and isinstance(context, int) and context < config.max_model_len:
        raise RequestTooLongError(
            f"its context is {context} tokens, less than max_model_len={config.max_model_len}",
            field="urls",
            value=endpoint.url,
            remedy=f"start it with --max-model-len {config.max_model_len}, or lower max_model_len",
        )
    if config.control_routes:
        missing = "start it with VLLM_SERVER_DEV_MODE=1, on a private network"
        _request(endpoint, "GET", "/get_world_size", missing=missing)
    if is_paused(endpoint) or not (config.log_probs or config.routes):
        return  # it cannot generate, and the first weight push resumes it; or nobody reads more than ids
    # top_k=1 leaves one token: its log-prob is 0 after the sampling settings are applied, and below 0 before.
    body = {"prompt": [1, 2], "max_tokens": 1, "temperature": 1.0, "top_k": 1, "logprobs": 0, "seed": 0}
    answer = _request(endpoint, "POST", "/v1/completions", body)
    choice = _first(answer, "choices")
    if config.routes and choice.get("routed_experts") is None:
        raise _unusable(endpoint, "it returns no routed experts", "start it with --enable-return-routed-experts")
    given = choice.get("logprobs")
    log_probs = given.get("token_logprobs") if isinstance(given, dict) else None
    first = log_probs[0] if isinstance(log_probs, list) and log_probs else None
    if config.log_probs and (not isinstance(first, (int, float)) or not first >= -1e-4):
        remedy = "start it with --logprobs-mode processed_logprobs"
        raise _unusable(endpoint, "it returns log-probs of a distribution other than the one it samples from", remedy)


def _request(endpoint: Endpoint, method: str, path: str, body: Any = None, *, missing: str = "") -> dict[str, Any]:
    try:
        status, text = call(endpoint, method, path, body, timeout_s=_CALL_TIMEOUT_S)
    except NO_ANSWER as error:
        problem = f"no server answers ({type(error).__name__}: {error})"
        raise _unusable(endpoint, problem, "start the server first") from None
    if status in (401, 403):
        given = "the given api_key" if endpoint.api_key else "requests without an API key"
        raise _unusable(endpoint, f"it rejects {given} (HTTP {status} at {path})", "set api_key to the server's key")
    if status == 404 and missing:
        raise _unusable(endpoint, f"it has no route {path}", missing)
    try:
        answer = json.loads(text)
    except (ValueError, RecursionError):
        answer = None
    if status != 200 or not isinstance(answer, dict):
        raise _unusable(endpoint, f"it answers {path} with {error_message(status, text)}")
    return answer


def _unusable(endpoint: Endpoint, problem: str, remedy: str | None = None) -> RolloutConfigError:
    return RolloutConfigError(problem, field="urls", value=endpoint.url, remedy=remedy)


def _first(answer: dict[str, Any], key: str) -> dict[str, Any]:
    items = answer.get(key)
    return items[0] if isinstance(items, list) and items and isinstance(items[0], dict) else {}
