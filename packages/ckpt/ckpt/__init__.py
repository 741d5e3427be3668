"""Checkpoints that are published whole or not at all, verified when they are loaded; Hugging Face exports."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .async_saver import AsyncSaver
    from .deepspeed_export import export_deepspeed
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
        UnsupportedFormatError,
    )
    from .hf_export import HfExport, save_hf_folder
    from .manager import Checkpoint, CheckpointManager
    from .manifest import FileEntry, Manifest, Problem, describe_files, verify_folder
    from .models import check_model, describe_model
    from .packages import package_versions
    from .remote import RemoteCheckpoints
    from .retention import Retention
    from .rng import capture_rng, restore_rng
    from .state_dicts import load_state_dict, save_state_dict

__all__ = [
    "ArchitectureMismatchError",
    "AsyncSaver",
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
    "ExportError",
    "FileEntry",
    "HfExport",
    "Manifest",
    "Problem",
    "RemoteCheckpoints",
    "Retention",
    "UnsupportedFormatError",
    "capture_rng",
    "check_model",
    "describe_files",
    "describe_model",
    "export_deepspeed",
    "load_state_dict",
    "package_versions",
    "restore_rng",
    "save_hf_folder",
    "save_state_dict",
    "verify_folder",
]

_EXPORTS = {
    "ArchitectureMismatchError": ".errors",
    "AsyncSaver": ".async_saver",
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
    "ExportError": ".errors",
    "FileEntry": ".manifest",
    "HfExport": ".hf_export",
    "Manifest": ".manifest",
    "Problem": ".manifest",
    "RemoteCheckpoints": ".remote",
    "Retention": ".retention",
    "UnsupportedFormatError": ".errors",
    "capture_rng": ".rng",
    "check_model": ".models",
    "describe_files": ".manifest",
    "describe_model": ".models",
    "export_deepspeed": ".deepspeed_export",
    "load_state_dict": ".state_dicts",
    "package_versions": ".packages",
    "restore_rng": ".rng",
    "save_hf_folder": ".hf_export",
    "save_state_dict": ".state_dicts",
    "verify_folder": ".manifest",
}


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_EXPORTS[name], __name__), name)
