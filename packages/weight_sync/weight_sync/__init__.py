"""Pushes model weights from a trainer into running vLLM servers: bucketed, verified, on all servers or none."""

import warnings
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .adapter import Adapter, peft_name
    from .config import SyncConfig
    from .errors import (
        ChannelError,
        ReceiverError,
        ServerError,
        SourceError,
        SyncConfigError,
        WeightManifestError,
        WeightSyncError,
    )
    from .manifest import TensorEntry, WeightManifest
    from .plan import Bucket, BucketPlan, Slot, plan_buckets
    from .push.pusher import SyncReport, WeightPusher
    from .push.server import Endpoint, check_server, server_args, server_env
    from .sources.base import TensorSource
    from .sources.fp8 import dequantize_blocks, quantize_blocks
    from .sources.hf_folder import HfFolderSource
    from .sources.module import ModuleSource
    from .sources.zero import ZeroSource

__all__ = [
    "Adapter",
    "Bucket",
    "BucketPlan",
    "ChannelError",
    "Endpoint",
    "HfFolderSource",
    "ModuleSource",
    "ReceiverError",
    "ServerError",
    "Slot",
    "SourceError",
    "SyncConfig",
    "SyncConfigError",
    "SyncReport",
    "TensorEntry",
    "TensorSource",
    "WeightManifest",
    "WeightManifestError",
    "WeightPusher",
    "WeightSyncError",
    "ZeroSource",
    "check_server",
    "dequantize_blocks",
    "peft_name",
    "plan_buckets",
    "quantize_blocks",
    "server_args",
    "server_env",
]

_MODULES = {
    ".adapter": ("Adapter", "peft_name"),
    ".config": ("SyncConfig",),
    ".errors": (
        "ChannelError",
        "ReceiverError",
        "ServerError",
        "SourceError",
        "SyncConfigError",
        "WeightManifestError",
        "WeightSyncError",
    ),
    ".manifest": ("TensorEntry", "WeightManifest"),
    ".plan": ("Bucket", "BucketPlan", "Slot", "plan_buckets"),
    ".push.pusher": ("SyncReport", "WeightPusher"),
    ".push.server": ("Endpoint", "check_server", "server_args", "server_env"),
    ".sources.base": ("TensorSource",),
    ".sources.fp8": ("dequantize_blocks", "quantize_blocks"),
    ".sources.hf_folder": ("HfFolderSource",),
    ".sources.module": ("ModuleSource",),
    ".sources.zero": ("ZeroSource",),
}
_EXPORTS = {name: module for module, names in _MODULES.items() for name in names}

#: Names deprecated in 0.2.0.
_RENAMED = {
    "Manifest": "WeightManifest",
    "ManifestError": "WeightManifestError",
    "WeightSource": "TensorSource",
    "quantise_blocks": "quantize_blocks",
    "restore_blocks": "dequantize_blocks",
}


def __getattr__(name: str) -> Any:
    if name in _RENAMED:
        new_name = _RENAMED[name]
        warnings.warn(f"weight_sync.{name} is deprecated: use {new_name}", DeprecationWarning, stacklevel=2)
        name = new_name
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_EXPORTS[name], __name__), name)
