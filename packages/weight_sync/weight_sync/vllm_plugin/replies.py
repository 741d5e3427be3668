"""Keeps vLLM's executor in step with its workers when one of this package's calls fails.

``MultiprocExecutor.collective_rpc`` raises at the first failure it reads and leaves the other workers' replies in their
queues, where every later call would take the reply of the one before it for its own. What a failed call left is taken
before the next call instead of at once: another worker may still be waiting for the pusher, who waits for this answer.
"""

import functools
from typing import Any

#: The calls that fail on purpose: a pusher refused, a sync that went wrong, an adapter that is not there.
_CALLS = (
    "init_weight_transfer_engine",
    "start_weight_update",
    "update_weights",
    "finish_weight_update",
    "add_lora",
)

_MARK = "_plinth_weight_sync_replies"


class _Queue:
    """A worker's reply queue during one call: remembers whether the reply was taken."""

    def __init__(self, queue: Any) -> None:
        self.queue = queue
        self.is_taken = False

    def dequeue(self, *args: Any, **kwargs: Any) -> Any:
        """The worker's reply."""
        reply = self.queue.dequeue(*args, **kwargs)
        self.is_taken = True
        return reply

    def __getattr__(self, name: str) -> Any:
        return getattr(self.queue, name)


def keep_in_step() -> None:
    """Teach vLLM's executor of several workers to take the replies that a failed call left. Safe to call twice."""
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    call = getattr(MultiprocExecutor, "collective_rpc", None)
    if call is not None and not hasattr(call, _MARK):
        MultiprocExecutor.collective_rpc = in_step(call)


def in_step(call: Any) -> Any:
    """An executor's ``collective_rpc`` that begins with the replies which the call before has left."""

    @functools.wraps(call)
    def collective_rpc(self: Any, method: Any, *args: Any, **kwargs: Any) -> Any:
        left = self.__dict__.get(_MARK)
        while left:
            left[-1].dequeue()
            left.pop()
        queues = getattr(self, "response_mqs", None)
        if method not in _CALLS or not queues:
            return call(self, method, *args, **kwargs)
        self.response_mqs = watched = [_Queue(queue) for queue in queues]
        try:
            return call(self, method, *args, **kwargs)
        except Exception:
            if any(queue.is_taken for queue in watched):  # else it failed before the workers were asked
                setattr(self, _MARK, [queue.queue for queue in watched if not queue.is_taken])
            raise
        finally:
            if self.response_mqs is watched:  # a shutdown meanwhile has emptied it
                self.response_mqs = queues

    setattr(collective_rpc, _MARK, True)
    return collective_rpc
