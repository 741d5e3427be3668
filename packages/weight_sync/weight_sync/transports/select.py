"""Builds the two ends of a transport by its name."""

from collections.abc import Sequence

import torch

from ..config import SyncConfig
from ..errors import ReceiverError
from .base import Receiver, Sender
from .group import SenderGroup
from .shm import ShmReceiver, ShmSender
from .tcp import TcpReceiver, TcpSender


def make_senders(transports: Sequence[str], config: SyncConfig, device: torch.device, host: str) -> SenderGroup:
    """The pusher's ends of the transports to all servers, in their order."""
    senders = {transport: make_sender(transport, config, device, host) for transport in dict.fromkeys(transports)}
    return SenderGroup([senders[transport] for transport in transports])


def make_sender(transport: str, config: SyncConfig, device: torch.device, host: str) -> Sender:
    """The pusher's end of a transport. ``host``: this machine's address as the servers see it."""
    if transport == "ipc":
        from .ipc import IpcSender

        return IpcSender(device)
    if transport == "nccl":
        from .nccl import NcclSender

        return NcclSender(device, host, config.timeout_s)
    return TcpSender() if transport == "tcp" else ShmSender()


def make_receiver(transport: str, device: torch.device, timeout_s: float) -> Receiver:
    """The worker's end of a transport. Raises ReceiverError for a transport that this version does not have."""
    if transport == "shm":
        return ShmReceiver(device)
    if transport == "tcp":
        return TcpReceiver(device)
    if transport == "ipc":
        from .ipc import IpcReceiver

        return IpcReceiver(device)
    if transport == "nccl":
        from .nccl import NcclReceiver

        return NcclReceiver(device, timeout_s)
    raise ReceiverError("protocol", "", f"unknown transport {transport!r}")
