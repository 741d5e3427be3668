"""The two ends of a transport. A transport only moves bytes."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..channel import Channel
from ..config import SyncConfig
from ..errors import SyncConfigError
from ..plan import NUM_BUFFERS, Bucket, BucketPlan

CPU = torch.device("cpu")


class _Buffers:
    """The buffers of one end, and the memory behind them that has to be closed."""

    def __init__(self, device: torch.device = CPU) -> None:
        self._device = device
        self._buffers: list[Tensor] = []
        self._memory: list[Any] = []

    def _hold(self, memory: list[Any]) -> None:
        """Use memory of another kind than tensors: objects with ``bytes_N`` (uint8, 1-D) and ``close``."""
        self._memory, self._buffers = memory, [each.bytes_N for each in memory]

    def close(self) -> None:
        """Free the buffers."""
        for memory in self._memory:
            memory.close()
        self._memory, self._buffers = [], []


class Sender(_Buffers, ABC):
    """The pusher's end, on the sending rank. The defaults suit a transport whose workers read the buffers in place."""

    name: str

    can_borrow = False
    """True if this sender can send from the buffers of another one on the same device."""

    def prepare(self, plan: BucketPlan, lent: list[Tensor]) -> list[Tensor]:
        """The buffers for this plan, which are kept between pushes and replaced when a plan needs more. Called before
        every push.

        ``lent``: another sender's buffers for this plan, which a sender that can borrow uses instead of its own; empty
        if there are none.
        """
        sizes = plan.buffer_bytes()
        if lent and self.can_borrow:
            self._buffers = lent
        elif not fits(self._buffers, sizes):
            self._allocate(sizes)
        return self._buffers

    def _allocate(self, sizes: list[int]) -> None:
        self._buffers = new_buffers(sizes, self._device)

    def buffer(self, bucket: Bucket) -> Tensor:
        """The buffer into which the source writes this bucket: uint8, 1-D, at least ``bucket.nbytes`` long."""
        return self._buffers[bucket.index % NUM_BUFFERS]

    @abstractmethod
    def greet(self, hello: dict[str, Any]) -> tuple[dict[str, Any], list[int]]:
        """Greeting that lets a worker attach: a part of the plan message, and file descriptors.

        ``hello`` is the worker's first message plus ``where``, its name in errors. Raises SyncConfigError when the
        transport cannot reach the worker.
        """

    def _require_gpu(self, hello: dict[str, Any]) -> None:
        if hello.get("device") != "cuda":
            device = hello.get("device")
            raise SyncConfigError(
                f"it cannot reach a server on {device}", field="transport", value=self.name, allowed="shm or tcp"
            )

    def common_greeting(self) -> dict[str, Any]:
        """Part of the greeting for all workers of this transport, beside `greet`. Called after all were greeted."""
        return {}

    def deliver(self, bucket: Bucket, channels: list[Channel]) -> None:
        """Send the bytes to the workers, after the bucket message."""
        del bucket, channels

    def reset(self) -> None:
        """Abort transfers in flight after a failed push."""
        return


class Receiver(_Buffers, ABC):
    """A worker's end, inside the server. ``attach`` sets the buffers from which ``receive`` reads."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._staged: list[Tensor] = []
        self.id = ""
        """Name of the sender's buffers that are mapped."""

    @abstractmethod
    def attach(self, greeting: dict[str, Any], fds: list[int], plan: BucketPlan) -> None:
        """Attach with the sender's greeting. Takes ownership of the descriptors."""

    def receive(self, bucket: Bucket, channel: Channel) -> Tensor:
        """The bucket's bytes (uint8, 1-D) on the model's device; valid until the buffer's next bucket is received."""
        index = bucket.index % NUM_BUFFERS
        bytes_N = self._buffers[index][: bucket.nbytes]
        return self._staged[index][: bucket.nbytes].copy_(bytes_N) if self._staged else bytes_N

    def _stage(self, plan: BucketPlan) -> None:
        """Allocate memory on the model's device for buckets that arrive in CPU memory."""
        if self._device.type != "cpu":
            self._staged = grow_buffers(self._staged, plan, self._device)

    def close(self) -> None:
        super().close()
        self._staged, self.id = [], ""


@dataclass(frozen=True, kw_only=True)
class TransportKind:
    """A transport, as its module declares it in ``KIND``."""

    sender: Callable[[torch.device, str, SyncConfig], Sender]
    """Makes the pusher's end: (the pusher's device, this machine's address as the servers see it, settings)."""
    receiver: Callable[[torch.device, float], Receiver]
    """Makes a worker's end: (the model's device, time limit in seconds)."""
    one_host: str = ""
    """The mechanism that works within one host only; empty: the transport reaches every host."""
    needs_gpu: bool = False
    """Both ends must be on a GPU."""
    bucket_mib: int = 64
    """Largest bucket where ``SyncConfig.bucket_mib`` is None. A small bucket costs a fast transport half a millisecond,
    and a slow one could not overlap sending and loading with a large one."""


def fits(have: Sequence[Tensor], needed: Sequence[int]) -> bool:
    """True if buffers are enough for ``needed`` bytes each."""
    return len(have) >= len(needed) and all(len(buffer) >= need for buffer, need in zip(have, needed, strict=False))


def grow_buffers(buffers: list[Tensor], plan: BucketPlan, device: torch.device, *, pin: bool = False) -> list[Tensor]:
    """``buffers``, or new uint8 buffers if the plan needs more."""
    sizes = plan.buffer_bytes()
    return buffers if fits(buffers, sizes) else new_buffers(sizes, device, pin=pin)


def new_buffers(sizes: Sequence[int], device: torch.device, *, pin: bool = False) -> list[Tensor]:
    """uint8 buffers of these sizes. Zeroed, because the first write to a page is slow."""
    return [torch.zeros(size, dtype=torch.uint8, device=device, pin_memory=pin) for size in sizes]
