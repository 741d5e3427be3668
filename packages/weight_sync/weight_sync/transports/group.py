"""The senders of one push, which all send from one set of buffers."""

from collections.abc import Sequence

from torch import Tensor

from ..channel import Channel
from ..plan import Bucket, BucketPlan
from .base import Sender


class SenderGroup:
    """One sender per transport. The source fills a bucket once, and no transport copies it.

    The workers of ``shm`` and ``ipc`` map the buffers of their sender. The senders of ``tcp`` and ``nccl`` read any
    buffer on their device, so they borrow those buffers and allocate none.

    Args:
        senders: the sender of each server; servers with the same transport have the same object.
    """

    def __init__(self, senders: Sequence[Sender]) -> None:
        self._by_server = list(senders)
        self._senders = sorted(dict.fromkeys(senders), key=lambda sender: sender.can_borrow)

    def of(self, server: int) -> Sender:
        """The sender of this server, by the server's index."""
        return self._by_server[server]

    def prepare(self, plan: BucketPlan) -> None:
        """Allocate the buffers for this plan, or reuse buffers that are large enough. Called before every push."""
        buffers: list[Tensor] = []
        for sender in self._senders:
            buffers = sender.prepare(plan, buffers)

    def buffer(self, bucket: Bucket) -> Tensor:
        """The buffer into which the source writes this bucket, free of every sender's earlier transfer."""
        buffers = [sender.buffer(bucket) for sender in self._senders]
        return buffers[0]

    def deliver(self, bucket: Bucket, channels: Sequence[tuple[int, Channel]]) -> None:
        """Send the bytes to the workers, after the bucket message. ``channels``: with the index of their server."""
        for sender in self._senders:
            sender.deliver(bucket, [channel for server, channel in channels if self._by_server[server] is sender])

    def reset(self) -> None:
        """Abort transfers in flight after a failed push."""
        for sender in self._senders:
            sender.reset()

    def close(self) -> None:
        """Free the buffers; the owner of borrowed ones frees them last."""
        for sender in reversed(self._senders):
            sender.close()
