"""Pushes model weights from a trainer into running vLLM servers: bucketed, verified, on all servers or none."""

import warnings
from typing import Any

import lazy_loader

#: Names deprecated in 0.2.0.
_RENAMED = {
    "Manifest": "WeightManifest",
    "ManifestError": "WeightManifestError",
    "WeightSource": "TensorSource",
    "quantise_blocks": "quantize_blocks",
    "restore_blocks": "dequantize_blocks",
}

_load, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)


def __getattr__(name: str) -> Any:
    if name in _RENAMED:
        new = _RENAMED[name]
        warnings.warn(f"weight_sync.{name} is deprecated: use {new}", DeprecationWarning, stacklevel=2)
        name = new
    return _load(name)
