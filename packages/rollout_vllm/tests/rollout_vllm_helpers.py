"""Shared by this package's tests: settings, requests, the check that no sample is lost, a proxy that does harm."""

from __future__ import annotations

import asyncio
import random
import re
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import aiohttp
from aiohttp import web

from rollout_vllm import Endpoint, GroupResult, Request, RolloutConfig, request_seed

VOCAB_SIZE, EOS_ID = 64, 1


def config_for_tests(**changes: Any) -> RolloutConfig:
    settings = {"max_model_len": 256, "kv_cache_gib": 0.05, "dtype": "float32", "stop_grace_s": 3.0}
    return RolloutConfig(**(settings | {"cpu_threads": 1} | changes))


def make_requests(count: int, *, length: int = 12, step: int = 0) -> list[Request]:
    chooser = random.Random(step)
    return [
        Request(
            prompt_id=f"p{i}",
            prompt_ids=[chooser.randrange(3, 64) for _ in range(length)],
            seed=request_seed(7, step, f"p{i}"),
        )
        for i in range(count)
    ]


def assert_complete(requests: list[Request], groups: list[GroupResult], n: int) -> None:
    """No sample lost, none doubled."""
    assert [g.prompt_id for g in groups] == [r.prompt_id for r in requests]
    for group in groups:
        indices = [s.sample_index for s in group.samples] + [f.sample_index for f in group.failures]
        assert sorted(indices) == list(range(n))


def wait_until(condition: Callable[[], object], timeout_s: float = 300.0) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "timed out"
        time.sleep(0.05)


class HarmfulProxy:
    """Stands before a real server and does what `plan` says, one entry a completion request; then it passes on.

    Entries: "pass", "drop" (close without an answer), "cut" (half an answer), "garbage" (200 without JSON),
    "missing" (one choice too few), "raw" (log-probs before the processing), "hang" (never answer), "slow" (two seconds
    late), or a status number.
    """

    def __init__(self, upstream: Endpoint) -> None:
        self.upstream = upstream
        self.plan: deque[str | int] = deque()
        self.num_requests = 0
        self.retry_after: str | None = None
        self.without_control_routes = False
        self.release_hang = asyncio.Event()
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert self._ready.wait(20)
        self.endpoint = Endpoint(f"http://127.0.0.1:{self._port}", upstream.api_key, upstream.model)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._start())
        self._ready.set()
        self._loop.run_forever()

    async def _start(self) -> None:
        self._session = aiohttp.ClientSession()
        app = web.Application(client_max_size=1 << 30)
        app.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.2)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self._port = site._server.sockets[0].getsockname()[1]  # type: ignore[union-attr]

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        harm: str | int = "pass"
        if request.path == "/v1/completions":
            self.num_requests += 1
            harm = self.plan.popleft() if self.plan else "pass"
        if self.without_control_routes and not request.path.startswith("/v1/"):
            return web.json_response({"detail": "Not Found"}, status=404)
        assert request.transport is not None
        if harm == "hang":
            await asyncio.sleep(3600)
        if harm == "drop":
            request.transport.abort()
            return web.Response()
        if isinstance(harm, int):
            headers = {"Retry-After": self.retry_after} if self.retry_after else {}
            return web.json_response({"error": {"message": "harm"}}, status=harm, headers=headers)
        if harm == "garbage":
            return web.Response(text="<html>not json</html>")
        headers = {k: v for k, v in request.headers.items() if k in ("Authorization", "Content-Type")}
        url = self.upstream.url + request.path_qs
        async with self._session.request(request.method, url, data=await request.read(), headers=headers) as answer:
            raw = await answer.read()
            if harm == "slow":
                await asyncio.sleep(2.0)
            if harm == "raw":
                raw = re.sub(rb'"token_logprobs":\[[^],]*', b'"token_logprobs":[-0.25', raw)
            if harm == "missing":
                raw = raw.replace(b'"index":1,', b'"index":0,', 1)
            if harm == "cut":
                response = web.StreamResponse(headers={"Content-Length": str(len(raw))})
                await response.prepare(request)
                await response.write(raw[: len(raw) // 2])
                request.transport.abort()
                return response
            return web.Response(body=raw, status=answer.status, content_type=answer.content_type)

    def close(self) -> None:
        async def end() -> None:
            await self._runner.cleanup()
            await self._session.close()

        asyncio.run_coroutine_threadsafe(end(), self._loop).result(20)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(20)
