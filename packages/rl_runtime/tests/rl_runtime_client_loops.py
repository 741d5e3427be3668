"""Event loops of scripted clients. Each client has its own, because episodes are held from one call to the next."""

import asyncio
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any

import pytest

_RUNNERS: list[asyncio.Runner] = []

CLOSES_LOOPS = [
    pytest.mark.filterwarnings("error::ResourceWarning"),
    pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning"),  # an error in `__del__`
]
"""Marks of tests that fail if an event loop stays open, a client's or the product's."""


class OwnLoop:
    """A client whose `run` has an event loop of its own, until the end of the test."""

    _runner: asyncio.Runner | None = None

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        if self._runner is None:
            self._runner = asyncio.Runner()
            _RUNNERS.append(self._runner)
        return self._runner.run(coroutine)

    def start(self, coroutine: Coroutine[Any, Any, Any]) -> Future[Any]:
        ended: Future[Any] = Future()
        ended.set_result(self.run(coroutine))
        return ended


def close_loops() -> bool:
    """Cancels what the clients still wait for and closes their loops. Returns whether there were any."""
    runners = list(_RUNNERS)
    _RUNNERS.clear()
    for runner in runners:
        runner.close()
    return bool(runners)
