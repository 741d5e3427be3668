"""Completion requests that vLLM's handler gets without its web framework, and those that take vLLM's own route."""

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.entrypoints.openai.completion.protocol import CompletionResponse

from rollout_vllm.client.protocol import completion_body
from rollout_vllm.config import SamplingConfig
from rollout_vllm.servers.fast.completions import ROUTE, CompletionMiddleware
from rollout_vllm.servers.patch import IDS_ONLY

BODY = completion_body([1, 2], SamplingConfig(n=2), model="policy", seed=3)
PACKED = b'{"choices": []}'


class Direct(CompletionMiddleware):
    marker = IDS_ONLY


class Front:
    """vLLM's app and its handler of completions behind the middleware. routed: bodies that its own route got."""

    def __init__(self, answer: Any, middleware: type[CompletionMiddleware] = Direct) -> None:
        self.requests: list[Any] = []
        self.routed: list[bytes] = []
        self.was_cancelled = False
        self._answer, self._middleware = answer, middleware
        self.state = SimpleNamespace(openai_serving_completion=self)

    async def create_completion(self, request: Any, raw: Any) -> Any:
        self.requests.append((request, raw.headers.get("X-Request-Id")))
        if isinstance(self._answer, Exception):
            raise self._answer
        if self._answer is None:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                self.was_cancelled = True
                raise
        return self._answer

    async def _app(self, scope: Any, receive: Any, send: Any) -> None:
        self.routed.append((await receive())["body"])
        await send({"type": "http.response.start", "status": 400})
        await send({"type": "http.response.body", "body": b"own"})

    def post(self, body: bytes, *, path: str = ROUTE, leaves: bool = False) -> tuple[int, bytes] | None:
        """Status and body of the answer; None without one. leaves: the client disconnects after 0.1 s."""
        sent: list[Any] = []
        messages = [{"type": "http.request", "body": body[:9], "more_body": True}]
        messages += [{"type": "http.request", "body": body[9:]}]

        async def receive() -> Any:
            if messages:
                return messages.pop(0)
            await asyncio.sleep(0.1 if leaves else 60)
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            sent.append(message)

        headers = [(b"x-request-id", b"r-7")]
        scope = {"type": "http", "method": "POST", "path": path, "headers": headers, "app": self}
        asyncio.run(self._middleware(self._app)(scope, receive, send))
        return (sent[0]["status"], sent[1]["body"]) if sent else None


def test_handler_of_vllm_answers_a_packed_request_without_a_route() -> None:
    front = Front(PACKED)
    assert front.post(json.dumps(BODY).encode()) == (200, PACKED)
    [(request, request_id)] = front.requests
    assert (request.prompt, request.n, request.seed, request_id) == ([1, 2], 2, 3, "r-7")
    assert front.routed == []
    usage = {"prompt_tokens": 2}
    whole = CompletionResponse.model_validate({"model": "policy", "choices": [], "usage": usage})
    status, text = Front(whole).post(json.dumps(BODY).encode()) or (0, b"")
    assert (status, json.loads(text)["usage"]["prompt_tokens"]) == (200, 2)


@pytest.mark.parametrize("answer", [ValueError("too long"), RuntimeError("dead"), SimpleNamespace(error="no")])
def test_route_of_vllm_answers_a_request_that_fails(answer: Any) -> None:
    """Statuses and messages of errors are those of stock vLLM."""
    front, body = Front(answer), json.dumps(BODY).encode()
    assert front.post(body) == (400, b"own")
    assert front.routed == [body]


@pytest.mark.parametrize(
    "changes",
    [
        {"vllm_xargs": None},
        {"stream": True},
        {"n": "two"},
        {"path": "/v1/chat/completions"},
    ],
)
def test_other_requests_take_the_route_of_vllm(changes: dict[str, Any]) -> None:
    front, path = Front(PACKED), changes.pop("path", ROUTE)
    body = json.dumps({**BODY, **changes}).encode()
    assert front.post(body, path=path) == (400, b"own")
    assert front.requests == []
    assert b"".join(front.routed) in (body, body[:9])  # a request of another route is passed on as it comes
    off = Front(PACKED, CompletionMiddleware)
    assert off.post(json.dumps(BODY).encode()) == (400, b"own")


def test_request_ends_when_its_client_disconnects() -> None:
    front = Front(None)
    assert front.post(json.dumps(BODY).encode(), leaves=True) is None
    assert front.was_cancelled
    assert front.routed == []
