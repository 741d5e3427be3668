"""Plain TCP between hosts (or containers): the bucket's bytes follow its announcement on each worker's connection.

Host memory on both sides; a CUDA receiver copies to its GPU. Several workers are served at the same time.
"""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from ..channel import Channel
from ..plan import Bucket, BucketPlan
from .base import NUM_SLOTS


class TcpSender:
    """Pusher's end: two host buffers and a thread per worker while a bucket is on its way."""

    name = "tcp"

    def __init__(self) -> None:
        self._buffers: list[Tensor] = []
        self._pool: ThreadPoolExecutor | None = None

    def prepare(self, plan: BucketPlan) -> None:
        """See Sender."""
        self._buffers = grown(self._buffers, plan, torch.device("cpu"))

    def buffer(self, bucket: Bucket) -> Tensor:
        """See Sender."""
        return self._buffers[bucket.index % NUM_SLOTS]

    def greet(self, hello: dict[str, Any]) -> tuple[dict[str, Any], list[int]]:
        """Nothing to attach to: the bytes come over the connection."""
        return {}, []

    def settle(self) -> dict[str, Any]:
        """Nothing more."""
        return {}

    def deliver(self, bucket: Bucket, links: list[Channel]) -> None:
        """Send the bucket to every worker; returns when it has left."""
        view = memoryview(self.buffer(bucket)[: bucket.nbytes].numpy().data).cast("B")
        if len(links) == 1:
            links[0].send_bytes(view)
            return
        if self._pool is None:
            self._pool = ThreadPoolExecutor(len(links), thread_name_prefix="weight_sync_tcp")
        for future in [self._pool.submit(link.send_bytes, view) for link in links]:
            future.result()

    def reset(self) -> None:
        """The connections of a failed push are closed by its session."""

    def close(self) -> None:
        """See Sender."""
        if self._pool is not None:
            self._pool.shutdown(wait=False)
        self._buffers = []


class TcpReceiver:
    """Worker's end: host buffers, and device buffers behind them on a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: list[Tensor] = []
        self._staged: list[Tensor] = []

    def attach(self, greeting: dict[str, Any], fds: list[int], plan: BucketPlan) -> None:
        """See Receiver."""
        self._buffers = grown(self._buffers, plan, torch.device("cpu"), pin=self._device.type == "cuda")
        if self._device.type != "cpu":
            self._staged = grown(self._staged, plan, self._device)

    def receive(self, bucket: Bucket, channel: Channel) -> Tensor:
        """See Receiver."""
        index = bucket.index % NUM_SLOTS
        host = self._buffers[index][: bucket.nbytes]
        channel.receive_bytes_into(memoryview(host.numpy().data).cast("B"))
        if self._device.type == "cpu":
            return host
        staged = self._staged[index][: bucket.nbytes]
        staged.copy_(host)
        return staged

    def close(self) -> None:
        """See Receiver."""
        self._buffers, self._staged = [], []


def grown(buffers: list[Tensor], plan: BucketPlan, device: torch.device, *, pin: bool = False) -> list[Tensor]:
    """``buffers``, or new ones when the plan needs more; faulted in, for cold pages are slow."""
    sizes = plan.slot_bytes(NUM_SLOTS)
    if len(buffers) == len(sizes) and all(b.numel() >= size for b, size in zip(buffers, sizes, strict=True)):
        return buffers
    return [torch.zeros(size, dtype=torch.uint8, device=device, pin_memory=pin and size > 0) for size in sizes]
