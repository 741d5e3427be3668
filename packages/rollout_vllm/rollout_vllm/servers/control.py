"""Control routes of the servers: sleep, wake and traces. Errors name the servers that failed.

They exist on servers started with `RolloutConfig(sleep_mode=True)` or `RolloutConfig(profile_dir=...)`.
"""

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Literal
from urllib.parse import quote

from plinth_base import Endpoint
from plinth_base.endpoint import NO_ANSWER, call, error_message

from ..errors import ControlError

WakeTag = Literal["weights", "kv_cache"]


def _post_to_all(endpoints: Sequence[Endpoint], action: str, path: str, timeout_s: float) -> None:
    """Posts to all endpoints concurrently. Raises ControlError with the problem of each one that failed."""
    with ThreadPoolExecutor(max_workers=max(1, len(endpoints))) as pool:
        results = list(pool.map(lambda endpoint: _post(endpoint, path, timeout_s), endpoints))
    problems = {e.url: problem for e, problem in zip(endpoints, results, strict=True) if problem is not None}
    if problems:
        text = "; ".join(f"{url}: {problem}" for url, problem in problems.items())
        raise ControlError(f"{action} failed: {text}", problems)


def _post(endpoint: Endpoint, path: str, timeout_s: float) -> str | None:
    try:
        status, text = call(endpoint, "POST", path, timeout_s=timeout_s)
    except NO_ANSWER as error:
        return f"{type(error).__name__}: {error}"
    if status == 404:
        return "HTTP 404: the server does not have this route; start it with sleep_mode=True, or profile_dir"
    return None if status == 200 else error_message(status, text)


def sleep(endpoints: Sequence[Endpoint], *, level: Literal[1, 2] = 1, timeout_s: float = 120.0) -> None:
    """Free the servers' GPU memory. Call it while nothing is generated: running requests are aborted.

    Level 1 keeps the weights in CPU memory. Level 2 discards them, so weights must be pushed after `wake`.
    Raises ControlError, whose `problems` name the servers that failed; the others stay asleep (call `wake`).
    """
    _post_to_all(endpoints, "sleep", f"/sleep?level={level}", timeout_s)


def wake(endpoints: Sequence[Endpoint], *, tags: Sequence[WakeTag] = (), timeout_s: float = 120.0) -> None:
    """Allocate the memory of `tags` again; without tags, all of it. Requests are served when all of it is back.

    Raises ControlError, whose `problems` name the servers that failed.

    To limit peak memory: wake tags=["weights"], push the weights, then wake tags=["kv_cache"].
    """
    _post_to_all(endpoints, "wake", "/wake_up?" + "&".join(f"tags={quote(tag)}" for tag in tags), timeout_s)


def is_sleeping(endpoint: Endpoint, *, timeout_s: float = 30.0) -> bool:
    """True if the server is asleep. Raises ControlError if it does not answer."""
    try:
        status, text = call(endpoint, "GET", "/is_sleeping", timeout_s=timeout_s)
        if status == 200:
            return bool(json.loads(text)["is_sleeping"])
        problem = f"HTTP {status}"
    except (*NO_ANSWER, ValueError, LookupError, TypeError, RecursionError) as error:
        problem = f"{type(error).__name__}: {error}"
    raise ControlError(f"is_sleeping failed: {endpoint.url}: {problem}", {endpoint.url: problem})


def start_profile(endpoints: Sequence[Endpoint], *, timeout_s: float = 120.0) -> None:
    """Trace the servers' processes, which need `RolloutConfig(profile_dir=...)`. Raises ControlError."""
    _post_to_all(endpoints, "start_profile", "/start_profile", timeout_s)


def stop_profile(endpoints: Sequence[Endpoint], *, timeout_s: float = 600.0) -> None:
    """Stop, and write a Chrome trace of each process into `profile_dir`. Raises ControlError."""
    _post_to_all(endpoints, "stop_profile", "/stop_profile", timeout_s)
