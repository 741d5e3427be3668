"""Settings of a weight sync, and of an adapter that is pushed without its base model, which the servers keep."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args, get_origin

from plinth_base.adapters import missing_settings
from plinth_base.adapters import peft_name as peft_name

from .errors import SyncConfigError

Transport = Literal["auto", "shm", "ipc", "nccl", "tcp"]

#: Each is a module of ``transports/`` that declares it.
TRANSPORTS = get_args(Transport)[1:]

#: The name of this package's weight-transfer engine in vLLM (``--weight-transfer-config``).
BACKEND = "plinth"

#: Longest time limit; the operating system's timers take no infinite one.
_LONGEST_S = 1e6


def _is_number(value: Any, *types: type) -> bool:
    return isinstance(value, types) and not isinstance(value, bool)


@dataclass(frozen=True, kw_only=True)
class SyncConfig:
    """Transport, checks and time limits of a weight sync."""

    transport: Transport = "auto"
    """``shm``: shared memory; same host, servers on CPU or GPU. ``ipc``: CUDA IPC; same host, same GPU or a peer.
    ``nccl``: GPU to GPU, also across hosts. ``tcp``: any device, any host. A named transport is used for all servers.
    ``auto``: chosen per server. For a trainer on the CPU, ``shm`` to servers on its host and ``tcp`` to others; for a
    trainer on a GPU, ``ipc`` to servers on its host and ``nccl`` to others. A server is on this host if its address
    is."""

    host: str | None = None
    """``nccl`` and ``tcp``: this machine's address as the servers see it. None: the address of the route to them."""

    bucket_mib: int | None = None
    """Largest bucket in MiB; a larger parameter gets a bucket of its own. Two buckets are in flight. None: 256 with
    ``ipc`` and ``nccl``, where a bucket costs half a millisecond whatever its size, 64 with ``shm`` and ``tcp``. A push
    over several transports uses the smallest."""

    checksum: bool = True
    """Compute a 64-bit checksum of every bucket on both sides and reject a bucket that differs."""

    verify: bool = False
    """Send everything a second time after loading and compare it with the server's parameters, byte for byte, before
    the version is published. Several times slower; for tests and for debugging a mismatch."""

    apply: Literal["auto", "layerwise"] = "auto"
    """Way in which a server loads the tensors. ``auto``: dense unquantized models directly, others through vLLM's
    layerwise reload. ``layerwise``: always through the layerwise reload."""

    running_requests: Literal["auto", "wait", "keep", "recompute"] = "auto"
    """Treatment of the requests that a server runs during a push. ``auto``: ``wait``, unless an app that trains while
    servers generate chooses another one. ``wait``: they finish first, under the old weights.
    ``keep``: they are held where they are and continue with the new weights. Their KV cache stays: keys and values of
    all tokens but the last one come from the old weights, so the log-probs of later tokens are those of neither policy.
    ``recompute``: they are held, vLLM drops their KV cache and prefills prompt and response again under the new
    weights. New requests never use the KV cache of old weights."""

    timeout_s: float = 120.0
    """Longest silence, in seconds, before the other side counts as dead. Waiting for running requests is separate."""

    pause_timeout_s: float = 1800.0
    """Longest wait, in seconds, for a server's running requests to finish, or to be held after the current step."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value, choices = getattr(self, field.name), get_args(field.type)
            if get_origin(field.type) is Literal and value not in choices:
                raise SyncConfigError(field=field.name, value=value, allowed=", ".join(choices))
        if self.bucket_mib is not None and not (_is_number(self.bucket_mib, int) and self.bucket_mib >= 1):
            raise SyncConfigError(field="bucket_mib", value=self.bucket_mib, allowed="an integer, at least 1")
        for name in ("timeout_s", "pause_timeout_s"):
            value = getattr(self, name)
            if not (_is_number(value, int, float) and 0 < value <= _LONGEST_S):
                raise SyncConfigError(field=name, value=value, allowed=f"above 0 and at most {_LONGEST_S:.0e} s")

    @property
    def holds_requests(self) -> bool:
        """True if running requests continue after a push."""
        return self.running_requests in ("keep", "recompute")

    def bucket_bytes(self, transport: str, default_mib: int) -> int:
        """Largest bucket in bytes for a resolved transport (not ``auto``), whose own default is ``default_mib``."""
        return (self.bucket_mib or default_mib) * 1024 * 1024


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """Name and PEFT settings of the adapter whose tensors a pusher sends.

    The tensors carry PEFT's names (``base_model.model.….lora_A.weight``).
    """

    name: str
    """Model name that requests use; the server's own model name stays the base model's."""

    settings: Mapping[str, Any]
    """PEFT's adapter_config.json, JSON-serializable: ``r``, ``lora_alpha``, ``target_modules`` and further keys."""

    def __post_init__(self) -> None:
        if not self.name or "/" in self.name:
            raise SyncConfigError(field="name", value=self.name, allowed="a name without '/'")
        if missing := missing_settings(self.settings):
            raise SyncConfigError(f"{', '.join(missing)} missing", field="settings")

    @property
    def path(self) -> str:
        """The adapter's folder in vLLM's registry. No such folder exists: the worker holds the tensors in memory."""
        return f"/weight_sync/{self.name}"
