"""Checkpoints that are published whole or not at all, verified when they are loaded; Hugging Face exports."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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
    from .manifest import FileEntry, Manifest, Problem, describe_files, verify_folder
    from .models import check_model, describe_model
    from .packages import package_versions
    from .retention import Retention
    from .savers.async_saver import AsyncSaver, rank_file
    from .savers.capture import Capture
    from .savers.deepspeed_async import DeepSpeedState
    from .savers.rank_notes import Ranks
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
    "CheckpointNotFoundError",
    "CheckpointSpaceError",
    "CheckpointStateError",
    "CheckpointUsageError",
    "DeepSpeedState",
    "ExportError",
    "FileEntry",
    "HfExport",
    "Manifest",
    "Problem",
    "Ranks",
    "RemoteCheckpoints",
    "Retention",
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

_EXPORTS = {
    "ArchitectureMismatchError": ".errors",
    "AsyncSaver": ".savers.async_saver",
    "Capture": ".savers.capture",
    "Checkpoint": ".manager",
    "CheckpointDamagedError": ".errors",
    "CheckpointError": ".errors",
    "CheckpointExistsError": ".errors",
    "CheckpointLockedError": ".errors",
    "CheckpointManager": ".manager",
    "CheckpointNotFoundError": ".errors",
    "CheckpointSpaceError": ".errors",
    "CheckpointStateError": ".errors",
    "CheckpointUsageError": ".errors",
    "DeepSpeedState": ".savers.deepspeed_async",
    "ExportError": ".errors",
    "FileEntry": ".manifest",
    "HfExport": ".hf_export",
    "Manifest": ".manifest",
    "Problem": ".manifest",
    "Ranks": ".savers.rank_notes",
    "RemoteCheckpoints": ".tools.remote",
    "Retention": ".retention",
    "ShardError": ".errors",
    "UniversalCheckpoint": ".tools.universal",
    "UnsupportedFormatError": ".errors",
    "UntrustedFileError": ".errors",
    "ZeroCheckpoint": ".zero.zero_checkpoint",
    "capture_rng": ".savers.rng",
    "check_model": ".models",
    "describe_files": ".manifest",
    "describe_model": ".models",
    "export_deepspeed": ".tools.deepspeed_export",
    "export_merged": ".tools.lora_export",
    "load_state_dict": ".savers.state_dicts",
    "loading_without_pickle": ".zero.deepspeed_load",
    "merge_lora": ".tools.lora_export",
    "package_versions": ".packages",
    "rank_file": ".savers.async_saver",
    "restore_rng": ".savers.rng",
    "save_adapter": ".tools.lora_export",
    "save_hf_folder": ".hf_export",
    "save_state_dict": ".savers.state_dicts",
    "verify_folder": ".manifest",
    "write_universal": ".tools.universal",
}


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_EXPORTS[name], __name__), name)
