"""TCP between hosts or containers: the bucket's bytes follow the bucket message on each worker's connection.

Buffers are in host memory on both sides; a CUDA receiver copies to its GPU. Sends to several workers in parallel.
"""

from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import torch
from torch import Tensor

from ..channel import Channel
from ..plan import NUM_BUFFERS, Bucket, BucketPlan
from .base import Sender, grow_buffers


class TcpSender(Sender):
    """The pusher's end: two host buffers, and one thread per worker while it sends a bucket."""

    name = "tcp"
    can_borrow = True

    def __init__(self) -> None:
        self._buffers: list[Tensor] = []
        self._pool: ThreadPoolExecutor | None = None

    def prepare(self, plan: BucketPlan, lent: list[Tensor]) -> list[Tensor]:
        self._buffers = lent or grow_buffers(self._buffers, plan, torch.device("cpu"))
        return self._buffers

    def buffer(self, bucket: Bucket) -> Tensor:
        return self._buffers[bucket.index % NUM_BUFFERS]

    def greet(self, hello: dict[str, Any]) -> tuple[dict[str, Any], list[int]]:
        """Empty: the bytes come over the same connection."""
        return {}, []

    def deliver(self, bucket: Bucket, channels: list[Channel]) -> None:
        """Send the bucket to every worker; returns when no thread sends any more, and raises the first error."""
        view = memoryview(self.buffer(bucket)[: bucket.nbytes].numpy().data).cast("B")
        if len(channels) == 1:
            channels[0].send_bytes(view)
            return
        if self._pool is None:
            self._pool = ThreadPoolExecutor(len(channels), thread_name_prefix="weight_sync_tcp")
        sends = [self._pool.submit(channel.send_bytes, view) for channel in channels]
        wait(sends)
        for send in sends:
            send.result()

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=False)
        self._buffers = []


class TcpReceiver:
    """The worker's end: host buffers (pinned on a GPU worker) and, on a GPU, device buffers."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: list[Tensor] = []
        self._staged: list[Tensor] = []

    def attach(self, greeting: dict[str, Any], fds: list[int], plan: BucketPlan) -> None:
        self._buffers = grow_buffers(self._buffers, plan, torch.device("cpu"), pin=self._device.type == "cuda")
        if self._device.type != "cpu":
            self._staged = grow_buffers(self._staged, plan, self._device)

    def receive(self, bucket: Bucket, channel: Channel) -> Tensor:
        index = bucket.index % NUM_BUFFERS
        host = self._buffers[index][: bucket.nbytes]
        channel.receive_bytes_into(memoryview(host.numpy().data).cast("B"))
        if self._device.type == "cpu":
            return host
        staged = self._staged[index][: bucket.nbytes]
        staged.copy_(host)
        return staged

    def close(self) -> None:
        self._buffers, self._staged = [], []
