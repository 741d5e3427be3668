"""The router with waiting: who may send now, who waits in line. Shared by event loops and threads."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Collection

from .routing import Router


class Dispatcher:
    """First come, first served, within each server's limit of samples in flight."""

    def __init__(self, num_servers: int, *, max_in_flight: int) -> None:
        self._router = Router(num_servers, max_in_flight=max_in_flight)
        self._lock = threading.Lock()
        self._waiters: deque[tuple[asyncio.AbstractEventLoop, asyncio.Future[None], int]] = deque()
        self._paused = False

    async def acquire(self, group: str, cost: int, avoid: Collection[int] = ()) -> int | None:
        """A server with room for `cost` samples, counted from now on until `release`. None: all are retired."""
        loop = asyncio.get_running_loop()
        while True:
            with self._lock:
                if self._router.all_retired:
                    return None
                server = None
                if not self._paused:
                    server = self._router.pick(group, cost, time.monotonic(), avoid=avoid)
                if server is None:
                    waiter: asyncio.Future[None] = loop.create_future()
                    self._waiters.append((loop, waiter, cost))
            if server is not None:
                self._wake_one()  # there may be room for another one
                return server
            try:
                await waiter
            except asyncio.CancelledError:
                if waiter.done() and not waiter.cancelled():
                    self._wake_one()  # hand our turn on
                raise

    def release(self, server: int, cost: int) -> None:
        with self._lock:
            self._router.finish(server, cost)
        self._wake_one()

    def succeeded(self, server: int) -> None:
        with self._lock:
            self._router.succeeded(server)

    def failed(self, server: int) -> None:
        """The server is at fault: it rests for a while."""
        with self._lock:
            self._router.failed(server, time.monotonic())

    def pause(self) -> None:
        """Let nobody send until `resume`."""
        with self._lock:
            self._paused = True

    def resume(self) -> None:
        with self._lock:
            self._paused = False
        self._wake_one()

    def block(self, server: int) -> None:
        with self._lock:
            self._router.block(server)

    def unblock(self, server: int) -> None:
        with self._lock:
            self._router.unblock(server)
        self._wake_one()

    def retire(self, server: int) -> None:
        with self._lock:
            self._router.retire(server)
            num_waiting = len(self._waiters) if self._router.all_retired else 0
        for _ in range(num_waiting):
            self._wake_one()

    @property
    def samples_in_flight(self) -> int:
        with self._lock:
            return sum(self._router.load)

    @property
    def load(self) -> list[int]:
        """Samples in flight per server."""
        with self._lock:
            return list(self._router.load)

    @property
    def num_waiting(self) -> int:
        """Requests that wait for room: the client's own queue."""
        with self._lock:
            return sum(not waiter.done() for _, waiter, _ in self._waiters)

    @property
    def samples_waiting(self) -> int:
        """The samples those requests ask for."""
        with self._lock:
            return sum(cost for _, waiter, cost in self._waiters if not waiter.done())

    def _wake_one(self) -> None:
        with self._lock:
            if self._paused and not self._router.all_retired:
                return  # they keep their places
            while self._waiters:
                loop, waiter, _ = self._waiters.popleft()
                if not waiter.done() and not loop.is_closed():
                    loop.call_soon_threadsafe(_resolve, waiter)
                    return


def _resolve(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
