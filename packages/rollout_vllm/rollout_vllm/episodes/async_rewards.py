"""Runs coroutine functions as rewards: many calls at a time in the event loop of one worker process.

with AsyncRewardPool(timeout_s=30.0, max_in_flight=64) as pool:
    outcome = await pool.score(my_async_reward, text, prompt)
"""

import asyncio
import os
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from ..config import require
from .processes import describe
from .rewards import Arguments, RewardPool, Scores, answer, leave_if_forked, load, read_scores, receive

_LATE_S = 1.0
"""A call that has no answer so long after its time limit is one whose event loop is blocked."""


class AsyncRewardPool(RewardPool):
    """`RewardPool` for coroutine functions: one worker process, up to `max_in_flight` calls at the same time.

    A call that takes too long is canceled. If the process dies or its event loop is blocked, the calls in flight are
    made again one at a time, so that only the one that did it fails; such a function may be called twice for a sample.
    """

    late_s, late_words = _LATE_S, "; it blocks the event loop"

    def __init__(
        self,
        *,
        timeout_s: float = 30.0,
        start_timeout_s: float = 60.0,
        max_in_flight: int = 64,
        printed_dir: str | None = None,
    ) -> None:
        require(max_in_flight >= 1, "max_in_flight", max_in_flight, "1 or more")
        self.max_in_flight = max_in_flight
        super().__init__(timeout_s=timeout_s, start_timeout_s=start_timeout_s, printed_dir=printed_dir)

    def _printed(self, index: int) -> str:
        return super()._printed(index).replace("reward_0.log", "reward_async.log")

    @staticmethod
    def work(pipe: Connection) -> None:
        """Makes each call that it receives at once, and sends what the worker of `RewardPool` does.

        Besides, it sends (number, "timeout", ...) for a call that it has canceled, and then (number, "stuck", ...) for
        one that goes on nevertheless.
        """
        pipe.send_bytes(b"ready")
        asyncio.run(_answer(pipe))


# ---- the worker process ----------------------------------------------------------------------------------------------
async def _answer(pipe: Connection) -> None:
    loop, ended, tasks = asyncio.get_running_loop(), asyncio.Event(), set[asyncio.Task[None]]()

    def on_call() -> None:
        try:
            call, arguments = receive(pipe)
        except EOFError:
            loop.remove_reader(pipe.fileno())
            ended.set()
            return
        task = asyncio.ensure_future(_make_call(pipe, *call, arguments))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    loop.add_reader(pipe.fileno(), on_call)
    await ended.wait()
    os._exit(0)  # without waiting for calls that go on although they were canceled


async def _make_call(
    pipe: Connection, number: int, function: bytes, num_scores: int | None, timeout_s: float, arguments: bytes
) -> None:
    if (loaded := load(pipe, number, function, arguments)) is None:
        return
    begin = time.monotonic()
    call = asyncio.ensure_future(_evaluate(*loaded, num_scores))
    await asyncio.wait({call}, timeout=timeout_s)
    if call.done():
        answer(pipe, number, "scores", call.result(), begin)
        return
    call.cancel()
    answer(pipe, number, "timeout", f"no reward within {timeout_s:g} s", begin)
    await asyncio.wait({call}, timeout=_LATE_S)
    if not call.done():
        answer(pipe, number, "stuck", None, begin)


async def _evaluate(function: Callable[..., Any], arguments: Arguments, num_scores: int | None) -> Scores:
    own, (args, keywords) = os.getpid(), arguments
    try:
        result = await function(*args, **keywords)
        leave_if_forked(own)
        return read_scores(result, num_scores)
    except BaseException as error:  # sys.exit must not end the worker
        leave_if_forked(own)
        return [(None, describe(error))] * (num_scores or 1)
