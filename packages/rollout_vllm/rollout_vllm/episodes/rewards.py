"""Runs reward functions in worker processes with time limits, concurrently with generation.

    with RewardPool(num_workers=2, timeout_s=5.0) as pool:
        outcome = await pool.score(my_reward, text, ground_truth)

A function that raises, hangs or kills its process affects only the reward of its own sample. The time limit covers the
call; starting the process and importing the function's module have a separate limit. Processes that a function starts
end with its worker.
"""

import asyncio
import math
import multiprocessing
import os
import pickle
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Literal

from .processes import describe, run_kept


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


@dataclass(frozen=True)
class _Job:
    function: bytes  # pickled, as the arguments are
    arguments: bytes
    future: Future[RewardOutcome]
    submitted_at_s: float  # time.monotonic()


@dataclass(frozen=True)
class _FailedStart:
    function: bytes
    outcome: RewardOutcome
    at_s: float


class RewardPool:
    """Worker processes, each managed by one thread. A worker that exceeds its time limit is killed and replaced.

    Functions and arguments are pickled, so functions must be importable (defined in a module). Workers are spawned, so
    they share no memory with the trainer.

    timeout_s: time limit of one call. start_timeout_s: time limit of everything before the call: starting the worker
    process and importing the modules of the function and its arguments.
    """

    def __init__(self, *, num_workers: int = 1, timeout_s: float = 30.0, start_timeout_s: float = 60.0) -> None:
        if num_workers < 1:
            raise ValueError(f"num_workers={num_workers}: must be 1 or more")
        for name, value in (("timeout_s", timeout_s), ("start_timeout_s", start_timeout_s)):
            if not value > 0:
                raise ValueError(f"{name}={value}: must be greater than 0")
        self._timeout_s, self._start_timeout_s = timeout_s, start_timeout_s
        self._failed_start: _FailedStart | None = None
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._closed = False
        self._threads = [
            threading.Thread(target=self._serve, name=f"reward-{i}", daemon=True) for i in range(num_workers)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, function: Callable[..., float], *args: Any) -> Future[RewardOutcome]:
        """Queue one call. Failures are reported in RewardOutcome.kind, not raised by the future.

        The time limit starts when a worker has loaded the function. If loading fails, all calls of that function that
        are already queued get the same outcome, since each would wait for the same failure; later calls try again.
        """
        if self._closed:
            raise RuntimeError("the pool is closed")
        future: Future[RewardOutcome] = Future()
        try:
            job = _Job(pickle.dumps(function), pickle.dumps(args), future, time.monotonic())
        except Exception as error:
            message = f"the reward function or its arguments cannot be pickled: {error}"
            future.set_result(RewardOutcome(None, "exception", message))
            return future
        self._jobs.put(job)
        return future

    async def score(self, function: Callable[..., float], *args: Any) -> RewardOutcome:
        """`submit` for coroutines. Cancelling it drops the call if no worker has started it."""
        return await asyncio.wrap_future(self.submit(function, *args))

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
    def _serve(self) -> None:
        worker: _Worker | None = None
        while (job := self._jobs.get()) is not None:
            if not job.future.set_running_or_notify_cancel():
                continue
            outcome = self._known_failure(job)
            if outcome is None:
                worker = worker or _Worker()
                outcome = worker.call(job, timeout_s=self._timeout_s, start_timeout_s=self._start_timeout_s)
                if outcome.kind == "start":
                    self._failed_start = _FailedStart(job.function, outcome, time.monotonic())
                if outcome.kind in ("timeout", "crash", "start"):
                    worker.kill()
                    worker = None
            job.future.set_result(outcome)
        if worker is not None:
            worker.kill()

    def _known_failure(self, job: _Job) -> RewardOutcome | None:
        failed = self._failed_start
        if failed is None or failed.function != job.function or failed.at_s < job.submitted_at_s:
            return None
        return failed.outcome


class _Worker:
    """One worker process and the pipe to it."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=run_kept, args=(_answer_calls, theirs, os.getpid()), daemon=True)
        self._process.start()
        theirs.close()
        self._ready = False

    def call(self, job: _Job, *, timeout_s: float, start_timeout_s: float) -> RewardOutcome:
        """duration_s of the outcome: time of the call, or of the failed load."""
        begin, loaded = time.monotonic(), False
        try:
            if problem := self._load(job, start_timeout_s):
                return RewardOutcome(None, "start", problem, time.monotonic() - begin)
            begin, loaded = time.monotonic(), True
            if not self._pipe.poll(timeout_s):
                message = f"no reward within {timeout_s:g} s"
                return RewardOutcome(None, "timeout", message, time.monotonic() - begin)
            score, message = pickle.loads(self._pipe.recv_bytes())
        except (EOFError, OSError):
            self._process.join(timeout=5.0)
            when = "" if loaded else " before the call"
            message = f"the worker process died{when} (exit code {self._process.exitcode})"
            return RewardOutcome(None, "crash" if loaded else "start", message, time.monotonic() - begin)
        duration_s = time.monotonic() - begin
        if score is None:
            return RewardOutcome(None, "exception", message, duration_s)
        return RewardOutcome(score, "ok", "", duration_s)

    def _load(self, job: _Job, timeout_s: float) -> str:
        """Why the function could not be loaded, or "". Raises EOFError or OSError if the process is gone."""
        deadline = time.monotonic() + timeout_s
        too_late = f"the reward function's process and module were not loaded within {timeout_s:g} s"
        if not self._ready:  # do not send to a process that may not read yet: a full pipe would block
            if not self._pipe.poll(timeout_s):
                return too_late
            self._pipe.recv_bytes()
            self._ready = True
        self._pipe.send_bytes(job.function)
        self._pipe.send_bytes(job.arguments)
        if not self._pipe.poll(max(0.0, deadline - time.monotonic())):
            return too_late
        problem = self._pipe.recv_bytes().decode()
        return f"the reward function could not be loaded: {problem}" if problem else ""

    def kill(self) -> None:
        self._process.terminate()  # it kills what the functions have started, then itself
        self._process.join(timeout=10.0)
        self._process.kill()
        self._process.join(timeout=10.0)
        self._pipe.close()


def _answer_calls(pipe: Connection) -> None:
    """Main loop of the process that calls the functions.

    It sends one message when it is ready. For each call it receives two messages (function, arguments) and sends two:
    why they could not be loaded (empty on success), and the result.
    """
    pipe.send_bytes(b"ready")
    while True:
        try:
            pickled = pipe.recv_bytes(), pipe.recv_bytes()
        except EOFError:
            return
        try:
            function, args = (pickle.loads(part) for part in pickled)
        except BaseException as error:  # a module that raises or exits when it is imported
            pipe.send_bytes(describe(error).encode())
            continue
        pipe.send_bytes(b"")
        pipe.send_bytes(pickle.dumps(_evaluate(function, args)))


def _evaluate(function: Callable[..., float], args: tuple[Any, ...]) -> tuple[float | None, str]:
    """Return (score, "") or (None, problem)."""
    try:
        score = float(function(*args))
    except BaseException as error:  # sys.exit in a reward function must not end the worker
        return None, describe(error)
    return (score, "") if math.isfinite(score) else (None, f"the reward is {score}, not a finite number")
