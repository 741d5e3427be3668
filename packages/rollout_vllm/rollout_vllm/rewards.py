"""Reward functions beside the rollout: in processes of their own, with time limits, each sample's trouble its own.

    with RewardPool(num_workers=2, timeout_s=5.0) as pool:
        outcome = await pool.score(my_reward, text, ground_truth)

A function that raises, hangs, or takes its process down costs that sample its reward and nothing else.
"""

from __future__ import annotations

import asyncio
import ctypes
import math
import multiprocessing
import os
import pickle
import queue
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Literal


@dataclass(frozen=True)
class RewardOutcome:
    """score: the reward, None unless kind is "ok". kind: how it went. message: one line, empty when ok.

    Kinds of trouble: the function raised, or the service answered with an error or no number (exception); no reward in
    time (timeout); the worker process died (crash); the service could not be reached (connection).
    """

    score: float | None
    kind: Literal["ok", "exception", "timeout", "crash", "connection"]
    message: str = ""
    duration_s: float = 0.0


@dataclass(frozen=True)
class _Job:
    payload: bytes
    future: Future[RewardOutcome]


class RewardPool:
    """Worker processes, each served by one thread; a worker that overruns its time is killed and replaced.

    The functions are sent by pickle over local pipes: they have to be importable (defined in a module), and their
    arguments picklable. Workers are started afresh (spawn), so they hold none of the trainer's memory.
    """

    def __init__(self, *, num_workers: int = 1, timeout_s: float = 30.0) -> None:
        if num_workers < 1:
            raise ValueError(f"num_workers={num_workers}: allowed is 1 or more")
        if not timeout_s > 0:
            raise ValueError(f"timeout_s={timeout_s}: allowed is a number above 0")
        self._timeout_s = timeout_s
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._closed = False
        self._threads = [
            threading.Thread(target=self._serve, name=f"reward-{i}", daemon=True) for i in range(num_workers)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, function: Callable[..., float], *args: Any) -> Future[RewardOutcome]:
        """Queue one call. The future never raises what the function raised: see RewardOutcome.kind.

        The time limit counts from when a worker takes the call up.
        """
        if self._closed:
            raise RuntimeError("the pool is closed")
        future: Future[RewardOutcome] = Future()
        try:
            payload = pickle.dumps((function, args))
        except Exception as error:
            message = f"the reward function or its arguments cannot be pickled: {error}"
            future.set_result(RewardOutcome(None, "exception", message))
            return future
        self._jobs.put(_Job(payload, future))
        return future

    async def score(self, function: Callable[..., float], *args: Any) -> RewardOutcome:
        """`submit` for coroutines. Cancelling it drops the call if no worker has taken it up yet."""
        return await asyncio.wrap_future(self.submit(function, *args))

    def close(self) -> None:
        """End the workers; calls not taken up yet are cancelled. Idempotent."""
        if self._closed:
            return
        self._closed = True
        with suppress(queue.Empty):
            while (job := self._jobs.get_nowait()) is not None:
                job.future.cancel()
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join(timeout=self._timeout_s + 10.0)

    def __enter__(self) -> RewardPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ---- one worker's thread -------------------------------------------------------------------------------------
    def _serve(self) -> None:
        worker: _Worker | None = None
        while (job := self._jobs.get()) is not None:
            if not job.future.set_running_or_notify_cancel():
                continue
            if worker is None:
                worker = _Worker()
            outcome = worker.call(job.payload, self._timeout_s)
            if outcome.kind in ("timeout", "crash"):
                worker.kill()
                worker = None
            job.future.set_result(outcome)
        if worker is not None:
            worker.kill()


_START_TIMEOUT_S = 60.0


class _Worker:
    """One process and the pipe to it."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_work, args=(theirs, os.getpid()), daemon=True)
        self._process.start()
        theirs.close()
        self._ready = False

    def call(self, payload: bytes, timeout_s: float) -> RewardOutcome:
        begin = time.monotonic()
        try:
            if not self._ready:  # the interpreter's start is not the function's fault
                if not self._pipe.poll(_START_TIMEOUT_S):
                    return RewardOutcome(None, "crash", "the worker process did not start")
                self._pipe.recv_bytes()
                self._ready, begin = True, time.monotonic()
            self._pipe.send_bytes(payload)
            if not self._pipe.poll(timeout_s):
                message = f"no reward within {timeout_s:g} s"
                return RewardOutcome(None, "timeout", message, time.monotonic() - begin)
            score, message = pickle.loads(self._pipe.recv_bytes())
        except (EOFError, OSError):
            self._process.join(timeout=5.0)
            message = f"the worker process died (exit code {self._process.exitcode})"
            return RewardOutcome(None, "crash", message, time.monotonic() - begin)
        duration_s = time.monotonic() - begin
        if score is None:
            return RewardOutcome(None, "exception", message, duration_s)
        return RewardOutcome(score, "ok", "", duration_s)

    def kill(self) -> None:
        self._process.kill()
        self._process.join(timeout=10.0)
        self._pipe.close()


def _work(pipe: Connection, parent: int) -> None:
    """The worker's main loop."""
    with suppress(OSError, AttributeError):  # die with the launcher, even in the middle of a call
        ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is the launcher's to handle
    pipe.send_bytes(b"ready")
    while True:
        try:
            payload = pipe.recv_bytes()
        except EOFError:
            return
        pipe.send_bytes(pickle.dumps(_evaluate(payload)))


def _evaluate(payload: bytes) -> tuple[float | None, str]:
    """(score, "") or (None, what went wrong)."""
    try:
        function, args = pickle.loads(payload)
        score = float(function(*args))
    except BaseException as error:  # sys.exit in a reward function is its trouble, not the worker's
        text = " ".join(str(error).split())[:300]
        return None, f"{type(error).__name__}: {text}"
    return (score, "") if math.isfinite(score) else (None, f"the reward is {score}, not a finite number")
