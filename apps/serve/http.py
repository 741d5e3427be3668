"""Routes of the API: the key, the limits, and errors as the SDK expects them.

A request without the key gets 401 and nothing else. 400 is a request that cannot be read, 404 an unknown session,
model or route, 413 a body that is too large, 429 a full queue: the SDK sends such a request again. An error of a
request that was accepted is the result of its future, of the category `user`, or `server` for a fault of the service.
"""

import asyncio
import json
import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import Future
from contextlib import asynccontextmanager
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from apps.serve.requests import BusyError, Result
from apps.serve.service import NotFoundError, Service
from apps.serve.wire import read_request
from ds_engine import EngineConfigError
from plinth_base.errors import PlinthError
from rl_runtime import InputError
from rollout_vllm.errors import RolloutConfigError

POLL_S = 20.0
"""Longest time that a request for a result waits for it; then the client asks again."""
_PROTO = "application/x-protobuf"
_USER_ERRORS = (InputError, NotFoundError, EngineConfigError, RolloutConfigError)
_REFUSED = (HTTPException, ClientDisconnect, BusyError, *_USER_ERRORS, KeyError, TypeError, ValueError)
"""Errors of a request that was not accepted."""
_SAME_NAME = (
    *("create_session", "create_model", "get_info", "optim_step", "save_weights", "load_weights"),
    *("save_weights_for_sampler", "create_sampling_session", "weights_info"),
)
"""Calls whose method has the name of the route."""
_log = logging.getLogger(__name__)


class WithKey:
    """Lets only requests with the key through."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self._app, self._key = app, key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = dict(scope.get("headers", ())).get(b"x-api-key", b"")
        if scope["type"] == "http" and not secrets.compare_digest(given, self._key):
            await JSONResponse({"detail": "unauthorized"}, 401)(scope, receive, send)
            return
        await self._app(scope, receive, send)


def application(start: Callable[[], Service], *, key: str, max_request_bytes: int) -> ASGIApp:
    """The ASGI application; `start` makes the service in the event loop."""
    services: list[Service] = []

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        services.append(start())
        yield
        await services[0].close()

    async def body_of(request: Request) -> bytes:
        body = bytearray()
        async for part in request.stream():
            body += part
            if len(body) > max_request_bytes:
                raise HTTPException(413, f"a body of more than {max_request_bytes} bytes (api.max_request_bytes)")
        if (encoding := request.headers.get("content-encoding")) is not None:
            raise HTTPException(415, f"content-encoding: {encoding}")
        return bytes(body)

    def route(path: str, handle: Callable[[Service, Request], Awaitable[Response]], verb: str = "POST") -> Route:
        async def endpoint(request: Request) -> Response:
            return await handle(services[0], request)

        return Route(f"/api/v1/{path}", endpoint, methods=[verb])

    def call(path: str, method: str, verb: str = "POST") -> Route:
        async def handle(service: Service, request: Request) -> Response:
            body = [await json_of(request)] if verb == "POST" else []
            return JSONResponse(getattr(service, method)(*body, *request.path_params.values()))

        return route(path, handle, verb)

    def fixed(path: str, verb: str, **answer: Any) -> Route:
        async def handle(_: Service, __: Request) -> Response:
            return JSONResponse(answer)

        return route(path, handle, verb)

    async def json_of(request: Request) -> dict[str, Any]:
        body = json.loads(await body_of(request) or b"{}")
        if not isinstance(body, dict):
            raise HTTPException(400, "a malformed request: no JSON object")
        return body

    async def forward_backward(service: Service, request: Request) -> Response:
        return JSONResponse(service.forward_backward(read_request(await body_of(request))))

    async def retrieve(service: Service, request: Request) -> Response:
        request_id = str((await json_of(request)).get("request_id"))
        try:
            future = service.requests[request_id]
        except KeyError:
            return JSONResponse({"detail": f"request_id {request_id}: unknown, or of a server that ran before"}, 410)
        waiting = asyncio.wrap_future(future)
        done, _ = await asyncio.wait({asyncio.ensure_future(_settled(waiting))}, timeout=POLL_S)
        if not done:
            return JSONResponse({"type": "try_again", "request_id": request_id, "queue_state": "active"}, 408)
        service.requests.answered(request_id)
        return answer_of(future)

    async def no_content(service: Service, request: Request) -> Response:
        service.cancel(await json_of(request))
        return Response(status_code=204)

    routes = [
        fixed("healthz", "GET", status="ok"),
        fixed("telemetry", "POST", status="accepted"),  # of what the SDK reports nothing is read
        fixed("client/dynamic_config", "POST", sample_cancel_enabled=True),
        call("get_server_capabilities", "capabilities", "GET"),
        call("client/config", "client_config"),
        call("session_heartbeat", "heartbeat"),
        call("sessions/{session_id}/finish", "finish"),
        *(call(name, name) for name in _SAME_NAME),
        route("forward_backward", forward_backward),
        call("samplers/{sampler_id}", "get_sampler", "GET"),
        call("asample", "sample"),
        route("retrieve_future", retrieve),
        route("cancel_future", no_content),
        call("training_runs", "training_runs", "GET"),
        call("training_runs/{run_id}", "training_run", "GET"),
        call("training_runs/{run_id}/checkpoints", "checkpoints", "GET"),
        call("checkpoints", "checkpoints", "GET"),
    ]
    answers = {404: _unsupported, 405: _unsupported} | dict.fromkeys(_REFUSED, _refused)
    return WithKey(Starlette(routes=routes, lifespan=lifespan, exception_handlers=answers), key)


async def _settled(waiting: "asyncio.Future[Result]") -> None:
    """Waits for a future whose result, or error, somebody else reads."""
    await asyncio.wait({waiting})
    if not waiting.cancelled():
        waiting.exception()


async def _refused(_: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException):
        return JSONResponse({"detail": error.detail}, error.status_code)
    status = 429 if isinstance(error, BusyError) else 404 if isinstance(error, NotFoundError) else 400
    text = str(error) if isinstance(error, PlinthError) else f"a malformed request: {error!r}"
    return JSONResponse({"detail": text}, status)


async def _unsupported(request: Request, _: Exception) -> Response:
    detail = f"plinth serve does not have {request.method} {request.url.path}; docs/serve.md lists what it has"
    return JSONResponse({"detail": detail}, 404)


def answer_of(future: "Future[Result]") -> Response:
    """The answer to a client that asks for the result of a request that has ended."""
    if (error := future.exception()) is not None:
        is_user = isinstance(error, _USER_ERRORS)
        if not is_user:
            _log.error("a request failed", exc_info=error)
        text = str(error) if isinstance(error, PlinthError) else f"{type(error).__name__}: {error}"
        return JSONResponse({"error": text, "category": "user" if is_user else "server"})
    result = future.result()
    return Response(result, media_type=_PROTO) if isinstance(result, bytes) else JSONResponse(result)
