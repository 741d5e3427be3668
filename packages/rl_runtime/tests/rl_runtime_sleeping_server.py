"""A server with the sleep, weight update and completion routes of vLLM 0.32, which holds no model.

A CPU server of vLLM refuses sleep mode. The semantics are those of `EngineCore.sleep` and `wake_up` and of
`Executor.sleep` and `wake_up`: scheduling resumes only when all memory is back, level 0 pauses scheduling alone, and a
tag that does not sleep is ignored. What would crash a real server or make it generate nonsense is in `crimes`.
"""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from rollout_vllm import Endpoint

TAGS = frozenset({"weights", "kv_cache"})
KEY = "k"


class SleepingServer:
    """A `rollout_vllm.servers.process.Server`. Answers while `alive`.

    faults: action ("sleep", "wake_up", "update_weights") or tag ("kv_cache") -> "error" (HTTP 500), "hang", or "lie"
    (200 without effect); each is used once.
    """

    def __init__(self, index: int) -> None:
        self.index, self.log_path = index, f"server_{index}.log"
        self.alive = True
        self.faults: dict[str, str] = {}
        self.crimes: list[str] = []
        self.calls: list[str] = []
        self.num_starts = 0
        self._closed = threading.Event()
        self._changed = threading.Condition()
        handler = type("Handler", (_Handler,), {"server_state": self})
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._http.daemon_threads = True
        threading.Thread(target=self._http.serve_forever, args=(0.01,), daemon=True).start()
        self.endpoint = Endpoint(f"http://127.0.0.1:{self._http.server_address[1]}", KEY, "policy")
        self._load()

    def _load(self) -> None:
        """As after a start: awake, with the weights of the model folder."""
        self.sleeping: set[str] = set()
        self.paused, self.updating = False, False
        self.weights: int | None = -1
        """Policy version; -1: those of the folder, None: discarded."""

    # ------------------------------------------------ rollout_vllm.servers.process.Server

    def start(self) -> None:
        self.num_starts += 1
        self._load()
        self.alive = True

    def wait_ready(self, deadline: float) -> None: ...
    def reason(self) -> str:
        return "it was stopped"

    def ask_to_stop(self) -> None: ...
    def stop(self) -> None:
        with self._changed:
            self.alive = False
            self._changed.notify_all()

    def release_port(self) -> None: ...

    def close(self) -> None:
        self.stop()
        self._closed.set()
        self._http.shutdown()
        self._http.server_close()

    # -------------------------------------------------------------------------- routes

    @property
    def gpu_tags(self) -> set[str]:
        """Tags of the memory on the GPU."""
        return set(TAGS - self.sleeping) if self.alive else set()

    def sleep(self, level: int) -> None:
        self.paused = True
        if level and "weights" not in self.sleeping:
            self.sleeping = set(TAGS)
            self.weights = None if level == 2 else self.weights

    def wake_up(self, tags: list[str] | None) -> None:
        wanted = TAGS if tags is None else [tag for tag in tags if tag != "scheduling"]
        if all(tag in self.sleeping for tag in wanted):
            self.sleeping -= set(wanted)
        if not self.sleeping:
            self.paused = False

    def update(self, path: str, version: int) -> None:
        if "weights" in self.sleeping:
            self.crimes.append(f"{path} while the weights sleep")
        if not self.paused:
            self.crimes.append(f"{path} while requests are scheduled")
        if path == "/start_weight_update":
            self.updating = True
        elif path == "/update_weights":
            self.weights = version
        else:
            self.updating = False

    def complete(self, body: Any) -> Any:
        with self._changed:
            self._changed.wait_for(lambda: not (self.paused and self.alive), timeout=60)
        if self.sleeping:
            self.crimes.append(f"generation while {sorted(self.sleeping)} sleep")
        if self.weights is None:
            self.crimes.append("generation without weights")
        tokens = [7] * body["max_tokens"]
        choice = {"finish_reason": "length", "token_ids": tokens, "logprobs": {"token_logprobs": [-1.0] * len(tokens)}}
        return {"choices": [{"index": i} | choice for i in range(body["n"])]}

    def answer(self, method: str, target: str, body: Any) -> tuple[int, Any] | None:
        """(status, JSON); None: the connection is closed."""
        parts = urlsplit(target)
        path, query = parts.path, parse_qs(parts.query)
        self.calls.append(f"{method} {target}")
        names = [path[1:], *query.get("tags", ())] if query.get("level") != ["0"] else []
        fault = next((self.faults.pop(name) for name in names if name in self.faults), None)
        if fault == "hang":
            while self.alive and not self._closed.wait(0.01):
                pass
        if not self.alive:
            return None
        if fault == "error":
            return 500, {"error": {"message": "CUDA out of memory"}}
        if path == "/v1/completions":
            return 200, self.complete(body)
        with self._changed:
            answer = self._control(path, query, body, lies=fault == "lie")
            self._changed.notify_all()
        return answer

    def _control(self, path: str, query: dict[str, list[str]], body: Any, *, lies: bool) -> tuple[int, Any]:
        if path == "/sleep":
            if not lies:
                self.sleep(int(query["level"][0]))
        elif path == "/wake_up":
            if not lies:
                self.wake_up(query.get("tags"))
        elif path == "/is_sleeping":
            return 200, {"is_sleeping": self.paused or bool(self.sleeping)}
        elif path in ("/start_weight_update", "/update_weights", "/finish_weight_update"):
            self.update(path, int((body or {}).get("update_info", {}).get("version", 0)))
        elif path not in ("/health", "/reset_prefix_cache", "/reset_encoder_cache", "/abort_requests", "/metrics"):
            return 404, {"detail": "Not Found"}
        return 200, {}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = 1 << 16  # one packet per answer; a second one would wait for the acknowledgement of the first
    server_state: SleepingServer

    def do_GET(self) -> None:
        self._answer("GET", None)

    def do_POST(self) -> None:
        raw = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self._answer("POST", json.loads(raw) if raw else None)

    def _answer(self, method: str, body: Any) -> None:
        answer = self.server_state.answer(method, self.path, body) if self.server_state.alive else None
        if answer is None:
            self.close_connection = True
            return
        raw = json.dumps(answer[1]).encode()
        self.send_response(answer[0])
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def log_message(self, *_: Any) -> None: ...


@contextmanager
def sleeping_servers(count: int) -> Iterator[list[SleepingServer]]:
    """`count` servers."""
    servers = [SleepingServer(index) for index in range(count)]
    try:
        yield servers
    finally:
        for server in servers:
            server.close()
