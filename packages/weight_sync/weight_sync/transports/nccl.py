"""NCCL between GPUs: one communicator of the pusher and all workers of all servers, one broadcast a bucket.

The communicator belongs to this sync alone (no default process group is touched, on either side) and is kept between
pushes as long as the same workers answer. NCCL waits without a limit for a member that does not come, so all of them
meet in the store first. A worker that dies in the middle would leave the broadcast waiting for ever: ``reset`` aborts
the communicator and the next push builds another.
"""

import datetime
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, TCPStore

from ..channel import Channel
from ..errors import ChannelError, SyncConfigError, WeightSyncError
from ..plan import Bucket, BucketPlan
from .base import NUM_SLOTS
from .tcp import grown

_MEETING_POLL_S = 0.002


class NcclSender:
    """Pusher's end: rank 0 of the communicator."""

    name = "nccl"

    def __init__(self, device: torch.device, host: str, timeout_s: float) -> None:
        if device.type != "cuda":
            raise SyncConfigError(f"transport: 'nccl' needs the trainer's tensors on a GPU, they are on {device}")
        self._device = device
        self._host = host
        self._timeout_s = timeout_s
        self._store: TCPStore | None = None
        self._generation = 0
        self._greeted: list[str] = []
        self._where: list[str] = []
        self._members: tuple[str, ...] = ()
        self._buffers: list[Tensor] = []
        self._comm: Any = None
        self._works: dict[int, Any] = {}

    def prepare(self, plan: BucketPlan) -> None:
        """See Sender."""
        self._buffers = grown(self._buffers, plan, self._device)
        self._greeted, self._where = [], []

    def buffer(self, bucket: Bucket) -> Tensor:
        """See Sender."""
        work = self._works.pop(bucket.index % NUM_SLOTS, None)
        if work is not None:
            work.wait()  # every receiver has taken it: this only orders the streams
        return self._buffers[bucket.index % NUM_SLOTS]

    def greet(self, hello: dict[str, Any]) -> tuple[dict[str, Any], list[int]]:
        """Where the communicator meets, and this worker's rank in it. Raises SyncConfigError off a GPU."""
        if hello.get("device") != "cuda":
            raise SyncConfigError(
                f"transport: 'nccl' cannot reach a server on {hello.get('device')}; use 'shm' or 'tcp'"
            )
        if self._store is None:
            self._store = TCPStore(
                self._host, 0, is_master=True, wait_for_workers=False, timeout=_seconds(self._timeout_s)
            )
        self._greeted.append(f"{hello['server']}/{hello['worker']}/{hello['process']}")
        self._where.append(str(hello.get("where", f"worker {hello['worker']}")))
        return {"host": self._host, "port": self._store.port, "rank": len(self._greeted)}, []

    def settle(self) -> dict[str, Any]:
        """After all workers were greeted: the communicator's size and generation, sent to all of them."""
        members = tuple(self._greeted)
        if members != self._members:
            self.reset()
            self._generation += 1
            self._members = members
        return {"size": len(members) + 1, "generation": self._generation}

    def deliver(self, bucket: Bucket, links: list[Channel]) -> None:
        """Broadcast the bucket; every worker has posted its part on reading the announcement."""
        if self._comm is None:
            assert self._store is not None
            await_members(self._store, self._generation, self._where, links, self._timeout_s)
            self._comm = communicator(self._store, 0, len(self._members) + 1, self._generation, self._timeout_s)
        slot = bucket.index % NUM_SLOTS
        with torch.cuda.device(self._device):
            self._works[slot] = self._comm.broadcast([self._buffers[slot][: bucket.nbytes]], _from_root())

    def reset(self) -> None:
        """Abort what is in flight; the next push makes a new communicator."""
        if self._comm is not None:
            self._comm.abort()
        self._comm, self._members, self._works = None, (), {}

    def close(self) -> None:
        """See Sender."""
        self.reset()
        self._buffers, self._store = [], None


class NcclReceiver:
    """Worker's end."""

    def __init__(self, device: torch.device, timeout_s: float) -> None:
        self._device = device
        self._timeout_s = timeout_s
        self._buffers: list[Tensor] = []
        self._next: dict[str, Any] = {}
        self._key: tuple[Any, ...] = ()
        self._comm: Any = None
        self._store: TCPStore | None = None

    def attach(self, greeting: dict[str, Any], fds: list[int], plan: BucketPlan) -> None:
        """See Receiver. The communicator itself is built with the first bucket, when every member is ready."""
        self._buffers = grown(self._buffers, plan, self._device)
        self._next = greeting

    def receive(self, bucket: Bucket, channel: Channel) -> Tensor:
        """See Receiver."""
        key = tuple(self._next[field] for field in ("host", "port", "rank", "size", "generation"))
        if key != self._key:
            self.reset()
            host, port, rank, size, generation = key
            self._store = TCPStore(host, port, is_master=False, timeout=_seconds(self._timeout_s))
            join_members(self._store, generation, rank, channel, self._timeout_s)
            self._comm = communicator(self._store, rank, size, generation, self._timeout_s)
            self._key = key
        target = self._buffers[bucket.index % NUM_SLOTS][: bucket.nbytes]
        with torch.cuda.device(self._device):
            work = self._comm.broadcast([target], _from_root())
            while not work.is_completed():
                if channel.is_hung_up():
                    self.reset()
                    raise ChannelError("the pusher closed the connection in the middle of a bucket")
                time.sleep(2e-5)
            work.wait()
        return target

    def reset(self) -> None:
        """Abort the communicator after a failed sync."""
        if self._comm is not None:
            self._comm.abort()
        self._comm, self._key = None, ()

    def close(self) -> None:
        """See Receiver."""
        self.reset()
        self._buffers, self._store = [], None


def await_members(
    store: TCPStore, generation: int, where: Sequence[str], links: Sequence[Channel], timeout_s: float
) -> None:
    """The pusher's side of the meeting: every worker (``where`` and ``links`` in the order of ranks) is in the store.

    Raises ChannelError when one has hung up: what it said last is in its link, unread. Raises WeightSyncError naming
    those that did not come in time.
    """
    meeting = _meeting(store, generation)
    missing = dict(enumerate(where, start=1))
    deadline = time.monotonic() + timeout_s
    while True:
        missing = {rank: name for rank, name in missing.items() if not meeting.check([str(rank)])}
        if not missing:
            break
        for name, link in zip(where, links, strict=True):
            if link.is_hung_up():
                raise ChannelError(f"{name}: hung up before the communicator was made")
        if time.monotonic() > deadline:
            raise WeightSyncError(
                f"{', '.join(missing.values())}: did not come to the communicator at {store.host}:{store.port} "
                f"within {timeout_s} s"
            )
        time.sleep(_MEETING_POLL_S)
    meeting.set("0", b"1")


def join_members(store: TCPStore, generation: int, rank: int, channel: Channel, timeout_s: float) -> None:
    """A worker's side: it is here, and waits until the pusher has seen everyone. Raises ChannelError."""
    meeting = _meeting(store, generation)
    meeting.set(str(rank), b"1")
    deadline = time.monotonic() + timeout_s
    while not meeting.check(["0"]):
        if channel.is_hung_up():
            raise ChannelError("the pusher closed the connection before the communicator was made")
        if time.monotonic() > deadline:
            raise ChannelError(f"the other workers did not come to the communicator within {timeout_s} s")
        time.sleep(_MEETING_POLL_S)


def _meeting(store: TCPStore, generation: int) -> Any:
    return PrefixStore(f"plinth_weight_sync/members/{generation}", store)


def communicator(store: TCPStore, rank: int, size: int, generation: int, timeout_s: float) -> Any:
    """An NCCL communicator that no default group knows of."""
    nccl: Any = getattr(dist, "ProcessGroupNCCL", None)
    if nccl is None:
        raise SyncConfigError("transport: 'nccl' needs a torch built with NCCL")
    options = nccl.Options()
    options._timeout = _seconds(timeout_s)
    prefixed = PrefixStore(f"plinth_weight_sync/{generation}", store)
    return nccl(prefixed, rank, size, options)


def _from_root() -> Any:
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor = 0, 0
    return options


def _seconds(timeout_s: float) -> datetime.timedelta:
    return datetime.timedelta(seconds=timeout_s)
