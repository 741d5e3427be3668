"""HTTP exchanges with the servers: connections per event loop, keys, time limits, the model's name."""

from __future__ import annotations

import asyncio
import json
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, Self

import aiohttp

from ..config import RolloutConfig
from ..samples import Endpoint
from ._loop import LoopThread
from .protocol import MalformedAnswerError, error_message

# Shorter than the 5 s after which uvicorn closes an idle connection, so that a stale one is rarely picked up at all.
_KEEP_ALIVE_S = 3.0


class Transport:
    """One exchange at a time is one attempt: nothing here is tried again."""

    def __init__(self, endpoints: Sequence[Endpoint], config: RolloutConfig) -> None:
        self._endpoints, self._config = tuple(endpoints), config
        self._models = [endpoint.model for endpoint in self._endpoints]
        self._sessions: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, aiohttp.ClientSession]
        self._sessions = weakref.WeakKeyDictionary()

    async def exchange(
        self,
        server: int,
        method: str,
        path: str,
        body: Any = None,
        *,
        timeout_s: float | None = None,
        request_id: str | None = None,
    ) -> tuple[int, Mapping[str, str], bytes]:
        """(status, headers, body). Raises TimeoutError or an aiohttp.ClientError."""
        endpoint = self._endpoints[server]
        headers = {"Authorization": f"Bearer {endpoint.api_key}"} if endpoint.api_key else {}
        if request_id is not None:
            headers["X-Request-Id"] = request_id
        timeout = aiohttp.ClientTimeout(
            total=timeout_s or self._config.request_timeout_s, sock_connect=self._config.connect_timeout_s
        )
        url = endpoint.url.rstrip("/") + path
        async with self._session().request(method, url, json=body, headers=headers, timeout=timeout) as response:
            return response.status, response.headers, await response.read()

    async def model_of(self, server: int) -> str:
        """The name the server's model goes by; asked for once where the endpoint does not say."""
        known = self._models[server]
        if known is not None:
            return known
        status, _, raw = await self.exchange(server, "GET", "/v1/models")
        if status != 200:
            raise MalformedAnswerError(f"/v1/models: {error_message(status, raw.decode('utf-8', 'replace'))}")
        try:
            name = str(json.loads(raw)["data"][0]["id"])
        except (ValueError, LookupError, TypeError):
            raise MalformedAnswerError("/v1/models names no model") from None
        self._models[server] = name
        return name

    def _session(self) -> aiohttp.ClientSession:
        loop = asyncio.get_running_loop()
        session = self._sessions.get(loop)
        if session is None or session.closed:
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_S)
            session = self._sessions[loop] = aiohttp.ClientSession(connector=connector, trust_env=False)
        return session

    async def aclose(self) -> None:
        """Close the running event loop's connections."""
        session = self._sessions.pop(asyncio.get_running_loop(), None)
        if session is not None:
            await session.close()


class HttpClient:
    """What asks servers: a transport, and an event loop of its own for callers that have none."""

    def __init__(self, endpoints: Sequence[Endpoint], config: RolloutConfig, *, thread_name: str) -> None:
        self._transport = Transport(endpoints, config)
        self._background = LoopThread(thread_name)

    async def aclose(self) -> None:
        """Close the connections of the running event loop."""
        await self._transport.aclose()

    def close(self) -> None:
        """Cancel what runs in the client's own loop and close what it opened. Idempotent."""
        if self._background.running:
            self._background.settle(cancel=True)
            self._background.run(self.aclose())
            self._background.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
