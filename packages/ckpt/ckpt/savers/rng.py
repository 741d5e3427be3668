"""Captures and restores the random generator states of one process as JSON, so a resumed run draws the same numbers.

    state = capture_rng(generators={"shuffle": generator})      # into CheckpointManager.publish(state=...)
    restore_rng(state, generators={"shuffle": generator})

Captures Python's `random`, NumPy's global generator, torch's CPU generator, the generator of the current CUDA device,
and generators passed by name. NumPy and torch are captured only if they are imported. Each rank captures its own.
"""

import base64
import random
import sys
from collections.abc import Mapping
from typing import Any

from ..errors import CheckpointStateError, CheckpointUsageError

_FORMAT_VERSION = 1


def capture_rng(*, generators: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The generators' states, JSON-serializable (about 20 kB). Draws nothing; omits CUDA if it is not initialized.

    `generators`: by name, each a random.Random, numpy.random.Generator or torch.Generator. Raises
    CheckpointUsageError for another type.
    """
    state: dict[str, Any] = {"format_version": _FORMAT_VERSION, "python": _python_state(random)}
    if "numpy" in sys.modules:
        state["numpy"] = _plain(sys.modules["numpy"].random.get_state(legacy=False))
    if "torch" in sys.modules:
        torch = sys.modules["torch"]
        state["torch"] = _encode(torch.get_rng_state())
        # Without the check this would initialize CUDA.
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            state["cuda"] = _encode(torch.cuda.get_rng_state())
    state["generators"] = {name: _capture_one(name, each) for name, each in (generators or {}).items()}
    return state


def restore_rng(state: Mapping[str, Any], *, generators: Mapping[str, Any] | None = None) -> None:
    """Restore every generator to the state that `capture_rng` recorded; the CUDA state goes to the current device.

    The named generators must have the captured names and types. Raises CheckpointStateError before it changes anything:
    for other names or types, an unknown format, or a captured CUDA state where CUDA is unavailable.
    """
    generators = generators or {}
    if state.get("format_version") != _FORMAT_VERSION:
        raise CheckpointStateError(
            field="state.format_version", value=state.get("format_version"), allowed=str(_FORMAT_VERSION)
        )
    if set(generators) != set(state["generators"]):
        raise CheckpointStateError(
            field="generators", value=sorted(generators), allowed=f"{sorted(state['generators'])}, as captured"
        )
    for name, generator in generators.items():
        if (given := _kind(name, generator)) != (saved := state["generators"][name]["kind"]):
            raise CheckpointStateError(f"was captured as a {saved}", field=f"generators.{name}", value=given)
    if "cuda" in state and not _torch().cuda.is_available():
        raise CheckpointStateError(
            "rng: the state includes a CUDA generator, but CUDA is not available. Delete 'cuda' from the state to "
            "resume with different random numbers."
        )
    _set_python(random, state["python"])
    if "numpy" in state:
        import numpy

        numpy.random.set_state(_with_arrays(state["numpy"]))
    if "torch" in state:
        _torch().set_rng_state(_decode(state["torch"]))
    if "cuda" in state:
        _torch().cuda.set_rng_state(_decode(state["cuda"]))
    for name, generator in generators.items():
        _restore_one(generator, state["generators"][name])


def _torch() -> Any:
    import torch

    return torch


def _kind(name: str, generator: Any) -> str:
    if isinstance(generator, random.Random):
        return "python"
    if "numpy" in sys.modules and isinstance(generator, sys.modules["numpy"].random.Generator):
        return f"numpy {type(generator.bit_generator).__name__}"
    if "torch" in sys.modules and isinstance(generator, sys.modules["torch"].Generator):
        return f"torch {generator.device.type}"
    raise CheckpointUsageError(
        field=f"generators.{name}",
        value=type(generator).__qualname__,
        allowed="random.Random, numpy.random.Generator or torch.Generator",
    )


def _capture_one(name: str, generator: Any) -> dict[str, Any]:
    kind = _kind(name, generator)
    if kind == "python":
        return {"kind": kind, "state": _python_state(generator)}
    if kind.startswith("numpy"):
        return {"kind": kind, "state": _plain(generator.bit_generator.state)}
    return {"kind": kind, "state": _encode(generator.get_state())}


def _restore_one(generator: Any, saved: Mapping[str, Any]) -> None:
    if saved["kind"] == "python":
        _set_python(generator, saved["state"])
    elif saved["kind"].startswith("numpy"):
        generator.bit_generator.state = _with_arrays(saved["state"])
    else:
        generator.set_state(_decode(saved["state"]))


def _python_state(generator: Any) -> list[Any]:
    version, internal, gauss = generator.getstate()
    return [version, list(internal), gauss]


def _set_python(generator: Any, state: list[Any]) -> None:
    generator.setstate((state[0], tuple(state[1]), state[2]))


def _plain(value: Any) -> Any:
    """NumPy's nested state with each array as a list and its dtype."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if hasattr(value, "tolist"):
        listed = value.tolist()
        return {"array": listed, "dtype": value.dtype.name} if isinstance(listed, list) else listed
    return value


def _with_arrays(value: Any) -> Any:
    """The inverse of `_plain`."""
    if not isinstance(value, Mapping):
        return value
    if set(value) == {"array", "dtype"}:
        import numpy

        return numpy.array(value["array"], dtype=value["dtype"])
    return {key: _with_arrays(item) for key, item in value.items()}


def _encode(tensor: Any) -> str:
    return base64.b64encode(tensor.numpy().tobytes()).decode()


def _decode(text: str) -> Any:
    torch = _torch()
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
