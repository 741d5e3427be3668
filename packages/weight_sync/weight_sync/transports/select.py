"""Chooses a transport and builds its two ends."""

import contextlib
import socket
from collections.abc import Sequence
from urllib.parse import urlsplit

import torch

from ..config import SyncConfig
from ..errors import ReceiverError
from .base import Receiver, Sender
from .shm import ShmReceiver, ShmSender
from .tcp import TcpReceiver, TcpSender


def resolve_transport(config: SyncConfig, device: torch.device) -> str:
    """The transport for a trainer on this device; resolves ``auto``."""
    if config.transport != "auto":
        return config.transport
    return "ipc" if device.type == "cuda" else "shm"


def make_sender(transport: str, config: SyncConfig, device: torch.device, host: str) -> Sender:
    """The pusher's end of a transport. Raises SyncConfigError when it cannot work on this device."""
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


def local_address(urls: Sequence[str]) -> str:
    """This machine's address on the route to the servers; not the loopback address if any server is on another host."""
    address = "127.0.0.1"
    for url in urls:
        parts = urlsplit(url)
        with contextlib.suppress(OSError):
            family, *_, target = socket.getaddrinfo(parts.hostname, parts.port or 80, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect(target)
                found = str(probe.getsockname()[0])
            if not found.startswith("127.") and found != "::1":
                return found
            address = found
    return address
