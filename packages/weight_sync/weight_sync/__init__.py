"""Push model weights from a trainer into running vLLM servers: planned, checked, and published all at once."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .adapter import Adapter, peft_name
    from .config import SyncConfig
    from .errors import (
        ChannelError,
        ManifestError,
        ReceiverError,
        ServerError,
        SourceError,
        SyncConfigError,
        WeightSyncError,
    )
    from .manifest import Manifest, TensorEntry
    from .plan import Bucket, BucketPlan, Slot, plan_buckets
    from .pusher import Endpoint, SyncReport, WeightPusher
    from .server import check_server, server_args, server_env
    from .sources.base import HfFolderSource, ModuleSource, WeightSource
    from .sources.fp8 import quantise_blocks, restore_blocks
    from .sources.zero import ZeroSource

__all__ = [
    "Adapter",
    "Bucket",
    "BucketPlan",
    "ChannelError",
    "Endpoint",
    "HfFolderSource",
    "Manifest",
    "ManifestError",
    "ModuleSource",
    "ReceiverError",
    "ServerError",
    "Slot",
    "SourceError",
    "SyncConfig",
    "SyncConfigError",
    "SyncReport",
    "TensorEntry",
    "WeightPusher",
    "WeightSource",
    "WeightSyncError",
    "ZeroSource",
    "check_server",
    "peft_name",
    "plan_buckets",
    "quantise_blocks",
    "restore_blocks",
    "server_args",
    "server_env",
]

_EXPORTS = {
    "Adapter": ".adapter",
    "Bucket": ".plan",
    "BucketPlan": ".plan",
    "ChannelError": ".errors",
    "Endpoint": ".pusher",
    "HfFolderSource": ".sources.base",
    "Manifest": ".manifest",
    "ManifestError": ".errors",
    "ModuleSource": ".sources.base",
    "ReceiverError": ".errors",
    "ServerError": ".errors",
    "Slot": ".plan",
    "SourceError": ".errors",
    "SyncConfig": ".config",
    "SyncConfigError": ".errors",
    "SyncReport": ".pusher",
    "TensorEntry": ".manifest",
    "WeightPusher": ".pusher",
    "WeightSource": ".sources.base",
    "WeightSyncError": ".errors",
    "ZeroSource": ".sources.zero",
    "check_server": ".server",
    "peft_name": ".adapter",
    "plan_buckets": ".plan",
    "quantise_blocks": ".sources.fp8",
    "restore_blocks": ".sources.fp8",
    "server_args": ".server",
    "server_env": ".server",
}


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_EXPORTS[name], __name__), name)
