"""Checkpoints that are published whole or not at all, verified when they are loaded; Hugging Face exports."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .errors import (
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
    from .manifest import Manifest, Problem, verify_folder
    from .retention import Retention

__all__ = [
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
    "HfExport",
    "Manifest",
    "Problem",
    "Retention",
    "UnsupportedFormatError",
    "save_hf_folder",
    "verify_folder",
]

_EXPORTS = {
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
    "HfExport": ".hf_export",
    "Manifest": ".manifest",
    "Problem": ".manifest",
    "Retention": ".retention",
    "UnsupportedFormatError": ".errors",
    "save_hf_folder": ".hf_export",
    "verify_folder": ".manifest",
}


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_EXPORTS[name], __name__), name)
