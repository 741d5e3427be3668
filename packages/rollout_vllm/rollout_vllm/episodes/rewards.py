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
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Literal

from .processes import describe, end_kept, run_kept


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


@dataclass(frozen=True)
class Job:
    """A call in the queue of a pool. num_scores: None for one score, else the length of the list that it returns."""

    function: bytes  # pickled, as the arguments are
    arguments: bytes
    num_scores: int | None
    future: Future[Any]  # one outcome, or a list of `num_scores`
    submitted_at_s: float  # time.monotonic()

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

    def __init__(
        self,
        *,
        num_workers: int = 1,
        timeout_s: float = 30.0,
        start_timeout_s: float = 60.0,
        printed_dir: str | None = None,
    ) -> None:
        if num_workers < 1:
            raise ValueError(f"num_workers={num_workers}: must be 1 or more")
        for name, value in (("timeout_s", timeout_s), ("start_timeout_s", start_timeout_s)):
            if not value > 0:
                raise ValueError(f"{name}={value}: must be greater than 0")
        self._timeout_s, self._start_timeout_s = timeout_s, start_timeout_s
        self._printed_dir = printed_dir
        self._failed_start: tuple[bytes, RewardOutcome, float] | None = None  # function, outcome, time
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._closed = False
        self._threads = [
            threading.Thread(target=self._serve, args=(i,), name=f"reward-{i}", daemon=True) for i in range(num_workers)
        ]
        for thread in self._threads:
            thread.start()

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

        A number that is not finite fails its own outcome; anything else fails all of them.
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
            job = Job(b"", b"", num_scores, future, time.monotonic())
            job.fail(RewardOutcome(None, "exception", message))
            return future
        self._jobs.put(Job(*pickled, num_scores, future, time.monotonic()))
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
            thread.join(timeout=self._start_timeout_s + self._timeout_s + 10.0)

    def __enter__(self) -> "RewardPool":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- the thread of one worker --------------------------------------------------------------------------------
    def _serve(self, index: int) -> None:
        worker: _Worker | None = None
        while (job := self._jobs.get()) is not None:
            if not job.future.set_running_or_notify_cancel():
                continue
            if failed := self._known_failure(job):
                job.fail(failed)
                continue
            worker = worker or _Worker(_answer_calls, self._timeout_s, self._printed(index))
            outcomes = worker.call(job, timeout_s=self._timeout_s, start_timeout_s=self._start_timeout_s)
            if outcomes[0].kind == "start":
                self._remember_failure(job, outcomes[0])
            if outcomes[0].kind in ("timeout", "crash", "start"):
                worker.kill()
                worker = None
                job.fail(outcomes[0])
            else:
                job.finish(outcomes)
        if worker is not None:
            worker.kill()

    def _printed(self, index: int) -> str:
        return "" if self._printed_dir is None else os.path.join(self._printed_dir, f"reward_{index}.log")

    def _remember_failure(self, job: Job, outcome: RewardOutcome) -> None:
        self._failed_start = job.function, outcome, time.monotonic()

    def _known_failure(self, job: Job) -> RewardOutcome | None:
        function, outcome, at_s = self._failed_start or (b"", None, 0.0)
        return outcome if function == job.function and at_s >= job.submitted_at_s else None


class Worker:
    """A worker process that runs `work(pipe)`, and the pipe to it."""

    def __init__(self, work: Callable[[Connection], None], send_timeout_s: float, printed: str) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        # A process that does not read must not block the caller once the pipe is full: sending raises OSError instead.
        with socket.socket(fileno=os.dup(self.pipe.fileno())) as end:
            whole_s = max(1, math.ceil(send_timeout_s))
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", whole_s, 0))
        arguments = (work, theirs, os.getpid(), printed)
        self.process = context.Process(target=run_kept, args=arguments, daemon=True)
        self.process.start()
        theirs.close()

    def how_it_died(self) -> str:
        self.process.join(timeout=5.0)
        return f"(exit code {self.process.exitcode})"

    def kill(self) -> None:
        end_kept(self.process)
        self.pipe.close()


class _Worker(Worker):
    """Makes one call at a time."""

    _ready = False

    def call(self, job: Job, *, timeout_s: float, start_timeout_s: float) -> list[RewardOutcome]:
        """One outcome if the call failed; its duration_s is the time of the call, or of the failed load."""
        begin, loaded = time.monotonic(), False
        try:
            if problem := self._load(job, start_timeout_s):
                return [RewardOutcome(None, "start", problem, time.monotonic() - begin)]
            begin, loaded = time.monotonic(), True
            if not self.pipe.poll(timeout_s):
                return [timed_out(timeout_s, time.monotonic() - begin)]
            scores = pickle.loads(self.pipe.recv_bytes())
        except (EOFError, OSError):
            message = f"the worker process died{'' if loaded else ' before the call'} {self.how_it_died()}"
            return [RewardOutcome(None, "crash" if loaded else "start", message, time.monotonic() - begin)]
        return outcomes_of(scores, time.monotonic() - begin)

    def _load(self, job: Job, timeout_s: float) -> str:
        """Why the function could not be loaded, or "". Raises EOFError or OSError if the process is gone."""
        deadline = time.monotonic() + timeout_s
        too_late = f"the reward function's process and module were not loaded within {timeout_s:g} s"
        if not self._ready:  # do not send to a process that may not read yet: a full pipe would block
            if not self.pipe.poll(timeout_s):
                return too_late
            self.pipe.recv_bytes()
            self._ready = True
        self.pipe.send_bytes(job.function)
        self.pipe.send_bytes(job.arguments)
        self.pipe.send_bytes(pickle.dumps(job.num_scores))
        if not self.pipe.poll(max(0.0, deadline - time.monotonic())):
            return too_late
        problem = self.pipe.recv_bytes().decode()
        return f"the reward function could not be loaded: {problem}" if problem else ""


def timed_out(timeout_s: float, duration_s: float) -> RewardOutcome:
    """The outcome of a call that took too long."""
    return RewardOutcome(None, "timeout", f"no reward within {timeout_s:g} s", duration_s)


Scores = list[tuple[float | None, str]]
"""(score, "") or (None, problem) of each."""


def outcomes_of(scores: Scores, duration_s: float) -> list[RewardOutcome]:
    """What a worker process sent, as outcomes."""
    return [
        RewardOutcome(score, "exception" if score is None else "ok", problem, duration_s) for score, problem in scores
    ]


def _answer_calls(pipe: Connection) -> None:
    """Main loop of the process that calls the functions.

    It sends one message when it is ready. For each call it receives three messages (function, arguments, number of
    scores) and sends two: why they could not be loaded (empty on success), and the result.
    """
    pipe.send_bytes(b"ready")
    own = os.getpid()
    while True:
        try:
            pickled = pipe.recv_bytes(), pipe.recv_bytes(), pipe.recv_bytes()
        except EOFError:
            return
        try:
            function, args, num_scores = (pickle.loads(part) for part in pickled)
        except BaseException as error:  # a module that raises or exits when it is imported
            pipe.send_bytes(describe(error).encode())
            continue
        pipe.send_bytes(b"")
        scores = _evaluate(function, args, num_scores)
        leave_if_forked(own)
        pipe.send_bytes(pickle.dumps(scores))


def leave_if_forked(own: int) -> None:
    """Ends a process that the function forked and that returned from it, before it answers in its parent's name."""
    if os.getpid() != own:
        os._exit(0)


def _evaluate(function: Callable[..., Any], arguments: Arguments, num_scores: int | None) -> Scores:
    args, keywords = arguments
    try:
        return read_scores(function(*args, **keywords), num_scores)
    except BaseException as error:  # sys.exit in a reward function must not end the worker
        return [(None, describe(error))] * (num_scores or 1)


def read_scores(result: Any, num_scores: int | None) -> Scores:
    """What a function returned, as scores.

    Raises:
        TypeError, ValueError: it is no list of `num_scores` values.
    """
    if num_scores is None:
        return [_read_score(result)]
    if isinstance(result, (str, bytes)) or not hasattr(result, "__len__"):
        raise TypeError(f"the batched reward is {_name(result)}, not a list of {num_scores} numbers")
    if len(result) != num_scores:
        raise ValueError(f"the batched reward has {len(result)} values for {num_scores} responses")
    return [_read_score(value) for value in result]


def _read_score(value: Any) -> tuple[float | None, str]:
    if isinstance(value, (str, bytes)):
        return None, f"the reward is {_name(value)}, not a number"
    try:
        score = float(value)
    except Exception:
        return None, f"the reward is {_name(value)}, not a number"
    return (score, "") if math.isfinite(score) else (None, f"the reward is {score}, not a finite number")


def _name(value: Any) -> str:
    try:
        text = repr(value)
    except Exception:
        text = ""
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}".rstrip()
