"""HTTP exchanges with the servers, and the background event loop for callers that have none."""

import asyncio
import inspect
import json
import threading
import weakref
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Self, TypeVar

import aiohttp

from plinth_base import Endpoint
from plinth_base.endpoint import error_message

from ..config import RolloutConfig
from .protocol import MalformedAnswerError

T = TypeVar("T")

# Shorter than the 5 s after which uvicorn closes an idle connection, so that stale connections are rarely reused.
_KEEP_ALIVE_S = 3.0
_CONNECT_TIMEOUT_S = 10.0


class Transport:
    """Sends single HTTP requests, without retries. Connections are kept per event loop."""

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
        """Return (status, headers, body). Raises TimeoutError or aiohttp.ClientError."""
        endpoint = self._endpoints[server]
        headers = {"Authorization": f"Bearer {endpoint.api_key}"} if endpoint.api_key else {}
        if request_id is not None:
            headers["X-Request-Id"] = request_id
        total_s = timeout_s or self._config.request_timeout_s
        timeout = aiohttp.ClientTimeout(total=total_s, sock_connect=_CONNECT_TIMEOUT_S)
        url = endpoint.url.rstrip("/") + path
        async with self._session().request(method, url, json=body, headers=headers, timeout=timeout) as response:
            return response.status, response.headers, await response.read()

    async def model_of(self, server: int) -> str:
        """The name of the server's model; queried once if the endpoint does not give it."""
        known = self._models[server]
        if known is not None:
            return known
        status, _, raw = await self.exchange(server, "GET", "/v1/models")
        if status != 200:
            raise MalformedAnswerError(f"/v1/models: {error_message(status, raw.decode('utf-8', 'replace'))}")
        try:
            name = str(json.loads(raw)["data"][0]["id"])
        except (ValueError, LookupError, TypeError):
            raise MalformedAnswerError("/v1/models lists no model") from None
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
        """Close the connections of the running event loop."""
        session = self._sessions.pop(asyncio.get_running_loop(), None)
        if session is not None:
            await session.close()


class LoopThread:
    """An event loop in a daemon thread, so that blocking calls share connections. Starts at the first use."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def _ensure(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                loop = asyncio.new_event_loop()
                thread = threading.Thread(target=_run_until_stopped, args=(loop,), name=self._name, daemon=True)
                thread.start()  # may raise: then there is no loop, and the next call tries again
                self._loop, self._thread = loop, thread
            return self._loop

    def start(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Run the coroutine in the background. Cancelling the future cancels it."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._ensure())

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run the coroutine and return its result. An interrupt of the caller (Ctrl-C) cancels it and waits for it."""
        if threading.current_thread() is self._thread:  # a callback would wait for itself indefinitely
            coroutine.close()
            raise RuntimeError("called from the loop's own thread: await the coroutine there")
        future = self.start(coroutine)
        try:
            return future.result()
        except BaseException:
            if not future.done():
                future.cancel()
                self.settle(cancel=False)
            raise

    def settle(self, *, cancel: bool) -> None:
        """Wait for the clean-up of cancelled tasks: closing their connections aborts the requests on the servers.

        cancel: first cancel all tasks of this loop.
        """
        assert self._loop is not None

        async def settle() -> None:
            others = [t for t in asyncio.all_tasks() if t is not asyncio.current_task()]
            for task in others if cancel else ():
                task.cancel()
            await asyncio.wait(others, timeout=5.0) if others else None

        asyncio.run_coroutine_threadsafe(settle(), self._loop).result(timeout=10.0)

    def close(self) -> None:
        with self._lock:
            loop, thread = self._loop, self._thread
            self._loop = self._thread = None
        if loop is not None and thread is not None:
            loop.call_soon_threadsafe(loop.stop)
            thread.join(timeout=10.0)
            loop.close()

    @property
    def running(self) -> bool:
        return self._loop is not None


class HttpClient(LoopThread):
    """Base class of clients: a transport, and an event loop for callers without one: `client.run(client.pause())`."""

    def __init__(self, endpoints: Sequence[Endpoint], config: RolloutConfig, *, thread_name: str) -> None:
        super().__init__(thread_name)
        self._transport = Transport(endpoints, config)

    async def aclose(self) -> None:
        """Close the connections of the running event loop."""
        await self._transport.aclose()

    def close(self) -> None:
        """Cancel the tasks of the background loop and close its connections. Idempotent."""
        if self.running:
            self.settle(cancel=True)
            self.run(self.aclose())
            super().close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _run_until_stopped(loop: asyncio.AbstractEventLoop) -> None:
    """Runs the loop. A task of a user's function that ends with SystemExit or KeyboardInterrupt ends no other task."""
    while True:
        try:
            loop.run_forever()
        except (SystemExit, KeyboardInterrupt):  # asyncio has given it to the task, and raises it here too
            continue
        return


async def cancel(tasks: Collection[asyncio.Task[Any]]) -> None:
    """Cancel the tasks and wait until they have ended."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def call_back(function: Callable[[T], Awaitable[None] | None] | None, value: T) -> None:
    """Call a function of the user, and await it if it is a coroutine function; None: nothing to call."""
    answer = None if function is None else function(value)
    if inspect.isawaitable(answer):
        await answer


async def first_complete(
    tasks: Sequence[asyncio.Task[T]],
    num_groups: int,
    *,
    is_complete: Callable[[T], bool],
    on_end: Callable[[T], Awaitable[None]],
) -> dict[int, T]:
    """Groups by the index of their task, as they end, until `num_groups` of them are complete.

    on_end: awaited with each group, in order of completion.
    """
    queue: asyncio.Queue[asyncio.Task[T]] = asyncio.Queue()
    for task in tasks:
        task.add_done_callback(queue.put_nowait)
    ended: dict[int, T] = {}
    index_of = {task: index for index, task in enumerate(tasks)}
    num_complete = 0
    while num_complete < num_groups and len(ended) < len(tasks):
        task = await queue.get()
        group = ended[index_of[task]] = task.result()
        num_complete += is_complete(group)
        await on_end(group)
    return ended


async def gather_or_cancel(coroutines: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Like asyncio.gather, but when one coroutine raises, cancel the others and wait for them."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        await cancel(tasks)
        raise
