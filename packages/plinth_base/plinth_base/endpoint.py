"""Address of a server, and blocking HTTP calls to it."""

import http.client
import json
from dataclasses import dataclass, field
from urllib.parse import urlsplit

NO_ANSWER = (OSError, http.client.HTTPException)
"""Exceptions of `call` when the server does not answer."""


@dataclass(frozen=True)
class Endpoint:
    """One vLLM server, or another one with the same API."""

    url: str
    """``http://host:port``."""
    api_key: str | None = field(default=None, repr=False)
    """Bearer token."""
    model: str | None = None
    """Name of the server's model; with None a client asks the server at first use."""


def message_of(body: str) -> str:
    """The message in the JSON of an error, as vLLM and FastAPI write it; another text as it is."""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return body
    while isinstance(value, dict) and (key := next(filter(value.get, ("error", "detail", "message")), None)):
        value = value[key]
    return str(value)


def error_message(status: int, body: str | bytes) -> str:
    """One line that describes an HTTP error: the server's own message if there is one, at most 300 characters."""
    text = body if isinstance(body, str) else body.decode("utf-8", "replace")
    line = " ".join(message_of(text).split())
    return f"HTTP {status}: {line[:300]}" if line else f"HTTP {status}"


def call(
    endpoint: Endpoint, method: str, path: str, body: object | None = None, *, timeout_s: float | None = 30.0
) -> tuple[int, str]:
    """Send a request with a JSON body; return (status, text). Raises one of `NO_ANSWER`. timeout_s None: no limit."""
    parts = urlsplit(endpoint.url)
    connection_class = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    assert parts.hostname is not None, endpoint.url
    connection = connection_class(parts.hostname, parts.port, timeout=timeout_s)
    headers = {"Content-Type": "application/json", "Connection": "close"}
    if endpoint.api_key:
        headers["Authorization"] = f"Bearer {endpoint.api_key}"
    payload = None if body is None else json.dumps(body)
    try:
        connection.request(method, parts.path.rstrip("/") + path, payload, headers)
        response = connection.getresponse()
        return response.status, response.read().decode("utf-8", "replace")
    finally:
        connection.close()
