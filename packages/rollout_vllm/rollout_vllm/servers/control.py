"""Control routes of the servers: sleep, wake, traces and LoRA adapters. Errors name the servers that failed.

They exist on servers started with `RolloutConfig(sleep_mode=True)`, `RolloutConfig(profile_dir=...)` or
`RolloutConfig(max_lora_rank=...)`.
"""

import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal
from urllib.parse import quote

from plinth_base import Endpoint

from ..errors import ControlError, RolloutConfigError
from .blocking_http import NO_ANSWER, call

WakeTag = Literal["weights", "kv_cache"]


def on_all(endpoints: Sequence[Endpoint], action: Callable[[Endpoint], str | None]) -> dict[str, str]:
    """Run `action` on all endpoints concurrently. Returns url -> problem for the endpoints that failed."""
    with ThreadPoolExecutor(max_workers=max(1, len(endpoints))) as pool:
        results = list(pool.map(action, endpoints))
    return {e.url: r for e, r in zip(endpoints, results, strict=True) if r is not None}


def _post(endpoint: Endpoint, path: str, body: object | None, timeout_s: float) -> str | None:
    try:
        status, text = call(endpoint, "POST", path, body, timeout_s=timeout_s)
    except NO_ANSWER as error:
        return f"{type(error).__name__}: {error}"
    if status == 404 and not path.startswith("/v1/"):
        return "HTTP 404: the server does not have this route; start it with sleep_mode=True, or profile_dir"
    return None if status == 200 else f"HTTP {status}: {' '.join(text.split())[:300]}"


def _raise_if_any(action: str, problems: dict[str, str]) -> None:
    if problems:
        text = "; ".join(f"{url}: {problem}" for url, problem in problems.items())
        raise ControlError(f"{action} failed: {text}", problems)


def sleep(endpoints: Sequence[Endpoint], *, level: Literal[1, 2] = 1, timeout_s: float = 120.0) -> None:
    """Free the servers' GPU memory. Call it while nothing is generated: running requests are aborted.

    Level 1 keeps the weights in CPU memory. Level 2 discards them, so weights must be pushed after `wake`.
    Raises ControlError, whose `problems` name the servers that failed; the others stay asleep (call `wake`).
    """
    _raise_if_any("sleep", on_all(endpoints, lambda e: _post(e, f"/sleep?level={level}", None, timeout_s)))


def wake(endpoints: Sequence[Endpoint], *, tags: Sequence[WakeTag] = (), timeout_s: float = 120.0) -> None:
    """Allocate the memory of `tags` again; without tags, all of it. Requests are served when all of it is back.

    Raises ControlError, whose `problems` name the servers that failed.

    To limit peak memory: wake tags=["weights"], push the weights, then wake tags=["kv_cache"].
    """
    query = "&".join(f"tags={quote(tag)}" for tag in tags)
    _raise_if_any(
        "wake", on_all(endpoints, lambda e: _post(e, "/wake_up" + (f"?{query}" if query else ""), None, timeout_s))
    )


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
    _raise_if_any("start_profile", on_all(endpoints, lambda e: _post(e, "/start_profile", None, timeout_s)))


def stop_profile(endpoints: Sequence[Endpoint], *, timeout_s: float = 600.0) -> None:
    """Stop, and write a Chrome trace of each process into `profile_dir`. Raises ControlError."""
    _raise_if_any("stop_profile", on_all(endpoints, lambda e: _post(e, "/stop_profile", None, timeout_s)))


class LoraAdapters:
    """One LoRA adapter, in the same version on all servers.

    Every version has its own model name (`<name>-v<version>`). `load` loads the new version on all servers before it
    changes `current` and unloads the old version, so a failure leaves all servers unchanged.
    """

    def __init__(self, endpoints: Sequence[Endpoint], *, name: str = "adapter", timeout_s: float = 120.0) -> None:
        if not name or "/" in name:
            raise RolloutConfigError(field="name", value=name, allowed="a name without '/'")
        self._endpoints, self._name, self._timeout_s = tuple(endpoints), name, timeout_s
        self.current: str | None = None  # the model name to request; None: the base model

    def load(self, folder: Path, version: int) -> str:
        """Load the adapter in `folder` (a path on the servers) and return its model name.

        Pass that name to `RolloutClient.set_model`. Raises ControlError; all servers are then unchanged.
        """
        model = f"{self._name}-v{version}"
        if model == self.current:
            raise RolloutConfigError("this version is already loaded", field="version", value=version)
        body = {"lora_name": model, "lora_path": str(folder)}
        problems = on_all(self._endpoints, lambda e: _post(e, "/v1/load_lora_adapter", body, self._timeout_s))
        if problems:
            self._unload(model, [e for e in self._endpoints if e.url not in problems])
            _raise_if_any(f"loading the adapter {folder}", problems)
        old, self.current = self.current, model
        if old is not None:
            _raise_if_any(f"unloading the adapter {old}", self._unload(old, self._endpoints))
        return model

    def unload(self) -> None:
        """Unload the adapter and return to the base model."""
        old, self.current = self.current, None
        if old is not None:
            _raise_if_any(f"unloading the adapter {old}", self._unload(old, self._endpoints))

    def _unload(self, model: str, endpoints: Sequence[Endpoint]) -> dict[str, str]:
        body = {"lora_name": model}
        return on_all(endpoints, lambda e: _post(e, "/v1/unload_lora_adapter", body, self._timeout_s))
