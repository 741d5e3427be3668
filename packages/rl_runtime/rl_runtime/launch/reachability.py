"""Checks which addresses this host reaches, and chooses a weight transport that reaches the rollout servers."""

import socket
from dataclasses import replace
from urllib.parse import urlsplit

from rollout_vllm import RolloutConfig
from weight_sync import SyncConfig

from ..config import TrainerConfig
from ..errors import InputError

_PROBE_TIMEOUT_S = 10.0


def why_unreachable(host: str, port: int) -> str:
    """Why a connection to the address fails; empty if something listens there."""
    try:
        socket.create_connection((host, port), timeout=_PROBE_TIMEOUT_S).close()
    except OSError as error:
        return str(error)
    return ""


def resolve_sync_transport(
    sync: SyncConfig, *, trainer: TrainerConfig, rollout: RolloutConfig, on_gpu: bool
) -> SyncConfig:
    """Replaces transport `auto` by one that crosses hosts, if servers are or may be on other hosts than the ranks.

    That is nccl if the ranks are on GPUs and all servers on other hosts, else tcp: a server on this host may share a
    GPU with a rank, and an NCCL communicator cannot contain a GPU twice. If all servers are on this host, `sync` is
    returned unchanged.

    Raises:
        InputError: transport shm or ipc, which work on one host only, with servers on other hosts.
    """
    elsewhere = [url for url in rollout.urls if not _is_here(urlsplit(url).hostname or "")]
    if trainer.ray_address is not None:
        why = f"trainer.ray_address={trainer.ray_address} puts the servers on other hosts"
    elif elsewhere:
        why = f"rollout.urls has servers on other hosts ({elsewhere[0]})"
    else:
        return sync
    if sync.transport in ("shm", "ipc"):
        memory = "shared memory" if sync.transport == "shm" else "CUDA IPC"
        raise InputError(
            f"sync.transport is {sync.transport}, but {why}, and {memory} works within one host only; allowed: auto, "
            f"tcp{', nccl' if on_gpu else ''}"
        )
    if sync.transport != "auto":
        return sync
    return replace(sync, transport="nccl" if on_gpu and len(elsewhere) == len(rollout.urls) else "tcp")


def _is_here(host: str) -> bool:
    """Whether a name or address belongs to this host; False if it cannot be resolved."""
    try:
        addresses = socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM)
    except OSError:
        return False
    return any(_can_bind(family, address) for family, _, _, _, address in addresses)


def _can_bind(family: int, address: tuple[object, ...]) -> bool:
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind(address)
    except OSError:
        return False
    return True
