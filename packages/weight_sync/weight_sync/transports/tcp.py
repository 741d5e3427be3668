"""TCP between hosts or containers: the bucket's bytes follow the bucket message on each worker's connection.

Buffers are in host memory on both sides; a CUDA receiver copies to its GPU. Sends to several workers in parallel.
"""

from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

from torch import Tensor

from ..channel import Channel
from ..plan import NUM_BUFFERS, Bucket, BucketPlan
from .base import CPU, Receiver, Sender, TransportKind, grow_buffers


class TcpSender(Sender):
    """The pusher's end: two host buffers, and one thread per worker while it sends a bucket."""

    name = "tcp"
    can_borrow = True

    def __init__(self) -> None:
        super().__init__()
        self._pool: ThreadPoolExecutor | None = None

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
        super().close()


class TcpReceiver(Receiver):
    """The worker's end: host buffers (pinned on a GPU worker) and, on a GPU, device buffers."""

    def attach(self, greeting: dict[str, Any], fds: list[int], plan: BucketPlan) -> None:
        self._buffers = grow_buffers(self._buffers, plan, CPU, pin=self._device.type == "cuda")
        self._stage(plan)

    def receive(self, bucket: Bucket, channel: Channel) -> Tensor:
        host = self._buffers[bucket.index % NUM_BUFFERS][: bucket.nbytes]
        channel.receive_bytes_into(memoryview(host.numpy().data).cast("B"))
        return super().receive(bucket, channel)


KIND = TransportKind(
    sender=lambda device, host, config: TcpSender(), receiver=lambda device, timeout_s: TcpReceiver(device)
)
