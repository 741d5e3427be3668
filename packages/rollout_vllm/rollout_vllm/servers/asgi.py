"""Types and small parts of the ASGI middleware of a server."""

import json
from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from typing import Any

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]


async def body_of(receive: Receive) -> bytes:
    """The whole body of a request."""
    body, more = b"", True
    while more:
        message = await receive()
        body += message.get("body", b"")
        more = message.get("more_body", False)
    return body


def replay(body: bytes, receive: Receive) -> Receive:
    """`receive` of a request whose body has been read."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive_again() -> Message:
        return messages.pop() if messages else await receive()

    return receive_again


async def answer(
    send: Send,
    value: Mapping[str, Any] | bytes,
    *,
    status: int = 200,
    headers: Sequence[tuple[bytes, bytes]] = (),
) -> None:
    """Send a JSON answer; bytes are JSON already."""
    body = value if isinstance(value, bytes) else json.dumps(value).encode()
    sent = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body)), *headers]
    await send({"type": "http.response.start", "status": status, "headers": sent})
    await send({"type": "http.response.body", "body": body})
