"""The two ends of a transport. A transport only moves bytes."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from ..channel import Channel
from ..plan import Bucket, BucketPlan


class Sender(ABC):
    """The pusher's end, on the sending rank. The defaults suit a transport whose workers read the buffers in place."""

    name: str

    can_borrow = False
    """Whether this sender can send from the buffers of another one on the same device."""

    @abstractmethod
    def prepare(self, plan: BucketPlan, lent: list[Tensor]) -> list[Tensor]:
        """Allocate persistent buffers for this plan and return them. Called before every push.

        Reuses buffers that are large enough. ``lent``: another sender's buffers for this plan, which a sender that can
        borrow uses instead of its own; empty if there are none.
        """

    @abstractmethod
    def buffer(self, bucket: Bucket) -> Tensor:
        """The buffer into which the source writes this bucket: uint8, 1-D, at least ``bucket.nbytes`` long."""

    @abstractmethod
    def greet(self, hello: dict[str, Any]) -> tuple[dict[str, Any], list[int]]:
        """What this worker needs to attach: a part of the plan message, and file descriptors.

        ``hello`` is the worker's first message plus ``where``, its name in errors. Raises SyncConfigError when the
        transport cannot reach the worker.
        """

    def common_greeting(self) -> dict[str, Any]:
        """What all workers of this transport need to attach, in addition to `greet`. Called after all were greeted."""
        return {}

    def deliver(self, bucket: Bucket, channels: list[Channel]) -> None:
        """Send the bytes to the workers, after the bucket message."""
        del bucket, channels

    def reset(self) -> None:
        """Abort transfers in flight after a failed push."""
        return

    @abstractmethod
    def close(self) -> None:
        """Free the buffers."""


class Receiver(Protocol):
    """A worker's end, inside the server."""

    def attach(self, greeting: dict[str, Any], fds: list[int], plan: BucketPlan) -> None:
        """Attach with the sender's greeting. Takes ownership of the descriptors."""

    def receive(self, bucket: Bucket, channel: Channel) -> Tensor:
        """The bucket's bytes (uint8, 1-D) on the model's device; valid until the buffer's next bucket is received."""

    def close(self) -> None:
        """Free the buffers."""


def fits(have: Sequence[int], needed: Sequence[int]) -> bool:
    """Whether buffers of ``have`` bytes are enough for buffers of ``needed`` bytes."""
    return len(have) >= len(needed) and all(size >= need for size, need in zip(have, needed, strict=False))


def grow_buffers(buffers: list[Tensor], plan: BucketPlan, device: torch.device, *, pin: bool = False) -> list[Tensor]:
    """``buffers``, or new uint8 buffers if the plan needs more. Zeroed, because the first write to a page is slow."""
    sizes = plan.buffer_bytes()
    if fits([buffer.numel() for buffer in buffers], sizes):
        return buffers
    return [torch.zeros(size, dtype=torch.uint8, device=device, pin_memory=pin) for size in sizes]
