"""A reward service with the protocols of `reward.service`: ours, and vLLM's /classify, /pooling and chat completions.

It scores a text by its length, so that a test can tell from a score which text was read.
"""

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

KEY = "secret"
MODEL = "reward-model"


def quality(text: str | list[int]) -> float:
    """Length in thousands of characters or tokens."""
    return len(text) / 1000


@dataclass
class RewardService:
    url: str
    asked: list[tuple[str, Any]] = field(default_factory=list)
    """(path, body) of every POST."""
    num_labels: int = 2
    """Of the classifier; 1: a reward model."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    service: RewardService

    def do_GET(self) -> None:
        self._answer(200, {"data": [{"id": MODEL}]} if self.path == "/v1/models" else {})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.service.asked.append((self.path, body))
        if self.headers["Authorization"] != f"Bearer {KEY}":
            self._answer(401, {"error": {"message": "the API key is wrong"}})
        elif self.path != "/score" and body.get("model") != MODEL:
            self._answer(404, {"error": {"message": f"no model {body.get('model')!r}"}})
        else:
            answer = _answer_to(self.path, body, self.service.num_labels)
            self._answer(200 if answer else 404, answer or {"detail": "Not Found"})

    def _answer(self, status: int, answer: Any) -> None:
        raw = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def log_message(self, *_: Any) -> None: ...


def _answer_to(path: str, body: Any, num_labels: int) -> Any:
    if path == "/score":
        return {"score": quality(body["response"])} if body["ground_truth"] else {}
    if path == "/classify":
        probs = _probs(body["input"])[-num_labels:]
        return {"data": [{"index": 0, "label": "LABEL_1", "num_classes": num_labels, "probs": probs}]}
    if path == "/pooling":
        return {"data": [{"index": 0, "object": "pooling", "data": [[0.0], [quality(body["input"])]]}]}
    if path == "/v1/chat/completions":
        [message] = body["messages"]
        [number] = re.findall(r"SCORE (\d+): <number>", message["content"])
        text = f"Out of 10 points:\n**SCORE {number}: {quality(message['content'])}**\n"
        return {"choices": [{"index": 0, "message": {"role": "assistant", "content": text}}]}
    return None


def _probs(text: Any) -> list[float]:
    return [1 - quality(text), quality(text)]


@contextmanager
def reward_service(*, num_labels: int = 2) -> Iterator[RewardService]:
    """The service on a free port of the loopback."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _Handler) as server:
        service = RewardService(f"http://127.0.0.1:{server.server_port}", num_labels=num_labels)
        server.RequestHandlerClass = type("Handler", (_Handler,), {"service": service})
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield service
        finally:
            server.shutdown()
