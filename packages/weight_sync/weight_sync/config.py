"""Settings of a weight sync."""

from dataclasses import dataclass
from typing import Literal

from .errors import SyncConfigError

TRANSPORTS = ("auto", "shm", "ipc", "nccl", "tcp")


@dataclass(frozen=True, kw_only=True)
class SyncConfig:
    """How weights travel from the trainer into the servers."""

    transport: Literal["auto", "shm", "ipc", "nccl", "tcp"] = "auto"
    """``shm``: shared memory, same host, servers on CPU or GPU. ``ipc``: CUDA IPC, same host, same GPU or a peer.
    ``nccl``: between GPUs, across hosts. ``tcp``: across hosts, anything. ``auto``: ``shm`` for a trainer on the CPU,
    ``ipc`` for one on a GPU."""

    host: str | None = None
    """``nccl`` and ``tcp``: this machine's address as the servers see it. None: the address of the route to them."""

    bucket_mib: int | None = None
    """Bound of one bucket in MiB; a larger parameter gets a bucket of its own. Two buckets are in flight. None: 256
    with ``ipc`` and ``nccl``, where a bucket costs half a millisecond whatever its size, 64 with the others."""

    checksum: bool = True
    """Compute a 64-bit checksum of every bucket on both sides and refuse a bucket that differs."""

    verify: bool = False
    """After loading, send everything once more and compare it with what the server's layers hold, byte for byte, before
    anything is published. Several times slower; for tests and for tracking down a mismatch."""

    apply: Literal["auto", "layerwise"] = "auto"
    """How a server loads what came. ``auto``: dense unquantised models directly, others through vLLM's layerwise
    reload; ``layerwise``: always through it."""

    quantise: Literal["none", "fp8_blocks"] = "none"
    """``fp8_blocks``: linear weights travel in 8 bits with a scale per 128 x 128 block, quantised by the trainer, for
    servers of a checkpoint of that kind. A server of another kind refuses them by name. Not tried on a GPU yet."""

    timeout_s: float = 120.0
    """Longest silence, in seconds, before the other side counts as dead. Waiting for running requests is separate."""

    pause_timeout_s: float = 1800.0
    """Longest wait, in seconds, for a server's running requests to finish."""

    def __post_init__(self) -> None:
        if self.transport not in TRANSPORTS:
            raise SyncConfigError(f"transport: {self.transport!r} is not one of {', '.join(TRANSPORTS)}")
        if self.apply not in ("auto", "layerwise"):
            raise SyncConfigError(f"apply: {self.apply!r} is not one of auto, layerwise")
        if self.quantise not in ("none", "fp8_blocks"):
            raise SyncConfigError(f"quantise: {self.quantise!r} is not one of none, fp8_blocks")
        if self.bucket_mib is not None and self.bucket_mib < 1:
            raise SyncConfigError(f"bucket_mib: {self.bucket_mib} given, must be at least 1")
        for name in ("timeout_s", "pause_timeout_s"):
            value = getattr(self, name)
            if not value > 0:
                raise SyncConfigError(f"{name}: {value} given, must be above 0")

    def bucket_bytes(self, transport: str) -> int:
        """The bound of one bucket in bytes; ``transport``: the one used, not ``auto``."""
        usual_mib = 256 if transport in ("ipc", "nccl") else 64
        return (self.bucket_mib or usual_mib) * 1024 * 1024
