"""Requests that the service has accepted: their results, and the order of those of one model."""

import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from plinth_base.errors import PlinthError
from rl_runtime import InputError

KEPT_RESULTS, KEPT_ANSWERS = 4096, 256
"""Results that stay until somebody asks for them, and that stay for a client that asks again; the newest."""


Result = dict[str, Any] | bytes
"""The result of a request: JSON, or a binary message."""


class BusyError(PlinthError):
    """As many requests wait as the service takes."""


class Requests:
    """Results by request id, which follows from what is asked, so that a request sent twice runs once. Thread-safe."""

    def __init__(self, *, max_pending: int) -> None:
        self._max_pending = max_pending
        self._futures: OrderedDict[str, Future[Result]] = OrderedDict()
        self._pending: set[str] = set()
        self._answered: OrderedDict[str, None] = OrderedDict()
        self._lock = threading.Lock()

    def open(self, request_id: str) -> Future[Result] | None:
        """A future for a new request; None: this request was accepted before.

        Raises:
            BusyError: `max_pending` requests have no result yet.
        """
        with self._lock:
            if request_id in self._futures:
                return None
            if len(self._pending) >= self._max_pending:
                raise BusyError(field="api.max_pending", value=self._max_pending)
            future = self._futures[request_id] = Future[Result]()
            self._pending.add(request_id)
        future.add_done_callback(lambda _: self._ended(request_id))
        return future

    def __getitem__(self, request_id: str) -> Future[Result]:
        """Raises KeyError for a request that is unknown, such as one of a server that ran before."""
        return self._futures[request_id]

    def answered(self, request_id: str) -> None:
        """The result was sent to a client."""
        with self._lock:
            self._answered[request_id] = None
            while len(self._answered) > KEPT_ANSWERS:
                self._futures.pop(self._answered.popitem(last=False)[0], None)

    def _ended(self, request_id: str) -> None:
        with self._lock:
            self._pending.discard(request_id)
            for old in list(self._futures):
                if len(self._futures) - len(self._pending) <= KEPT_RESULTS:
                    return
                if old not in self._pending:
                    del self._futures[old]


class InOrder:
    """Passes the requests of one model on in the order of their numbers, whatever the order of their arrival."""

    def __init__(self, submit: Callable[[Callable[[], None]], object], first: int) -> None:
        self._submit, self._next = submit, first
        self._early: dict[int, Callable[[], None]] = {}
        self._lock = threading.Lock()

    def add(self, number: int, job: Callable[[], None]) -> None:
        """Submits the job when all of lower numbers are submitted.

        Raises InputError for a number that came before.
        """
        with self._lock:
            if number < self._next or number in self._early:
                raise InputError(field="seq_id", value=number, allowed=f"{self._next} or more, each once")
            self._early[number] = job
            while self._next in self._early:
                self._submit(self._early.pop(self._next))
                self._next += 1


def run_into(future: Future[Result], function: Callable[[], Result]) -> None:
    """Runs `function` and gives its result, or its error, to the future."""
    try:
        result = function()
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(result)
