"""An event loop in a daemon thread, so that synchronous callers share connections between calls."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class LoopThread:
    """Starts with the first `run`; `close` ends it."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def _ensure(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(target=self._loop.run_forever, name=self._name, daemon=True)
                self._thread.start()
            return self._loop

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Begin to run it; cancelling the future cancels it."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._ensure())

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run to the end and return the result. An interrupt of the caller (Ctrl-C) cancels the coroutine and waits."""
        if threading.current_thread() is self._thread:  # in a callback of ours: it would wait for itself for ever
            coroutine.close()
            raise RuntimeError("called from the loop's own thread: await the coroutine there")
        future = self.submit(coroutine)
        try:
            return future.result()
        except BaseException:
            if not future.done():
                future.cancel()
                self.settle(cancel=False)
            raise

    def settle(self, *, cancel: bool) -> None:
        """Let cancelled tasks finish their clean-up (closing connections is what aborts requests on the server).

        cancel: cancel everything that runs in this loop first.
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
