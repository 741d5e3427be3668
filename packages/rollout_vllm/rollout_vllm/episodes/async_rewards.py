"""Runs coroutine functions as rewards: many calls at a time in the event loop of one worker process.

with AsyncRewardPool(timeout_s=30.0, max_in_flight=64) as pool:
    outcome = await pool.score(my_async_reward, text, prompt)
"""

import asyncio
import os
import pickle
import queue
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import count
from multiprocessing.connection import Connection
from typing import Any

from .processes import describe
from .rewards import (
    Arguments,
    Job,
    RewardOutcome,
    RewardPool,
    Scores,
    Worker,
    leave_if_forked,
    outcomes_of,
    read_scores,
    timed_out,
)

_TICK_S = 0.02
"""Time between looks for new calls and for late ones while calls are in flight."""
_LATE_S = 1.0
"""A call that has no answer so long after its time limit is one whose event loop is blocked."""


class AsyncRewardPool(RewardPool):
    """`RewardPool` for coroutine functions: one worker process, up to `max_in_flight` calls at the same time.

    A call that takes too long is canceled. If the process dies or its event loop is blocked, the calls in flight are
    made again one at a time, so that only the one that did it fails; such a function may be called twice for a sample.
    """

    def __init__(
        self,
        *,
        timeout_s: float = 30.0,
        start_timeout_s: float = 60.0,
        max_in_flight: int = 64,
        printed_dir: str | None = None,
    ) -> None:
        if max_in_flight < 1:
            raise ValueError(f"max_in_flight={max_in_flight}: must be 1 or more")
        self._max_in_flight = max_in_flight
        super().__init__(timeout_s=timeout_s, start_timeout_s=start_timeout_s, printed_dir=printed_dir)

    def _printed(self, index: int) -> str:
        return super()._printed(index).replace("reward_0.log", "reward_async.log")

    def _serve(self, index: int) -> None:
        calls = _Calls(self._timeout_s, self._start_timeout_s, self._printed(index), self._remember_failure)
        closing = False
        while not closing or calls.pending:
            closing = closing or self._admit(calls)
            calls.advance()
        calls.end()

    def _admit(self, calls: "_Calls") -> bool:
        """Sends the calls in the queue that there is room for; True if the pool is being closed."""
        while calls.room(self._max_in_flight):
            try:
                job = self._jobs.get(block=not calls.pending)
            except queue.Empty:
                return False
            if job is None:
                return True
            if not job.future.set_running_or_notify_cancel():
                continue
            if failed := self._known_failure(job):
                job.fail(failed)
            else:
                calls.send(job)
        return False


@dataclass(frozen=True, kw_only=True)
class _Call:
    job: Job
    deadline: float
    is_loaded: bool = False


class _Calls:
    """The calls in flight, and the worker process that they are in."""

    def __init__(
        self,
        timeout_s: float,
        start_timeout_s: float,
        printed: str,
        on_failed_start: Callable[[Job, RewardOutcome], None],
    ) -> None:
        self._timeout_s, self._start_timeout_s, self._printed = timeout_s, start_timeout_s, printed
        self._on_failed_start = on_failed_start
        self._worker: Worker | None = None
        self._in_flight: dict[int, _Call] = {}
        self._alone: deque[Job] = deque()
        self._numbers = count()
        self._is_stuck = False  # a call goes on although it was canceled

    @property
    def pending(self) -> bool:
        return bool(self._in_flight or self._alone)

    def room(self, max_in_flight: int) -> bool:
        """Whether a new call can be sent."""
        return len(self._in_flight) < max_in_flight and not self._alone and not (self._is_stuck and self._in_flight)

    def send(self, job: Job) -> None:
        if self._is_stuck and not self._in_flight:
            self.end()
        self._worker = self._worker or Worker(_answer_concurrently, self._timeout_s, self._printed)
        number = next(self._numbers)
        self._in_flight[number] = _Call(job=job, deadline=time.monotonic() + self._start_timeout_s)
        message = pickle.dumps((number, job.function, job.arguments, job.num_scores, self._timeout_s))
        try:
            self._worker.pipe.send_bytes(message)
        except OSError:
            self._lose("crash", f"the worker process died {self._worker.how_it_died()}")

    def advance(self) -> None:
        """Waits a moment for answers; ends a worker that died or has a blocked event loop."""
        if self._alone and not self._in_flight:
            self.send(self._alone.popleft())
        if not self._in_flight or self._worker is None:
            return
        try:
            while self._in_flight and self._worker.pipe.poll(_TICK_S):
                self._receive(*pickle.loads(self._worker.pipe.recv_bytes()))
        except (EOFError, OSError):
            self._lose("crash", f"the worker process died {self._worker.how_it_died()}")
            return
        late = [call for call in self._in_flight.values() if time.monotonic() > call.deadline]
        if late and late[0].is_loaded:
            self._lose("timeout", timed_out(self._timeout_s, 0.0).message + "; it blocks the event loop")
        elif late:
            what = f"the reward function's process and module were not loaded within {self._start_timeout_s:g} s"
            self._fail_start(late[0].job, what)

    def end(self) -> None:
        """Ends the worker."""
        if self._worker is not None:
            self._worker.kill()
        self._worker, self._is_stuck = None, False

    def _receive(self, number: int, kind: str, content: Any, duration_s: float) -> None:
        if kind == "stuck":
            self._is_stuck = True
        elif kind == "loaded":
            deadline = time.monotonic() + self._timeout_s + _LATE_S
            self._in_flight[number] = replace(self._in_flight[number], deadline=deadline, is_loaded=True)
        else:
            job = self._in_flight.pop(number).job
            if kind == "timeout":
                job.fail(timed_out(self._timeout_s, duration_s))
            elif kind == "start":
                outcome = RewardOutcome(None, "start", content, duration_s)
                self._on_failed_start(job, outcome)
                job.fail(outcome)
            else:
                job.finish(outcomes_of(content, duration_s))

    def _fail_start(self, job: Job, what: str) -> None:
        """Fails the calls of a function that cannot be loaded; the others are made again."""
        outcome = RewardOutcome(None, "start", what, self._start_timeout_s)
        self._on_failed_start(job, outcome)
        jobs = [call.job for call in self._in_flight.values()]
        self._in_flight.clear()
        self.end()
        for one in jobs:
            if one.function == job.function:
                one.fail(outcome)
            else:
                self._alone.append(one)

    def _lose(self, kind: Any, message: str) -> None:
        """The process and what ran in it are lost: a single call did it, several are made again one at a time."""
        calls = list(self._in_flight.values())
        self._in_flight.clear()
        self.end()
        if len(calls) > 1:
            self._alone.extend(call.job for call in calls)
        elif calls and kind == "crash" and not calls[0].is_loaded:
            outcome = RewardOutcome(None, "start", message.replace("died", "died before the call"))
            self._on_failed_start(calls[0].job, outcome)
            calls[0].job.fail(outcome)
        elif calls:
            calls[0].job.fail(RewardOutcome(None, kind, message, self._timeout_s))


# ---- the worker process ----------------------------------------------------------------------------------------------
def _answer_concurrently(pipe: Connection) -> None:
    """Makes each call that it receives, (number, function, arguments, number of scores, time limit).

    It sends (number, "loaded", ...), then (number, "scores" | "timeout", scores, seconds); or (number, "start", why,
    seconds) if the function could not be loaded; (number, "stuck", ...) for a call that goes on although canceled.
    """
    asyncio.run(_answer(pipe))


async def _answer(pipe: Connection) -> None:
    loop, ended, tasks = asyncio.get_running_loop(), asyncio.Event(), set[asyncio.Task[None]]()

    def receive() -> None:
        try:
            message = pickle.loads(pipe.recv_bytes())
        except EOFError:
            loop.remove_reader(pipe.fileno())
            ended.set()
            return
        task = asyncio.ensure_future(_make_call(pipe, *message))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    loop.add_reader(pipe.fileno(), receive)
    await ended.wait()
    os._exit(0)  # without waiting for calls that go on although they were canceled


async def _make_call(
    pipe: Connection, number: int, function: bytes, arguments: bytes, num_scores: int | None, timeout_s: float
) -> None:
    begin = time.monotonic()

    def send(kind: str, content: Any = None) -> None:
        pipe.send_bytes(pickle.dumps((number, kind, content, time.monotonic() - begin)))

    try:
        loaded, unpickled = pickle.loads(function), pickle.loads(arguments)
    except BaseException as error:  # a module that raises or exits when it is imported
        send("start", f"the reward function could not be loaded: {describe(error)}")
        return
    send("loaded")
    call = asyncio.ensure_future(_evaluate(loaded, unpickled, num_scores))
    await asyncio.wait({call}, timeout=timeout_s)
    if call.done():
        send("scores", call.result())
        return
    call.cancel()
    send("timeout")
    await asyncio.wait({call}, timeout=_LATE_S)
    if not call.done():
        send("stuck")


async def _evaluate(function: Callable[..., Any], arguments: Arguments, num_scores: int | None) -> Scores:
    own, (args, keywords) = os.getpid(), arguments
    try:
        result = await function(*args, **keywords)
        leave_if_forked(own)
        return read_scores(result, num_scores)
    except BaseException as error:  # sys.exit must not end the worker
        leave_if_forked(own)
        return [(None, describe(error))] * (num_scores or 1)
