"""The servers' control routes: sleep and wake, LoRA adapters. All servers or an error that says which.

They exist on servers started with `RolloutConfig(sleep_mode=True)` and `RolloutConfig(max_lora_rank=...)`.
"""

from __future__ import annotations

import http.client
import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal
from urllib.parse import quote

from ..errors import ControlError, RolloutConfigError
from ..samples import Endpoint
from .process import call

WakeTag = Literal["weights", "kv_cache"]


def on_all(endpoints: Sequence[Endpoint], action: Callable[[Endpoint], str | None]) -> dict[str, str]:
    """Run `action` on every endpoint at once; url -> what went wrong, for those where it did."""
    with ThreadPoolExecutor(max_workers=max(1, len(endpoints))) as pool:
        results = list(pool.map(action, endpoints))
    return {e.url: r for e, r in zip(endpoints, results, strict=True) if r is not None}


def _post(endpoint: Endpoint, path: str, body: object | None, timeout_s: float) -> str | None:
    try:
        status, text = call(endpoint, "POST", path, body, timeout_s=timeout_s)
    except (OSError, http.client.HTTPException) as error:
        return f"{type(error).__name__}: {error}"
    if status == 404 and not path.startswith("/v1/"):
        return "HTTP 404: the server has no such route; start it with sleep_mode=True"
    return None if status == 200 else f"HTTP {status}: {' '.join(text.split())[:300]}"


def _raise(doing: str, problems: dict[str, str]) -> None:
    if problems:
        raise ControlError(f"{doing} failed: " + "; ".join(f"{url}: {what}" for url, what in problems.items()))


def sleep(endpoints: Sequence[Endpoint], *, level: Literal[1, 2] = 1, timeout_s: float = 120.0) -> None:
    """Free the servers' GPU memory. Call it when nothing is being generated: running requests are aborted.

    Level 1 keeps the weights in CPU memory; level 2 drops them, so new ones must be pushed after `wake_weights`.
    Raises ControlError; servers that did fall asleep stay so (call `wake`).
    """
    _raise("sleep", on_all(endpoints, lambda e: _post(e, f"/sleep?level={level}", None, timeout_s)))


def wake(endpoints: Sequence[Endpoint], *, tags: Sequence[WakeTag] = (), timeout_s: float = 120.0) -> None:
    """Take the memory of `tags` back; none: all of it.

    The order that never holds two copies at once: tags=["weights"], push the weights, then tags=["kv_cache"].
    """
    query = "&".join(f"tags={quote(tag)}" for tag in tags)
    _raise("wake", on_all(endpoints, lambda e: _post(e, "/wake_up" + (f"?{query}" if query else ""), None, timeout_s)))


def is_sleeping(endpoint: Endpoint, *, timeout_s: float = 30.0) -> bool:
    """Raises ControlError when there is no answer."""
    try:
        status, text = call(endpoint, "GET", "/is_sleeping", timeout_s=timeout_s)
        if status == 200:
            return bool(json.loads(text)["is_sleeping"])
        problem = f"HTTP {status}"
    except (OSError, http.client.HTTPException, ValueError, KeyError) as error:
        problem = f"{type(error).__name__}: {error}"
    raise ControlError(f"is_sleeping failed: {endpoint.url}: {problem}")


class LoraAdapters:
    """One adapter, on all servers in the same version or on none.

    Every version has a name of its own (`<name>-v<version>`): it is loaded everywhere first, and only when every
    server has it does `current` change and the old one go. So a failure half-way leaves all servers as they were.
    """

    def __init__(self, endpoints: Sequence[Endpoint], *, name: str = "adapter", timeout_s: float = 120.0) -> None:
        if not name or "/" in name:
            raise RolloutConfigError(f"name={name!r}: allowed is a name without '/'")
        self._endpoints, self._name, self._timeout_s = tuple(endpoints), name, timeout_s
        self.current: str | None = None  # the model name to ask for; None: the base model

    def load(self, folder: Path, version: int) -> str:
        """Load the adapter in `folder` (as the servers see the path) and return its model name.

        Give that name to `RolloutClient.set_model`. Raises ControlError, all servers unchanged.
        """
        model = f"{self._name}-v{version}"
        if model == self.current:
            raise RolloutConfigError(f"version={version}: this version is loaded already")
        body = {"lora_name": model, "lora_path": str(folder)}
        problems = on_all(self._endpoints, lambda e: _post(e, "/v1/load_lora_adapter", body, self._timeout_s))
        if problems:
            self._unload(model, [e for e in self._endpoints if e.url not in problems])
            _raise(f"loading the adapter {folder}", problems)
        old, self.current = self.current, model
        if old is not None:
            _raise(f"unloading the adapter {old}", self._unload(old, self._endpoints))
        return model

    def unload(self) -> None:
        """Back to the base model."""
        old, self.current = self.current, None
        if old is not None:
            _raise(f"unloading the adapter {old}", self._unload(old, self._endpoints))

    def _unload(self, model: str, endpoints: Sequence[Endpoint]) -> dict[str, str]:
        body = {"lora_name": model}
        return on_all(endpoints, lambda e: _post(e, "/v1/unload_lora_adapter", body, self._timeout_s))
