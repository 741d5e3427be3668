"""Keeps the replies of vLLM's workers in order after one of this package's calls fails.

``MultiprocExecutor.collective_rpc`` raises at the first failed reply and leaves the other workers' replies in their
queues, where every later call would read the reply of the call before it. The patch reads the remaining replies at the
start of the next call, not at once: another worker may still be waiting for the pusher, which waits for this call.
"""

from typing import Any

from .patch import FENCE

_EXECUTOR = "vllm.v1.executor.multiproc_executor:MultiprocExecutor"

PATCH = FENCE.patch(
    name="stale replies",
    reason="keeps the replies of several workers in order after a failed call",
    otherwise="refused",
    replaces={_EXECUTOR: ("collective_rpc(method, timeout, args, kwargs, ...)",)},
    reads={_EXECUTOR: ("response_mqs",)},
)

#: Calls that can fail without an engine crash: a rejected pusher or plan, a failed sync, a missing adapter.
_CALLS = ("init_weight_transfer_engine", "start_weight_update", "update_weights", "finish_weight_update", "add_lora")

#: Attribute of an executor: the queues whose reply to a failed call is unread.
_UNREAD = "_plinth_unread_replies"


class _Queue:
    """A worker's reply queue during one call; records whether the reply was read."""

    def __init__(self, queue: Any) -> None:
        self.queue = queue
        self.is_read = False

    def dequeue(self, *args: Any, **kwargs: Any) -> Any:
        """The worker's reply."""
        reply = self.queue.dequeue(*args, **kwargs)
        self.is_read = True
        return reply

    def __getattr__(self, name: str) -> Any:
        return getattr(self.queue, name)


def reading_stale_replies(call: Any) -> Any:
    """``collective_rpc`` that first reads the replies to the previous call, if that failed."""

    def collective_rpc(self: Any, method: Any, *args: Any, **kwargs: Any) -> Any:
        unread = self.__dict__.get(_UNREAD)
        while unread:
            unread[-1].dequeue()
            unread.pop()
        queues = getattr(self, "response_mqs", None)
        if method not in _CALLS or not queues:
            return call(self, method, *args, **kwargs)
        self.response_mqs = watched = [_Queue(queue) for queue in queues]
        try:
            return call(self, method, *args, **kwargs)
        except Exception:
            if any(queue.is_read for queue in watched):  # else it failed before the workers received the call
                setattr(self, _UNREAD, [queue.queue for queue in watched if not queue.is_read])
            raise
        finally:
            if self.response_mqs is watched:  # else a shutdown has replaced it meanwhile
                self.response_mqs = queues

    return collective_rpc
