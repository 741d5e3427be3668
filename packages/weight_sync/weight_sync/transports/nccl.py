"""NCCL between GPUs: one communicator of the pusher and all workers of all servers, one broadcast per bucket.

The communicator is separate from torch's default process group on either side, and is kept between pushes while the
workers stay the same. NCCL waits indefinitely for a missing member, so all members meet in a TCPStore first. If a
worker dies during a broadcast, ``reset`` aborts the communicator and the next push creates another.
"""

import datetime
import secrets
import socket
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, TCPStore

from ..channel import Channel
from ..errors import ChannelError, SyncConfigError, WeightSyncError
from ..plan import NUM_BUFFERS, Bucket, BucketPlan
from .base import Receiver, Sender, TransportKind, grow_buffers

_RENDEZVOUS_POLL_S = 0.002


class NcclSender(Sender):
    """The pusher's end: rank 0 of the communicator."""

    name = "nccl"
    can_borrow = True

    def __init__(self, device: torch.device, host: str, timeout_s: float) -> None:
        super().__init__(device)
        self._host = host
        self._timeout_s = timeout_s
        self._store: TCPStore | None = None
        self._generation = ""
        self._greeted: list[str] = []
        self._where: list[str] = []
        self._members: tuple[str, ...] = ()
        self._comm: Any = None
        self._works: dict[int, Any] = {}

    def prepare(self, plan: BucketPlan, lent: list[Tensor]) -> list[Tensor]:
        self._greeted, self._where = [], []
        return super().prepare(plan, lent)

    def buffer(self, bucket: Bucket) -> Tensor:
        work = self._works.pop(bucket.index % NUM_BUFFERS, None)
        if work is not None:
            work.wait()  # every receiver has acknowledged it, so this only orders the streams
        return super().buffer(bucket)

    def greet(self, hello: dict[str, Any]) -> tuple[dict[str, Any], list[int]]:
        """Address of the store and the worker's rank. Raises SyncConfigError for a worker that is not on a GPU."""
        self._require_gpu(hello)
        if self._store is None:
            self._store = create_store(self._host, self._timeout_s)
        self._greeted.append(f"{hello['server']}/{hello['worker']}/{hello['process']}")
        self._where.append(str(hello.get("where", f"worker {hello['worker']}")))
        return {"host": self._host, "port": self._store.port, "rank": len(self._greeted)}, []

    def common_greeting(self) -> dict[str, Any]:
        """Size and generation of the communicator; a new generation when the workers changed."""
        members = tuple(self._greeted)
        if members != self._members:
            self.reset()
            self._generation = secrets.token_hex(16)  # in the name of every key: strangers can reach the store
            self._members = members
        return {"size": len(members) + 1, "generation": self._generation}

    def deliver(self, bucket: Bucket, channels: list[Channel]) -> None:
        """Broadcast the bucket; every worker joins the broadcast when it reads the bucket message."""
        if self._comm is None:
            assert self._store is not None
            await_workers(self._store, self._generation, self._where, channels, self._timeout_s)
            self._comm = create_communicator(self._store, 0, len(self._members) + 1, self._generation, self._timeout_s)
        slot = bucket.index % NUM_BUFFERS
        with torch.cuda.device(self._device):
            self._works[slot] = self._comm.broadcast([self._buffers[slot][: bucket.nbytes]], _from_root())

    def reset(self) -> None:
        """Abort the communicator; the next push creates another."""
        if self._comm is not None:
            self._comm.abort()
        self._comm, self._members, self._works = None, (), {}

    def close(self) -> None:
        self.reset()
        self._store = None
        super().close()


class NcclReceiver(Receiver):
    """The worker's end: one rank of the communicator."""

    def __init__(self, device: torch.device, timeout_s: float) -> None:
        super().__init__(device)
        self._timeout_s = timeout_s
        self._greeting: dict[str, Any] = {}
        self._key: tuple[Any, ...] = ()
        self._comm: Any = None
        self._store: TCPStore | None = None

    def attach(self, greeting: dict[str, Any], fds: list[int], plan: BucketPlan) -> None:
        """The communicator is created with the first bucket, when every member is ready."""
        self._buffers = grow_buffers(self._buffers, plan, self._device)
        self._greeting = greeting

    def receive(self, bucket: Bucket, channel: Channel) -> Tensor:
        key = tuple(self._greeting[field] for field in ("host", "port", "rank", "size", "generation"))
        if key != self._key:
            self.reset()
            host, port, rank, size, generation = key
            self._store = TCPStore(host, port, is_master=False, timeout=_seconds(self._timeout_s))
            join_rendezvous(self._store, generation, rank, channel, self._timeout_s)
            self._comm = create_communicator(self._store, rank, size, generation, self._timeout_s)
            self._key = key
        target = self._buffers[bucket.index % NUM_BUFFERS][: bucket.nbytes]
        with torch.cuda.device(self._device):
            work = self._comm.broadcast([target], _from_root())
            while not work.is_completed():
                if channel.is_hung_up():
                    self.reset()
                    raise ChannelError("the pusher closed the connection during a bucket")
                time.sleep(2e-5)
            work.wait()
        return target

    def reset(self) -> None:
        """Abort the communicator after a failed sync."""
        if self._comm is not None:
            self._comm.abort()
        self._comm, self._key = None, ()

    def close(self) -> None:
        self.reset()
        self._store = None
        super().close()


def create_store(host: str, timeout_s: float) -> TCPStore:
    """The pusher's store, which listens only on ``host``; torch itself would listen on every interface."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.create_server((host, 0), family=family)
    port = listening.getsockname()[1]
    timeout, fd = _seconds(timeout_s), listening.detach()
    return TCPStore(host, port, is_master=True, wait_for_workers=False, timeout=timeout, master_listen_fd=fd)


def await_workers(
    store: TCPStore, generation: str, where: Sequence[str], channels: Sequence[Channel], timeout_s: float
) -> None:
    """The pusher's side of the rendezvous: wait until every worker has joined. ``where``, ``channels``: in rank order.

    Raises ChannelError when a worker hung up (its last message may be unread in its channel), and WeightSyncError that
    names the workers that did not join in time.
    """
    rendezvous = _rendezvous_store(store, generation)
    deadline = time.monotonic() + timeout_s
    while missing := [name for rank, name in enumerate(where, start=1) if not rendezvous.check([str(rank)])]:
        for name, channel in zip(where, channels, strict=True):
            if channel.is_hung_up():
                raise ChannelError(f"{name}: hung up before the communicator was created")
        if time.monotonic() > deadline:
            raise WeightSyncError(
                f"did not join the communicator at {store.host}:{store.port} within {timeout_s} s",
                field=", ".join(missing),
            )
        time.sleep(_RENDEZVOUS_POLL_S)
    rendezvous.set("0", b"1")


def join_rendezvous(store: TCPStore, generation: str, rank: int, channel: Channel, timeout_s: float) -> None:
    """A worker's side: join, then wait until the pusher has seen all workers. Raises ChannelError."""
    rendezvous = _rendezvous_store(store, generation)
    rendezvous.set(str(rank), b"1")
    deadline = time.monotonic() + timeout_s
    while not rendezvous.check(["0"]):
        if channel.is_hung_up():
            raise ChannelError("the pusher closed the connection before the communicator was created")
        if time.monotonic() > deadline:
            raise ChannelError(f"the other workers did not join the communicator within {timeout_s} s")
        time.sleep(_RENDEZVOUS_POLL_S)


def _rendezvous_store(store: TCPStore, generation: str) -> Any:
    return PrefixStore(f"plinth_weight_sync/members/{generation}", store)


def create_communicator(store: TCPStore, rank: int, size: int, generation: str, timeout_s: float) -> Any:
    """An NCCL communicator outside torch's default process group. Raises SyncConfigError without NCCL."""
    nccl: Any = getattr(dist, "ProcessGroupNCCL", None)
    if nccl is None:
        raise SyncConfigError("it needs a torch built with NCCL", field="transport", value="nccl")
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


KIND = TransportKind(
    sender=lambda device, host, config: NcclSender(device, host, config.timeout_s),
    receiver=NcclReceiver,
    needs_gpu=True,
    bucket_mib=256,
)
