"""Runs reward functions in worker processes with time limits, concurrently with generation.

    with RewardPool(num_workers=2, timeout_s=5.0) as pool:
        outcome = await pool.score(my_reward, text, ground_truth)

A function that raises, hangs or kills its process affects only the reward of its own sample. The time limit covers the
call; starting the process and importing the function's module have a separate limit. Processes that a function starts
end with its worker. What functions print goes to bounded files or nowhere, never to the terminal.
"""

import asyncio
import math
import multiprocessing
import os
import pickle
import queue
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence, Set
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from multiprocessing.connection import Connection
from typing import Any, Literal

from ..config import require
from .processes import describe, end_kept, run_kept

_TICK_S = 0.02
"""Time between looks for new calls and for late ones while calls are in flight."""


MAX_REWARD = 1e30
"""Training has scores as float32, up to 3.4e38: numbers near that leave no room for sums and differences."""


@dataclass(frozen=True)
class RewardOutcome:
    """score: the reward, None unless kind is "ok". message: one line, empty if kind is "ok".

    Kinds of failures: the function raised, or the service returned an error or no number (exception); no reward in time
    (timeout); the worker process died (crash); the worker process did not start or did not import the function's module
    in time (start); the service could not be reached (connection).
    """

    score: float | None
    kind: Literal["ok", "exception", "timeout", "crash", "start", "connection"]
    message: str = ""
    duration_s: float = 0.0


Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments of a call."""


@dataclass
class Job:
    """A call of a pool. num_scores: None for one score, else the length of the list that it returns."""

    function: bytes  # pickled, as the arguments are
    arguments: bytes
    num_scores: int | None
    future: Future[Any]  # one outcome, or a list of `num_scores`
    submitted_at_s: float = field(default_factory=time.monotonic)
    begin_s: float = 0.0  # time.monotonic() at which it was sent, or made once the function was loaded
    deadline_s: float = 0.0
    is_loaded: bool = False

    @property
    def duration_s(self) -> float:
        return time.monotonic() - self.begin_s

    def finish(self, outcomes: Sequence[RewardOutcome]) -> None:
        self.future.set_result(outcomes[0] if self.num_scores is None else list(outcomes))

    def fail(self, outcome: RewardOutcome) -> None:
        """The same outcome for every score of the call."""
        self.finish([outcome] * (1 if self.num_scores is None else self.num_scores))


class RewardPool:
    """Worker processes, each managed by one thread. A worker that exceeds its time limit is killed and replaced.

    Functions and arguments are pickled, so functions must be importable (defined in a module). Workers are spawned, so
    they share no memory with the trainer.

    timeout_s: time limit of one call. start_timeout_s: time limit of everything before the call: starting the worker
    process and importing the modules of the function and its arguments. printed_dir: existing folder for the files
    `reward_<worker>.log` with what functions print (1 MiB each, the rest is dropped); None: it is dropped.
    """

    max_in_flight = 1
    """Calls in a worker at the same time."""
    late_s, late_words = 0.0, ""
    """Seconds after its time limit at which a call without an answer is lost, and the end of the message about it."""

    def __init__(
        self,
        *,
        num_workers: int = 1,
        timeout_s: float = 30.0,
        start_timeout_s: float = 60.0,
        printed_dir: str | None = None,
    ) -> None:
        require(num_workers >= 1, "num_workers", num_workers, "1 or more")
        for name, value in (("timeout_s", timeout_s), ("start_timeout_s", start_timeout_s)):
            require(value > 0, name, value, "greater than 0")
        self.timeout_s, self.start_timeout_s = timeout_s, start_timeout_s
        self._printed_dir = printed_dir
        self._failed_start: tuple[bytes, RewardOutcome, float] | None = None  # function, outcome, time
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._closed = False
        self._threads = [
            threading.Thread(target=self._serve, args=(i,), name=f"reward-{i}", daemon=True) for i in range(num_workers)
        ]
        try:
            for thread in self._threads:
                thread.start()
        except RuntimeError:  # no more threads
            self._threads = [thread for thread in self._threads if thread.is_alive()]
            self.close()
            raise

    def submit(self, function: Callable[..., Any], *args: Any, **keywords: Any) -> Future[RewardOutcome]:
        """Queue one call. Failures are reported in RewardOutcome.kind, not raised by the future.

        The time limit starts when a worker has loaded the function. If loading fails, all calls of that function that
        are already queued get the same outcome, since each would wait for the same failure; later calls try again.
        """
        return self._submit(function, (args, keywords), None)

    def submit_batch(
        self, function: Callable[..., Any], *args: Any, num_scores: int, **keywords: Any
    ) -> Future[list[RewardOutcome]]:
        """Queue one call that returns a sequence of `num_scores` numbers; the future gives one outcome for each.

        A number that is not finite, or an exception in its place, fails its own outcome; anything else fails all.
        """
        return self._submit(function, (args, keywords), num_scores)

    def _submit(self, function: Callable[..., Any], args: Arguments, num_scores: int | None) -> Future[Any]:
        if self._closed:
            raise RuntimeError("the pool is closed")
        future: Future[Any] = Future()
        try:
            pickled = pickle.dumps(function), pickle.dumps(args)
        except Exception as error:
            message = f"the reward function or its arguments cannot be pickled: {error}"
            Job(b"", b"", num_scores, future).fail(RewardOutcome(None, "exception", message))
            return future
        self._jobs.put(Job(*pickled, num_scores, future))
        return future

    async def score(self, function: Callable[..., Any], *args: Any, **keywords: Any) -> RewardOutcome:
        """`submit` for coroutines. Cancelling it drops the call if no worker has started it."""
        return await asyncio.wrap_future(self.submit(function, *args, **keywords))

    def close(self) -> None:
        """Stop the workers and cancel the calls that have not started. Idempotent."""
        if self._closed:
            return
        self._closed = True
        with suppress(queue.Empty):
            while (job := self._jobs.get_nowait()) is not None:
                job.future.cancel()
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join(timeout=self.start_timeout_s + self.timeout_s + 10.0)

    def __enter__(self) -> "RewardPool":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @staticmethod
    def work(pipe: Connection) -> None:
        """Makes the calls that it receives one at a time.

        It sends one message when it reads. For each call it sends what `load` does, then (number, "scores", scores,
        seconds).
        """
        pipe.send_bytes(b"ready")
        own = os.getpid()
        while True:
            try:
                (number, pickled, num_scores, _), arguments = receive(pipe)
            except EOFError:
                return
            if (loaded := load(pipe, number, pickled, arguments)) is None:
                continue
            begin, (function, (args, keywords)) = time.monotonic(), loaded
            try:
                scores = read_scores(function(*args, **keywords), num_scores)
            except BaseException as error:  # sys.exit in a reward function must not end the worker
                scores = [(None, describe(error))] * (num_scores or 1)
            leave_if_forked(own)
            answer(pipe, number, "scores", scores, begin)

    # ---- the thread of one worker --------------------------------------------------------------------------------
    def _serve(self, index: int) -> None:
        calls = _Calls(self, self._printed(index))
        closing = False
        while not closing or calls.pending:
            try:
                closing = closing or self._admit(calls)
                calls.advance()
            except Exception as error:  # no memory, descriptors or processes; without its thread calls would never end
                calls.fail_all(error)
        calls.end()

    def _admit(self, calls: "_Calls") -> bool:
        """Sends the calls in the queue that there is room for; True if the pool is being closed."""
        while calls.has_room:
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

    def _printed(self, index: int) -> str:
        return "" if self._printed_dir is None else os.path.join(self._printed_dir, f"reward_{index}.log")

    def remember_failure(self, job: Job, outcome: RewardOutcome) -> None:
        self._failed_start = job.function, outcome, time.monotonic()

    def _known_failure(self, job: Job) -> RewardOutcome | None:
        function, outcome, at_s = self._failed_start or (b"", None, 0.0)
        return outcome if function == job.function and at_s >= job.submitted_at_s else None


class _Calls:
    """The calls in flight of one worker process, and the process."""

    def __init__(self, pool: RewardPool, printed: str) -> None:
        self._pool, self._printed = pool, printed
        self._worker: _Worker | None = None
        self._in_flight: dict[int, Job] = {}
        self._alone: deque[Job] = deque()
        self._numbers = count()
        self._is_stuck = False  # a call goes on although it was canceled

    @property
    def pending(self) -> bool:
        return bool(self._in_flight or self._alone)

    @property
    def has_room(self) -> bool:
        """True if a new call can be sent."""
        num = len(self._in_flight)
        return num < self._pool.max_in_flight and not self._alone and not (self._is_stuck and num)

    def send(self, job: Job) -> None:
        """Send a call to the worker, which is started if there is none."""
        if self._is_stuck and not self._in_flight:
            self.end()
        number, start_timeout_s, now = next(self._numbers), self._pool.start_timeout_s, time.monotonic()
        job.begin_s, job.deadline_s, job.is_loaded = now, now + start_timeout_s, False
        self._in_flight[number] = job
        message = pickle.dumps((number, job.function, job.num_scores, self._pool.timeout_s))
        self._worker = self._worker or _Worker(self._pool.work, self._pool.timeout_s, self._printed)
        try:
            if self._worker.is_ready(start_timeout_s):
                self._worker.pipe.send_bytes(message)
                self._worker.pipe.send_bytes(job.arguments)
        except (EOFError, OSError):
            self._lose("crash", f"the worker process died {self._worker.how_it_died()}")

    def advance(self) -> None:
        """Waits a moment for answers; ends a worker that died, takes too long or has a blocked event loop."""
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
        late = [job for job in self._in_flight.values() if time.monotonic() > job.deadline_s]
        if late and late[0].is_loaded:
            self._lose("timeout", f"no reward within {self._pool.timeout_s:g} s{self._pool.late_words}")
        elif late:
            self._fail_start(late[0].function)

    def end(self) -> None:
        """Ends the worker."""
        if self._worker is not None:
            self._worker.kill()
        self._worker, self._is_stuck = None, False

    def _receive(self, number: int, kind: str, content: Any, duration_s: float) -> None:
        if kind == "stuck":
            self._is_stuck = True
        elif kind == "loaded":
            job = self._in_flight[number]
            job.begin_s = time.monotonic()
            job.deadline_s = job.begin_s + self._pool.timeout_s + self._pool.late_s
            job.is_loaded = True
        elif kind == "scores":
            outcomes = [
                RewardOutcome(score, "exception" if score is None else "ok", problem, duration_s)
                for score, problem in content
            ]
            self._in_flight.pop(number).finish(outcomes)
        else:
            self._fail(self._in_flight.pop(number), RewardOutcome(None, kind, content, duration_s))  # type: ignore[arg-type]
            if kind == "start" and not self._in_flight:  # its module may be loaded in part
                self.end()

    def _fail(self, job: Job, outcome: RewardOutcome) -> None:
        if outcome.kind == "start":
            self._pool.remember_failure(job, outcome)
        job.fail(outcome)

    def _fail_start(self, function: bytes) -> None:
        """Fails the calls of a function that is not loaded in time; the others are made again."""
        timeout_s = self._pool.start_timeout_s
        message = f"the reward function's process and module were not loaded within {timeout_s:g} s"
        for job in self._given_up():
            if job.function == function:
                self._fail(job, RewardOutcome(None, "start", message, job.duration_s))
            else:
                self._alone.append(job)

    def _lose(self, kind: Literal["crash", "start", "timeout"], message: str) -> None:
        """The process and what ran in it are lost: a single call did it, several are made again one at a time."""
        jobs = self._given_up()
        if len(jobs) > 1:
            self._alone.extend(jobs)
            return
        for job in jobs:
            if kind == "crash" and not job.is_loaded:
                kind, message = "start", message.replace("died", "died before the call")
            self._fail(job, RewardOutcome(None, kind, message, job.duration_s))

    def fail_all(self, error: Exception) -> None:
        """Fails the calls in flight, because this process cannot start a worker or talk to it."""
        message = f"the worker process cannot be {'used' if self._worker else 'started'}: {describe(error)}"
        for job in self._in_flight.values():
            job.fail(RewardOutcome(None, "start", message, job.duration_s))
        self._in_flight.clear()
        with suppress(Exception):
            self.end()
        self._worker = None

    def _given_up(self) -> list[Job]:
        """The calls in flight, which end with the worker."""
        jobs = list(self._in_flight.values())
        self._in_flight.clear()
        self.end()
        return jobs


class _Worker:
    """A worker process that runs `work(pipe)`, and the pipe to it."""

    _is_ready = False

    def __init__(self, work: Callable[[Connection], None], send_timeout_s: float, printed: str) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        # A process that does not read must not block the caller once the pipe is full: sending raises OSError instead.
        with socket.socket(fileno=os.dup(self.pipe.fileno())) as end:
            whole_s = max(1, math.ceil(send_timeout_s))
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", whole_s, 0))
        arguments = (work, theirs, os.getpid(), printed)
        self.process = context.Process(target=run_kept, args=arguments, daemon=True)
        with theirs:
            try:
                self.process.start()
            except BaseException:
                self.pipe.close()
                raise

    def how_it_died(self) -> str:
        self.process.join(timeout=5.0)
        return f"(exit code {self.process.exitcode})"

    def kill(self) -> None:
        end_kept(self.process)
        self.pipe.close()

    def is_ready(self, timeout_s: float) -> bool:
        """Waits for the process to read; False if it does not. Sending to one that does not read could block."""
        if not self._is_ready and self.pipe.poll(timeout_s):
            self.pipe.recv_bytes()
            self._is_ready = True
        return self._is_ready


Scores = list[tuple[float | None, str]]
"""(score, "") or (None, problem) of each."""


# ---- the worker process ----------------------------------------------------------------------------------------------
def receive(pipe: Connection) -> tuple[tuple[int, bytes, int | None, float], bytes]:
    """A call: (number, function, number of scores, time limit), arguments. Raises EOFError when the pool has ended."""
    return pickle.loads(pipe.recv_bytes()), pipe.recv_bytes()


def answer(pipe: Connection, number: int, kind: str, content: Any, begin: float) -> None:
    """Send a message about call `number`, with the seconds since `begin`."""
    pipe.send_bytes(pickle.dumps((number, kind, content, time.monotonic() - begin)))


def load(
    pipe: Connection, number: int, function: bytes, arguments: bytes
) -> tuple[Callable[..., Any], Arguments] | None:
    """A function and its arguments; sends (number, "loaded", ...), or (number, "start", why, seconds) for None."""
    begin = time.monotonic()
    try:
        loaded = pickle.loads(function), pickle.loads(arguments)
    except BaseException as error:  # a module that raises or exits when it is imported
        answer(pipe, number, "start", f"the reward function could not be loaded: {describe(error)}", begin)
        return None
    answer(pipe, number, "loaded", None, begin)
    return loaded


def leave_if_forked(own: int) -> None:
    """Ends a process that the function forked and that returned from it, before it answers in its parent's name."""
    if os.getpid() != own:
        os._exit(0)


def read_scores(result: Any, num_scores: int | None) -> Scores:
    """The scores that a function returned.

    Raises:
        TypeError, ValueError: it is no list of `num_scores` values.
    """
    if num_scores is None:
        return [_read_score(result)]
    if isinstance(result, (str, bytes, Mapping, Set)) or not hasattr(result, "__len__"):
        raise TypeError(f"the batched reward is {_name(result)}, not a list of {num_scores} numbers")
    if len(result) != num_scores:
        raise ValueError(f"the batched reward has {len(result)} values for {num_scores} responses")
    return [_read_score(value) for value in result]


def _read_score(value: Any) -> tuple[float | None, str]:
    if isinstance(value, Exception):
        return None, describe(value)
    try:
        return read_number(value), ""
    except (TypeError, ValueError) as error:
        return None, str(error)


def read_number(value: Any) -> float:
    """A reward as a number.

    Raises:
        TypeError, ValueError: it is no number, not finite, or larger than `MAX_REWARD`.
    """
    if isinstance(value, (str, bytes)):
        raise TypeError(f"the reward is {_name(value)}, not a number")
    try:
        number = float(value)
    except OverflowError:  # of an integer
        number = math.inf
    except Exception:
        raise TypeError(f"the reward is {_name(value)}, not a number") from None
    if not math.isfinite(number):
        raise ValueError(f"the reward is {number}, not a finite number")
    if abs(number) > MAX_REWARD:
        raise ValueError(f"the reward is {number}; allowed: -{MAX_REWARD:g} to {MAX_REWARD:g}")
    return number


def _name(value: Any) -> str:
    try:
        text = repr(value)
    except Exception:
        text = ""
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}".rstrip()
