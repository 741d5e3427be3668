"""The control calls of one vLLM server: pause, claim, start, update, finish, resume. Synchronous, one server each."""

import http.client
import json
from typing import Any
from urllib.parse import urlencode, urlsplit

from .errors import ServerError, SyncConfigError


class ServerControl:
    """HTTP client of vLLM's weight-transfer routes (VLLM_SERVER_DEV_MODE=1), for releases 0.26 to 0.32.

    A new connection per call: uvicorn drops idle ones after seconds, and a sync is a handful of calls.
    """

    def __init__(self, url: str, api_key: str | None, timeout_s: float) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise SyncConfigError(f"endpoint url: {url!r} given, expected http://host:port")
        self.url = url.rstrip("/").removesuffix("/v1")
        self._parts = urlsplit(self.url)
        self._api_key = api_key
        self._timeout_s = timeout_s

    def world_size(self) -> int:
        """Number of workers that take part in an update: TP x PP x DP."""
        return int(self._call("GET", "/get_world_size")["world_size"])

    def backend(self) -> str | None:
        """The weight-transfer backend it was started with; None: with none. Takes seconds when first asked.

        Raises ServerError, and LookupError where the release does not tell.
        """
        config = self._call("GET", "/server_info?config_format=json")["vllm_config"]
        if not isinstance(config, dict):
            raise LookupError("vllm_config")
        transfer = config["weight_transfer_config"]
        return None if transfer is None else str(transfer["backend"])

    def claim(self, init_info: dict[str, Any]) -> None:
        """Become the pusher this server listens to, or fail when another one lives."""
        self._call("POST", "/init_weight_transfer_engine", {"init_info": init_info})

    def pause(self, timeout_s: float) -> None:
        """Let running requests finish, hold new ones back.

        Sleep level 0 is what ``/pause`` does without the 20 ms that its handler sleeps after the engine has paused, and
        without dropping the caches.
        """
        self._call("POST", "/sleep?" + urlencode({"level": 0, "mode": "wait"}), timeout_s=timeout_s)

    def start(self) -> None:
        """Open an update session on every worker."""
        self._call("POST", "/start_weight_update", {})

    def update(self, update_info: dict[str, Any], timeout_s: float | None) -> None:
        """Run one transfer; returns when every worker has taken everything. No time limit when None."""
        self._call("POST", "/update_weights", {"update_info": update_info}, timeout_s=timeout_s)

    def finish(self, version: int) -> None:
        """Publish. vLLM before 0.30 ignores the version."""
        self._call("POST", "/finish_weight_update", {"weight_version": str(version)})

    def register_adapter(self, name: str, path: str) -> None:
        """Make the server know an adapter by name, if it does not; its workers hold it under ``path``."""
        models = self._call("GET", "/v1/models").get("data", [])
        if not any(model.get("id") == name for model in models):
            self._call("POST", "/v1/load_lora_adapter", {"lora_name": name, "lora_path": path})

    def drop_caches(self) -> None:
        """Forget what the old policy computed: keys and values, encoder outputs."""
        self._call("POST", "/reset_encoder_cache")
        answer = self._call("POST", "/reset_prefix_cache")
        if isinstance(answer, dict) and answer.get("success") is False:
            raise ServerError(self.url, "POST /reset_prefix_cache", 200, "the server could not drop its prefix cache")

    def resume(self) -> None:
        """Serve again; a server that sleeps besides does so when its memory is back."""
        self._call("POST", "/wake_up?" + urlencode({"tags": "scheduling"}))

    def is_paused(self) -> bool:
        """Whether the server holds requests back."""
        return bool(self._call("GET", "/is_paused")["is_paused"])

    def weight_version(self) -> str | None:
        """The version last published, or None where the release does not keep it."""
        try:
            return str(self._call("GET", "/weight_info")["weight_version"])
        except ServerError as error:
            if error.status == 404:
                return None
            raise

    def _call(
        self, method: str, path: str, body: dict[str, Any] | None = None, timeout_s: float | None = -1.0
    ) -> dict[str, Any]:
        """One request. Raises ServerError with the server's own message."""
        step = f"{method} {path.partition('?')[0]}"
        timeout = self._timeout_s if timeout_s == -1.0 else timeout_s
        kind = http.client.HTTPSConnection if self._parts.scheme == "https" else http.client.HTTPConnection
        assert self._parts.hostname is not None
        connection = kind(self._parts.hostname, self._parts.port, timeout=timeout)
        headers = {"Content-Type": "application/json", "Connection": "close"}
        if self._api_key:
            headers["Authorization"] = f"Bearer {self._api_key}"
        try:
            data = None if body is None else json.dumps(body)
            connection.request(method, self._parts.path + path, body=data, headers=headers)
            response = connection.getresponse()
            text = response.read().decode(errors="replace")
        except (OSError, http.client.HTTPException) as error:
            detail = "timed out" if isinstance(error, TimeoutError) else str(error) or type(error).__name__
            raise ServerError(self.url, step, 0, detail) from error
        finally:
            connection.close()
        if response.status != 200:
            raise ServerError(self.url, step, response.status, _explain(response.status, text))
        try:
            answer = json.loads(text) if text else {}
        except json.JSONDecodeError:
            return {}
        return answer if isinstance(answer, dict) else {}


def _explain(status: int, text: str) -> str:
    """The message inside vLLM's various error bodies, and what to do about the usual ones."""
    if status == 404 and "Not Found" in text:
        return (
            "no such route: start the server with weight_sync.server_args() and server_env(); for adapters also with "
            "--enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"
        )
    if status in (401, 403):
        return "refused: check the API key"
    try:
        data = json.loads(text)
    except json.JSONDecodeError:
        return text.strip()[:2000]
    for key in ("error", "detail", "message"):
        value = data.get(key) if isinstance(data, dict) else None
        if isinstance(value, dict):
            value = value.get("message")
        if value:
            return str(value)[:2000]
    return text.strip()[:2000]
