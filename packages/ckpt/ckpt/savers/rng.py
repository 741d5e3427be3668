"""Captures and restores the random generator states of one process as JSON, so a resumed run draws the same numbers.

    state = capture_rng()      # into CheckpointManager.publish(state=...)
    restore_rng(state)

Captures Python's `random`, NumPy's global generator, torch's CPU generator, and the generator of the current CUDA
device. NumPy and torch are captured only if they are imported. Each rank captures its own.
"""

import base64
import random
import sys
from collections.abc import Mapping
from typing import Any

from ..errors import CheckpointStateError

_FORMAT_VERSION = 1


def capture_rng() -> dict[str, Any]:
    """The generators' states, JSON-serializable (about 20 kB). Draws nothing; omits CUDA if it is not initialized."""
    version, internal, gauss = random.getstate()
    state: dict[str, Any] = {"format_version": _FORMAT_VERSION, "python": [version, list(internal), gauss]}
    if "numpy" in sys.modules:
        numpy_state = sys.modules["numpy"].random.get_state(legacy=False)
        key = numpy_state["state"]["key"].tolist()
        state["numpy"] = {**numpy_state, "state": {**numpy_state["state"], "key": key}}
    if "torch" in sys.modules:
        torch = sys.modules["torch"]
        state["torch"] = _encode(torch.get_rng_state())
        # Without the check this would initialize CUDA.
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            state["cuda"] = _encode(torch.cuda.get_rng_state())
    return state


def restore_rng(state: Mapping[str, Any]) -> None:
    """Restore every generator to the state that `capture_rng` recorded; the CUDA state goes to the current device.

    Raises CheckpointStateError, before it changes anything, for an unknown format, or for a captured CUDA state where
    CUDA is unavailable.
    """
    if state.get("format_version") != _FORMAT_VERSION:
        raise CheckpointStateError(
            field="state.format_version", value=state.get("format_version"), allowed=str(_FORMAT_VERSION)
        )
    if "cuda" in state and not _torch().cuda.is_available():
        raise CheckpointStateError(
            "rng: the state includes a CUDA generator, but CUDA is not available. Delete 'cuda' from the state to "
            "resume with different random numbers."
        )
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    if "numpy" in state:
        import numpy

        numpy.random.set_state(state["numpy"])
    if "torch" in state:
        _torch().set_rng_state(_decode(state["torch"]))
    if "cuda" in state:
        _torch().cuda.set_rng_state(_decode(state["cuda"]))


def _torch() -> Any:
    import torch

    return torch


def _encode(tensor: Any) -> str:
    return base64.b64encode(tensor.numpy().tobytes()).decode()


def _decode(text: str) -> Any:
    torch = _torch()
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
