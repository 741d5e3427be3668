"""The trainer's view of a vLLM server: how to start it, whether it can be pushed to, and its control routes."""

import json
import shlex
from typing import Any
from urllib.parse import urlencode, urlsplit

from plinth_base.endpoint import NO_ANSWER, call, message_of
from plinth_base.endpoint import Endpoint as Endpoint

from ..config import BACKEND
from ..errors import ServerError, SyncConfigError

_SERVER_ARGS = ("--weight-transfer-config", json.dumps({"backend": BACKEND}))


def server_args() -> list[str]:
    """Command-line arguments for ``python -m vllm.entrypoints.openai.api_server``, for all transports and devices."""
    return list(_SERVER_ARGS)


def server_env(device_type: str = "cuda") -> dict[str, str]:
    """Environment variables of the server process. They open vLLM's control routes: keep the port private.

    For ``cpu`` they also enable huge pages in the C library, which makes packing large layers up to 1.8 times faster.
    """
    huge_pages = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"} if device_type == "cpu" else {}
    return {"VLLM_SERVER_DEV_MODE": "1", **huge_pages}


def check_server(endpoint: Endpoint, *, timeout_s: float = 120.0) -> None:
    """Check that weights can be pushed to an existing server, without changing it.

    A vLLM release that does not report its backend passes if the control routes exist; the first push checks the rest.

    Raises:
        ServerError: no answer within ``timeout_s``, the API key is rejected, or the control routes are missing.
        SyncConfigError: the server was started without this package's backend.
    """
    control = ServerControl(endpoint.url, endpoint.api_key, timeout_s)
    control.world_size()
    try:
        backend = control.backend()
    except LookupError:
        return
    except ServerError as error:
        if error.status == 404:
            return
        raise
    if backend != BACKEND:
        other = f"the weight-transfer backend {backend!r}" if backend else "no weight-transfer backend"
        raise SyncConfigError(
            f"the server was started with {other}",
            field="url",
            value=endpoint.url,
            remedy=f"start it with {shlex.join(_SERVER_ARGS)}",
        )


class ServerControl:
    """Synchronous HTTP client of one server's weight-transfer routes (VLLM_SERVER_DEV_MODE=1), vLLM 0.26 to 0.32.

    Opens a connection per call: uvicorn drops idle connections after seconds, and a sync makes about ten calls. Every
    method raises ServerError.
    """

    def __init__(self, url: str, api_key: str | None, timeout_s: float) -> None:
        try:
            parts = urlsplit(url)
            is_valid = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        except (ValueError, TypeError, AttributeError):
            is_valid = False
        if not is_valid:
            raise SyncConfigError(field="url", value=url, allowed="http://host:port")
        self.url = url.rstrip("/").removesuffix("/v1")
        self._endpoint = Endpoint(self.url, api_key)
        self._timeout_s = timeout_s

    def world_size(self) -> int:
        """Number of workers that receive weights: TP x PP x DP."""
        answer = self._call("GET", "/get_world_size").get("world_size")
        if not isinstance(answer, int) or answer < 1:
            raise ServerError(self.url, "GET /get_world_size", 200, f"world_size is {answer!r}: is this a vLLM server?")
        return answer

    def backend(self) -> str | None:
        """The weight-transfer backend that the server was started with, or None. The first call takes seconds.

        Raises LookupError when the vLLM release does not report it.
        """
        config = self._call("GET", "/server_info?config_format=json")["vllm_config"]
        if not isinstance(config, dict):
            raise LookupError("vllm_config")
        transfer = config["weight_transfer_config"]
        if transfer is not None and not isinstance(transfer, dict):
            raise LookupError("weight_transfer_config")
        return None if transfer is None else str(transfer["backend"])

    def claim(self, init_info: dict[str, Any]) -> None:
        """Become the owner of the server. Fails while another pusher is alive."""
        self._call("POST", "/init_weight_transfer_engine", {"init_info": init_info})

    def pause(self, timeout_s: float, *, holds_requests: bool = False) -> None:
        """Wait until the running requests have finished, or hold them after the current step; hold new requests.

        ``holds_requests``: see `SyncConfig`. Sleep level 0 does the same as ``/pause``, without the 20 ms that its
        handler sleeps after the engine has paused and without dropping the caches.
        """
        mode = "keep" if holds_requests else "wait"
        self._call("POST", "/sleep?" + urlencode({"level": 0, "mode": mode}), timeout_s=timeout_s)

    def start(self) -> None:
        """Open an update session on every worker."""
        self._call("POST", "/start_weight_update", {})

    def update(self, update_info: dict[str, Any], timeout_s: float | None) -> None:
        """Run one transfer; returns when every worker has loaded everything. ``timeout_s`` None: no limit."""
        self._call("POST", "/update_weights", {"update_info": update_info}, timeout_s=timeout_s)

    def finish(self, version: int) -> None:
        """Publish the version. vLLM before 0.30 does not keep its number."""
        self._call("POST", "/finish_weight_update", {"weight_version": str(version)})

    def register_adapter(self, name: str, path: str) -> None:
        """Register an adapter by name unless it is registered; the workers hold its tensors under ``path``."""
        models = self._call("GET", "/v1/models").get("data")
        if not any(isinstance(model, dict) and model.get("id") == name for model in models or ()):
            self._call("POST", "/v1/load_lora_adapter", {"lora_name": name, "lora_path": path})

    def drop_prefix_cache(self, running_requests: str = "auto") -> None:
        """Drop the prefix cache of the old policy.

        ``running_requests``: with ``recompute`` also the KV cache of the held requests; with ``keep`` only the plugin
        (`vllm_plugin.held_requests`) can drop the prefix cache beside them.
        """
        query = "?reset_running_requests=true" if running_requests == "recompute" else ""
        answer = self._call("POST", "/reset_prefix_cache" + query)
        if isinstance(answer, dict) and answer.get("success") is False:
            detail = "the server did not reset its prefix cache, because requests hold a part of it"
            raise ServerError(self.url, "POST /reset_prefix_cache", 200, detail)

    def drop_encoder_cache(self) -> None:
        """Drop the encoder outputs of the old policy."""
        self._call("POST", "/reset_encoder_cache")

    def resume(self) -> None:
        """Resume scheduling. A server that also sleeps at a higher level resumes when its memory is restored."""
        self._call("POST", "/wake_up?" + urlencode({"tags": "scheduling"}))

    def _call(
        self, method: str, path: str, body: dict[str, Any] | None = None, timeout_s: float | None = -1.0
    ) -> dict[str, Any]:
        """``timeout_s``: -1 for that of this object, None for no limit."""
        step = f"{method} {path.partition('?')[0]}"
        timeout = self._timeout_s if timeout_s == -1.0 else timeout_s
        try:
            status, text = call(self._endpoint, method, path, body, timeout_s=timeout)
        except NO_ANSWER as error:
            detail = "timed out" if isinstance(error, TimeoutError) else str(error) or type(error).__name__
            raise ServerError(self.url, step, 0, detail) from error
        if status != 200:
            raise ServerError(self.url, step, status, _explain(status, text))
        try:
            answer = json.loads(text) if text else {}
        except (ValueError, RecursionError):
            return {}
        return answer if isinstance(answer, dict) else {}


def _explain(status: int, text: str) -> str:
    """The message in vLLM's error body, or how to fix a missing route or a rejected key."""
    if status == 404 and "Not Found" in text:
        return (
            "no such route: start the server with weight_sync.server_args() and server_env(); for adapters also with "
            "--enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"
        )
    if status in (401, 403):
        return "rejected: check the API key"
    return message_of(text).strip()[:2000]
