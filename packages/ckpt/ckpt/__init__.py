"""Checkpoint manager: checkpoints appear whole or not at all and are verified at load; Hugging Face exports."""

import warnings
from typing import Any

import lazy_loader

_RENAMED = {"Manifest": "CheckpointManifest", "Ranks": "SaverRanks"}

_load, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)


def __getattr__(name: str) -> Any:
    if name in _RENAMED:
        new = _RENAMED[name]
        warnings.warn(f"ckpt.{name} is deprecated, use ckpt.{new}", DeprecationWarning, stacklevel=2)
        name = new
    return _load(name)
