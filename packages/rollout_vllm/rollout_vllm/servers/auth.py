"""ASGI middleware that requires the API key on every route of a server, including the control routes.

vLLM's --api-key protects only /v1 and a few other paths; the routes for pausing, weight updates and metrics stay open.
This middleware rejects every HTTP or websocket request without the bearer token.
"""

import hashlib
import os
import secrets

from .asgi import App, Message, Receive, Send, answer

KEY_VARIABLE = "PLINTH_SERVER_API_KEY"
"""Not VLLM_API_KEY: vLLM 0.26 makes that part of the key of its compiled graphs and writes it beside them, so that a
server with a new random key would compile everything again."""


class ApiKeyMiddleware:
    """Answers 401 unless the request carries `Authorization: Bearer <key>`."""

    def __init__(self, app: App) -> None:
        key = os.environ.get(KEY_VARIABLE, "")
        if not key:
            raise RuntimeError(f"{KEY_VARIABLE} is empty: every client could use the server")
        self._app = app
        self._digest = hashlib.sha256(key.encode()).digest()

    def _allowed(self, scope: Message) -> bool:
        for name, value in scope.get("headers", ()):
            if name.lower() == b"authorization":
                scheme, _, token = value.partition(b" ")
                given = hashlib.sha256(token.strip()).digest()
                return bool(scheme.lower() == b"bearer" and secrets.compare_digest(given, self._digest))
        return False

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket") or self._allowed(scope):
            await self._app(scope, receive, send)
            return
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return
        error = {"message": "the API key is missing or wrong", "code": 401}
        await answer(send, {"error": error}, status=401, headers=[(b"www-authenticate", b"Bearer")])
