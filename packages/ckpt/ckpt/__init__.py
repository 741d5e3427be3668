"""Checkpoint manager: checkpoints appear whole or not at all and are verified at load; Hugging Face exports."""

import warnings
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .digest import FileEntry
    from .errors import (
        ArchitectureMismatchError,
        CheckpointDamagedError,
        CheckpointError,
        CheckpointExistsError,
        CheckpointLockedError,
        CheckpointNotFoundError,
        CheckpointSpaceError,
        CheckpointStateError,
        CheckpointUsageError,
        ExportError,
        ShardError,
        UnsupportedFormatError,
        UntrustedFileError,
    )
    from .hf_export import HfExport, save_hf_folder
    from .manager import Checkpoint, CheckpointManager
    from .manifest import CheckpointManifest, Problem, describe_files, verify_folder
    from .models import check_model, describe_model
    from .packages import package_versions
    from .retention import Retention
    from .savers.async_saver import AsyncSaver, rank_file
    from .savers.capture import Capture
    from .savers.coordination import SaverRanks
    from .savers.deepspeed_async import DeepSpeedState
    from .savers.rng import capture_rng, restore_rng
    from .savers.state_dicts import load_state_dict, save_state_dict
    from .tools.deepspeed_export import export_deepspeed
    from .tools.lora_export import export_merged, merge_lora, save_adapter
    from .tools.remote import RemoteCheckpoints
    from .tools.universal import UniversalCheckpoint, write_universal
    from .zero.deepspeed_load import loading_without_pickle
    from .zero.zero_checkpoint import ZeroCheckpoint

__all__ = [
    "ArchitectureMismatchError",
    "AsyncSaver",
    "Capture",
    "Checkpoint",
    "CheckpointDamagedError",
    "CheckpointError",
    "CheckpointExistsError",
    "CheckpointLockedError",
    "CheckpointManager",
    "CheckpointManifest",
    "CheckpointNotFoundError",
    "CheckpointSpaceError",
    "CheckpointStateError",
    "CheckpointUsageError",
    "DeepSpeedState",
    "ExportError",
    "FileEntry",
    "HfExport",
    "Problem",
    "RemoteCheckpoints",
    "Retention",
    "SaverRanks",
    "ShardError",
    "UniversalCheckpoint",
    "UnsupportedFormatError",
    "UntrustedFileError",
    "ZeroCheckpoint",
    "capture_rng",
    "check_model",
    "describe_files",
    "describe_model",
    "export_deepspeed",
    "export_merged",
    "load_state_dict",
    "loading_without_pickle",
    "merge_lora",
    "package_versions",
    "rank_file",
    "restore_rng",
    "save_adapter",
    "save_hf_folder",
    "save_state_dict",
    "verify_folder",
    "write_universal",
]

_MODULES = {
    ".digest": ("FileEntry",),
    ".errors": (
        "ArchitectureMismatchError",
        "CheckpointDamagedError",
        "CheckpointError",
        "CheckpointExistsError",
        "CheckpointLockedError",
        "CheckpointNotFoundError",
        "CheckpointSpaceError",
        "CheckpointStateError",
        "CheckpointUsageError",
        "ExportError",
        "ShardError",
        "UnsupportedFormatError",
        "UntrustedFileError",
    ),
    ".hf_export": ("HfExport", "save_hf_folder"),
    ".manager": ("Checkpoint", "CheckpointManager"),
    ".manifest": ("CheckpointManifest", "Problem", "describe_files", "verify_folder"),
    ".models": ("check_model", "describe_model"),
    ".packages": ("package_versions",),
    ".retention": ("Retention",),
    ".savers.async_saver": ("AsyncSaver", "rank_file"),
    ".savers.capture": ("Capture",),
    ".savers.coordination": ("SaverRanks",),
    ".savers.deepspeed_async": ("DeepSpeedState",),
    ".savers.rng": ("capture_rng", "restore_rng"),
    ".savers.state_dicts": ("load_state_dict", "save_state_dict"),
    ".tools.deepspeed_export": ("export_deepspeed",),
    ".tools.lora_export": ("export_merged", "merge_lora", "save_adapter"),
    ".tools.remote": ("RemoteCheckpoints",),
    ".tools.universal": ("UniversalCheckpoint", "write_universal"),
    ".zero.deepspeed_load": ("loading_without_pickle",),
    ".zero.zero_checkpoint": ("ZeroCheckpoint",),
}
_EXPORTS = {name: module for module, names in _MODULES.items() for name in names}
_RENAMED = {"Manifest": "CheckpointManifest", "Ranks": "SaverRanks"}


def __getattr__(name: str) -> Any:
    if name in _RENAMED:
        new = _RENAMED[name]
        warnings.warn(f"ckpt.{name} is deprecated, use ckpt.{new}", DeprecationWarning, stacklevel=2)
        name = new
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_EXPORTS[name], __name__), name)
