"""ASGI middleware that gives the completion requests of this package's client to vLLM's handler without its web
framework: routes, dependencies, validation in Python and counters take a third of the server's time for a request."""

import asyncio
from typing import Any

from ..asgi import App, Message, Receive, Send, answer, body_of, replay
from .buffering import DIRECT, PACKED

ROUTE = "/v1/completions"


class CompletionMiddleware:
    """Answers requests whose client reads packed answers; vLLM's own route answers others and everything that fails.

    `http_*` counters of /metrics leave these requests out; vLLM's own (`vllm:*`) do not.
    """

    marker = ""
    """Name in `vllm_xargs` of such a client; `_serve.py` sets it. Empty: vLLM's route answers all requests."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if not self.marker or (scope.get("method"), scope.get("path")) != ("POST", ROUTE):
            await self._app(scope, receive, send)
            return
        body = await body_of(receive)
        request = _packed_request(body, self.marker)
        task = None if request is None else asyncio.create_task(_completion(scope, request))
        if task is not None and not await _ends_before_disconnect(task, receive):
            return
        if task is None or task.exception() is not None or not (text := task.result()):
            await self._app(scope, replay(body, receive), send)
        else:
            await answer(send, text)


def _packed_request(body: bytes, marker: str) -> Any:
    """The `CompletionRequest` of a client that reads packed answers; None for others, and for what is none."""
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest

    if marker.encode() not in body:
        return None
    try:
        request = CompletionRequest.model_validate_json(body)
    except ValueError:
        return None
    if (request.vllm_xargs or {}).get(marker) != PACKED or request.stream:
        return None
    request.vllm_xargs[marker] = DIRECT
    return request


async def _completion(scope: Message, request: Any) -> bytes:
    """The JSON of vLLM's answer; empty for an error."""
    from starlette.requests import Request
    from vllm.entrypoints.openai.completion.protocol import CompletionResponse

    handler = scope["app"].state.openai_serving_completion
    response = await handler.create_completion(request, Request(scope))
    text: str | bytes = response.model_dump_json() if isinstance(response, CompletionResponse) else response
    return text.encode() if isinstance(text, str) else text if isinstance(text, bytes) else b""


async def _ends_before_disconnect(task: asyncio.Task[bytes], receive: Receive) -> bool:
    """Waits for `task`, and cancels it when the client disconnects, which aborts its requests; then False."""
    gone = asyncio.ensure_future(receive())  # the body is read: the next message is that of a disconnect
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        return task.done()
    finally:
        task.cancel()
        gone.cancel()
