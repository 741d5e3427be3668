"""ASGI middleware that tells vLLM's engine core which policy version the server's weights have.

A trainer that pushes weights ends with `POST /finish_weight_update {"weight_version": "7"}`, while the server is
paused. vLLM before 0.30 drops that number. Here it reaches the engine core before the trainer gets its answer, hence
before anything is sampled with the new weights, and the answers of `/v1/completions` say which version sampled which
token (see buffering.py). `GET /plinth/policy_version` returns the current one.
"""

import json

from .asgi import App, Message, Receive, Send, answer, body_of, replay

PUBLISH = "plinth_publish"
"""Method of the engine core: (version or None) -> version in use. With a version, new tokens belong to it."""

ROUTE = "/plinth/policy_version"
_FINISH = "/finish_weight_update"


class PolicyVersionMiddleware:
    """Passes every request on, and publishes the version of a weight update that succeeded.

    enabled: whether the engine core notes versions; `_serve.py` sets it.
    """

    enabled = False

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        request = (scope.get("method"), scope.get("path")) if self.enabled and scope["type"] == "http" else ()
        if request == ("GET", ROUTE):
            await answer(send, {"policy_version": await _publish(scope, None)})
        elif request == ("POST", _FINISH):
            body = await body_of(receive)
            await self._app(scope, replay(body, receive), _publishing(scope, version_in(body), send))
        else:
            await self._app(scope, receive, send)


def version_in(body: bytes) -> int | None:
    """The policy version in the body of a finished weight update; None if it has no number, 0 or more."""
    try:
        given = json.loads(body)["weight_version"]
    except (ValueError, LookupError, TypeError, RecursionError):
        return None
    return int(given) if str(given).isdecimal() else None


async def _publish(scope: Message, version: int | None) -> int:
    engine = scope["app"].state.engine_client.engine_core
    return int(await engine.call_utility_async(PUBLISH, version))


def _publishing(scope: Message, version: int | None, send: Send) -> Send:
    """`send` that publishes the version (-1: unknown) before the first part of a successful answer."""

    async def send_and_publish(message: Message) -> None:
        if message["type"] == "http.response.start" and message["status"] == 200:
            await _publish(scope, -1 if version is None else version)
        await send(message)

    return send_and_publish
