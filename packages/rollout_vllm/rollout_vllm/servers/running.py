"""Servers that somebody else runs: what can be found wrong by asking them. Standard library only."""

from __future__ import annotations

import http.client
import json
from typing import Any

from ..config import RolloutConfig
from ..errors import RequestTooLongError, RolloutConfigError
from ..samples import Endpoint
from .process import call

_CALL_TIMEOUT_S = 30.0


def check_running(config: RolloutConfig) -> None:
    """Asks each of `config.urls` whether it can be used as `config` says; takes a moment, one generated token each.

    Raises RolloutConfigError: nobody answers there, the API key is refused, log-probs are of another distribution than
    the tokens are drawn from, and, where config.control_routes asks for them, there are no control routes.
    RequestTooLongError: its context is shorter than max_model_len.
    """
    for url in config.urls:
        _check(Endpoint(url.rstrip("/"), config.api_key), config)


def is_paused(endpoint: Endpoint, *, timeout_s: float = _CALL_TIMEOUT_S) -> bool:
    """Whether it holds requests back until somebody resumes it, as after a weight update that was broken off.

    A server that does not answer, or has no control routes, counts as not paused.
    """
    try:
        status, text = call(endpoint, "GET", "/is_paused", timeout_s=timeout_s)
        return status == 200 and bool(json.loads(text)["is_paused"])
    except (OSError, http.client.HTTPException, ValueError, LookupError, TypeError):
        return False


def _check(endpoint: Endpoint, config: RolloutConfig) -> None:
    models = _ask(endpoint, "GET", "/v1/models")
    context = _first(models, "data").get("max_model_len")
    if config.max_model_len is not None and isinstance(context, int) and context < config.max_model_len:
        raise RequestTooLongError(
            f"urls: the context of {endpoint.url} is {context} tokens, less than max_model_len={config.max_model_len}; "
            f"start it with --max-model-len {config.max_model_len}, or lower max_model_len"
        )
    if config.control_routes:
        _ask(endpoint, "GET", "/get_world_size", missing="start it with VLLM_SERVER_DEV_MODE=1, on a private network")
    if is_paused(endpoint):
        return  # it would generate nothing; whoever pushes weights into it resumes it
    # Of the one token that top_k=1 leaves, the log-prob is 0 after the processing and below 0 before it.
    body = {"prompt": [1, 2], "max_tokens": 1, "temperature": 1.0, "top_k": 1, "logprobs": 0, "seed": 0}
    answer = _ask(endpoint, "POST", "/v1/completions", body)
    log_probs = (_first(answer, "choices").get("logprobs") or {}).get("token_logprobs") or [None]
    if log_probs[0] is None or log_probs[0] < -1e-4:
        raise RolloutConfigError(
            f"urls: {endpoint.url} gives log-probs of another distribution than it draws from; start it with "
            "--logprobs-mode processed_logprobs"
        )


def _ask(endpoint: Endpoint, method: str, path: str, body: Any = None, *, missing: str = "") -> Any:
    try:
        status, text = call(endpoint, method, path, body, timeout_s=_CALL_TIMEOUT_S)
    except (OSError, http.client.HTTPException) as error:
        raise RolloutConfigError(
            f"urls: no server answers at {endpoint.url} ({type(error).__name__}: {error}); allowed: servers that run"
        ) from None
    if status in (401, 403):
        given = "the api_key that is given" if endpoint.api_key else "calls without an API key; give api_key"
        raise RolloutConfigError(f"urls: {endpoint.url} refuses {given} (HTTP {status} at {path})")
    if status == 404 and missing:
        raise RolloutConfigError(f"urls: {endpoint.url} has no route {path}; {missing}")
    try:
        answer = json.loads(text)
    except ValueError:
        answer = None
    if status != 200 or not isinstance(answer, dict):
        raise RolloutConfigError(f"urls: {endpoint.url} answers {path} with HTTP {status}: {text[:200]}")
    return answer


def _first(answer: Any, key: str) -> dict[str, Any]:
    items = answer.get(key)
    return items[0] if isinstance(items, list) and items and isinstance(items[0], dict) else {}
