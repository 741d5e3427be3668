"""Blocking HTTP calls to a server. Standard library only."""

import http.client
import json
from urllib.parse import urlsplit

from plinth_base import Endpoint

NO_ANSWER = (OSError, http.client.HTTPException)
"""Exceptions of `call` when the server does not answer."""


def call(
    endpoint: Endpoint, method: str, path: str, body: object | None = None, *, timeout_s: float = 30.0
) -> tuple[int, str]:
    """Send one request with a JSON body and return (status, text). Raises one of `NO_ANSWER`."""
    parts = urlsplit(endpoint.url)
    connection_class = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    assert parts.hostname is not None, endpoint.url
    connection = connection_class(parts.hostname, parts.port, timeout=timeout_s)
    headers = {"Connection": "close"}
    if endpoint.api_key:
        headers["Authorization"] = f"Bearer {endpoint.api_key}"
    payload = None
    if body is not None:
        payload = json.dumps(body)
        headers["Content-Type"] = "application/json"
    try:
        connection.request(method, parts.path.rstrip("/") + path, payload, headers)
        response = connection.getresponse()
        return response.status, response.read().decode("utf-8", "replace")
    finally:
        connection.close()


def try_generation(endpoint: Endpoint, *, timeout_s: float) -> str | None:
    """Generate one token. Returns None on success, else the problem in a few words."""
    body = {"prompt": [1, 2], "max_tokens": 1, "temperature": 1.0, "seed": 0, "n": 1, "logprobs": 0}
    if endpoint.model is not None:
        body["model"] = endpoint.model
    try:
        status, text = call(endpoint, "POST", "/v1/completions", body, timeout_s=timeout_s)
    except NO_ANSWER as error:
        return f"{type(error).__name__}: {error}"
    return None if status == 200 else f"HTTP {status}: {text[:200]}"
