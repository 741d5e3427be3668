"""Finds a transport by its name: the module of this folder with that name declares it in ``KIND``."""

from collections.abc import Sequence
from importlib import import_module

import torch

from ..config import TRANSPORTS, SyncConfig
from ..errors import ReceiverError
from .base import Receiver, TransportKind
from .group import SenderGroup


def transport_kind(name: str) -> TransportKind:
    """The declaration of a transport of `TRANSPORTS`. Its module is imported at first use."""
    kind: TransportKind = import_module(f".{name}", __package__).KIND
    return kind


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
