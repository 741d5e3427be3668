"""The two ends of a transport. A transport moves bytes; planning, checking and loading happen elsewhere."""

from typing import Any, Protocol

from torch import Tensor

from ..channel import Channel
from ..plan import Bucket, BucketPlan

#: Persistent buffers: the pusher fills one while the receivers empty the other.
NUM_SLOTS = 2


class Sender(Protocol):
    """The pusher's end, on the sending rank."""

    name: str

    def prepare(self, plan: BucketPlan) -> None:
        """Make the persistent buffers large enough. Called before every push; cheap when they are."""

    def buffer(self, bucket: Bucket) -> Tensor:
        """Where the source writes this bucket: uint8, 1-D, at least ``bucket.nbytes`` long."""

    def greet(self, hello: dict[str, Any]) -> tuple[dict[str, Any], list[int]]:
        """What this worker needs to attach: a message part and file descriptors.

        ``hello`` is the worker's first message and, as ``where``, how errors name it.

        Raises SyncConfigError when this transport cannot reach it.
        """

    def settle(self) -> dict[str, Any]:
        """Called once every worker was greeted: what all of them must know besides. Usually nothing."""

    def deliver(self, bucket: Bucket, links: list[Channel]) -> None:
        """Move the bytes for transports that push; called after the bucket message went out. May do nothing."""

    def reset(self) -> None:
        """A push failed: give up what is still in flight."""

    def close(self) -> None:
        """Free the buffers."""


class Receiver(Protocol):
    """A worker's end, inside the server."""

    def attach(self, greeting: dict[str, Any], fds: list[int], plan: BucketPlan) -> None:
        """Use what the pusher's ``greet`` said. Owns the descriptors."""

    def receive(self, bucket: Bucket, channel: Channel) -> Tensor:
        """The bucket's bytes on the device the model loads from; valid until the next call for the same slot."""

    def close(self) -> None:
        """Let go of everything."""
