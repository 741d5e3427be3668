"""What this host reaches: addresses that the configuration names, and rollout servers over which weight transport."""

import socket
from dataclasses import replace
from urllib.parse import urlsplit

from rollout_vllm import RolloutConfig
from weight_sync import SyncConfig

from ..config import TrainerConfig
from ..errors import InputError

_PROBE_TIMEOUT_S = 10.0


def why_unreachable(host: str, port: int) -> str:
    """Why nothing can be connected to there; empty when something listens."""
    try:
        socket.create_connection((host, port), timeout=_PROBE_TIMEOUT_S).close()
    except OSError as error:
        return str(error)
    return ""


def resolve_sync_transport(
    sync: SyncConfig, *, trainer: TrainerConfig, rollout: RolloutConfig, on_gpu: bool
) -> SyncConfig:
    """The settings with `auto` made one that crosses hosts, where servers may be on other hosts than the ranks.

    nccl on GPUs when all of them are, tcp otherwise: a server beside the ranks may share a GPU with one, which no
    communicator can hold twice. With all servers here nothing is changed.

    Raises:
        InputError: shm or ipc, which end at this host, for servers elsewhere.
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
            f"sync.transport is {sync.transport}, but {why}, and {memory} does not leave the trainer's; allowed: auto, "
            f"tcp{', nccl' if on_gpu else ''}"
        )
    if sync.transport != "auto":
        return sync
    return replace(sync, transport="nccl" if on_gpu and len(elsewhere) == len(rollout.urls) else "tcp")


def _is_here(host: str) -> bool:
    """Whether a name or address is one of this host's; one that cannot be resolved is not."""
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
