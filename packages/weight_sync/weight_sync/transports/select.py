"""Finds a transport by its name (the module of this folder with that name declares it in ``KIND``); its senders."""

from collections.abc import Sequence
from importlib import import_module

import torch
from torch import Tensor

from ..channel import Channel
from ..config import TRANSPORTS, SyncConfig
from ..errors import ReceiverError
from ..plan import Bucket, BucketPlan
from .base import Receiver, Sender, TransportKind


def transport_kind(name: str) -> TransportKind:
    """The declaration of a transport of `TRANSPORTS`. Its module is imported at first use."""
    kind: TransportKind = import_module(f".{name}", __package__).KIND
    return kind


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


def make_senders(transports: Sequence[str], config: SyncConfig, device: torch.device, host: str) -> SenderGroup:
    """The pusher's ends of the transports to all servers, in their order.

    ``host``: this machine's address as the servers see it.
    """
    senders = {name: transport_kind(name).sender(device, host, config) for name in dict.fromkeys(transports)}
    return SenderGroup([senders[name] for name in transports])


def make_receiver(transport: str, device: torch.device, timeout_s: float) -> Receiver:
    """The worker's end of a transport. Raises ReceiverError for a transport that this version does not have."""
    if transport not in TRANSPORTS:  # the name comes from a pusher of another version, or from a stranger
        raise ReceiverError("protocol", "", f"unknown transport {transport!r}")
    return transport_kind(transport).receiver(device, timeout_s)
