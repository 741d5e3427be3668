"""Chooses a transport for every server: by the setting, and by whether the server is on the pusher's host."""

import contextlib
import socket
from collections.abc import Iterable, Mapping, Sequence
from urllib.parse import urlsplit

from ..config import TRANSPORTS, SyncConfig
from ..errors import SyncConfigError
from .select import transport_kind


def choose_transports(config: SyncConfig, urls: Sequence[str], *, on_gpu: bool) -> dict[str, str]:
    """The transport to each server, by URL, from the pusher's host. ``on_gpu``: the pusher's tensors are on a GPU.

    A server is on this host if its address is. See `plan_transports` for the rule and its errors.
    """
    is_here = {url: is_this_host(urlsplit(url).hostname or "") for url in urls}
    return plan_transports(config.transport, is_here, on_gpu=on_gpu)


def plan_transports(transport: str, is_here: Mapping[str, bool], *, on_gpu: bool) -> dict[str, str]:
    """The transport to each server of ``is_here`` (whether the server of this URL is on the pusher's host).

    A named transport is used for all servers. ``auto``: servers of this host read the pusher's memory (``ipc`` if it is
    on a GPU, else ``shm``), all others get ``nccl`` or ``tcp``. So the servers with ``nccl`` never share a GPU with the
    pusher, which an NCCL communicator could not contain twice.

    Raises SyncConfigError for a named transport that needs a GPU or does not reach one of the servers.
    """
    if transport == "auto":
        here, elsewhere = ("ipc", "nccl") if on_gpu else ("shm", "tcp")
        return {url: here if is_local else elsewhere for url, is_local in is_here.items()}
    kinds = {name: transport_kind(name) for name in TRANSPORTS}
    usable = {name: each for name, each in kinds.items() if on_gpu or not each.needs_gpu}
    if transport not in usable:
        raise SyncConfigError(
            "the trainer's tensors are on the CPU", field="transport", value=transport, allowed=_listed(usable)
        )
    unreachable = [url for url, is_local in is_here.items() if not is_local]
    if usable[transport].one_host and unreachable:
        raise SyncConfigError(
            f"{unreachable[0]} is on another host, and {usable[transport].one_host} works within one host only",
            field="transport",
            value=transport,
            allowed=_listed(name for name, each in usable.items() if not each.one_host),
        )
    return dict.fromkeys(is_here, transport)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(["auto", *names])


def is_this_host(host: str) -> bool:
    """True if a name or address belongs to this host (to this network namespace); False if it cannot be resolved."""
    try:
        addresses = socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM)
    except OSError:
        return False
    for family, _, _, _, address in addresses:
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind(address)
            return True
    return False


def local_address(urls: Sequence[str]) -> str:
    """This machine's address on the route to the servers; not the loopback address if any server is on another host."""
    address = "127.0.0.1"
    for url in urls:
        parts = urlsplit(url)
        with contextlib.suppress(OSError):
            family, *_, target = socket.getaddrinfo(parts.hostname, parts.port or 80, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect(target)
                local = str(probe.getsockname()[0])
            if not local.startswith("127.") and local != "::1":
                return local
            address = local
    return address
