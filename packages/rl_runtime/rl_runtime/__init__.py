"""Composes the other packages into training runs: placement, trainer ranks, rollout, the training loop."""

import warnings
from typing import Any

import lazy_loader

import run_kit

# Deprecated since 0.2.0: old name -> new name.
_RENAMED = {"RankGroup": "WorkerGroup", "Role": "ModelHandle", "together": "run_concurrently"}

_load, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)


def __getattr__(name: str) -> Any:
    if name in run_kit.__all__:  # until 0.2.0 these were here
        warnings.warn(f"rl_runtime.{name} is deprecated: import run_kit.{name}", DeprecationWarning, stacklevel=2)
        return getattr(run_kit, name)
    if name in _RENAMED:
        new = _RENAMED[name]
        warnings.warn(f"rl_runtime.{name} is deprecated: use rl_runtime.{new}", DeprecationWarning, stacklevel=2)
        name = new
    return _load(name)
