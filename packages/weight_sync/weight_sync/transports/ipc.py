"""CUDA IPC: the workers read the pusher's device buffers in place, on the same GPU or a peer of the same host.

The handles travel over the Unix socket as hexadecimal text. Mappings are kept between syncs.
"""

import secrets
from typing import Any

import torch
from torch import Tensor

from ..channel import Channel
from ..errors import SyncConfigError
from ..plan import Bucket, BucketPlan
from .base import NUM_SLOTS
from .cuda_memory import DeviceMemory


class IpcSender:
    """Pusher's end: up to two device buffers, kept between pushes."""

    name = "ipc"

    def __init__(self, device: torch.device) -> None:
        if device.type != "cuda":
            raise SyncConfigError(f"transport: 'ipc' needs the trainer's tensors on a GPU, they are on {device}")
        self._device = device
        self._buffers: list[DeviceMemory] = []
        self._handles: list[list[Any]] = []
        self._id = ""

    def prepare(self, plan: BucketPlan) -> None:
        """See Sender."""
        sizes = [size for size in plan.slot_bytes(NUM_SLOTS) if size]
        have = [buffer.num_bytes for buffer in self._buffers]
        if len(have) >= len(sizes) and all(had >= size for had, size in zip(have, sizes, strict=False)):
            return
        self.close()
        self._buffers = [DeviceMemory.allocate(size, self._device) for size in sizes]
        self._handles = [[buffer.handle().hex(), buffer.num_bytes] for buffer in self._buffers]
        self._id = secrets.token_hex(8)

    def buffer(self, bucket: Bucket) -> Tensor:
        """See Sender."""
        return self._buffers[bucket.index % NUM_SLOTS].bytes_N

    def greet(self, hello: dict[str, Any]) -> tuple[dict[str, Any], list[int]]:
        """The handles. Raises SyncConfigError for a worker that is not on a GPU."""
        if hello.get("device") != "cuda":
            raise SyncConfigError(
                f"transport: 'ipc' cannot reach a server on {hello.get('device')}; use 'shm' or 'tcp'"
            )
        return {"buffers": self._id, "handles": self._handles}, []

    def settle(self) -> dict[str, Any]:
        """Nothing more."""
        return {}

    def deliver(self, bucket: Bucket, links: list[Channel]) -> None:
        """The bytes are already there."""

    def reset(self) -> None:
        """Nothing is in flight after an error."""

    def close(self) -> None:
        """See Sender."""
        for buffer in self._buffers:
            buffer.close()
        self._buffers = []


class IpcReceiver:
    """Worker's end: views of the pusher's buffers."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: list[DeviceMemory] = []
        self._id = ""

    def attach(self, greeting: dict[str, Any], fds: list[int], plan: BucketPlan) -> None:
        """See Receiver."""
        if greeting["buffers"] == self._id:
            return
        self.close()
        self._buffers = [
            DeviceMemory.open(bytes.fromhex(handle), num_bytes, self._device)
            for handle, num_bytes in greeting["handles"]
        ]
        self._id = greeting["buffers"]

    def receive(self, bucket: Bucket, channel: Channel) -> Tensor:
        """See Receiver."""
        return self._buffers[bucket.index % NUM_SLOTS].bytes_N[: bucket.nbytes]

    def close(self) -> None:
        """See Receiver."""
        for buffer in self._buffers:
            buffer.close()
        self._buffers, self._id = [], ""
