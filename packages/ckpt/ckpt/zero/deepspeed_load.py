"""DeepSpeed's own loading, without executing what the files say.

DeepSpeed opens its checkpoints with `torch.load(weights_only=False)`: whoever can write to the folder can run code in
the training job. All it reads of a usual checkpoint goes through the engine's checkpoint engine, whose place is taken
here for one call.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from ..errors import CheckpointUsageError, UntrustedFileError

__all__ = ["loading_without_pickle"]

#: What DeepSpeed itself stores besides tensors and plain values: numbers in a class. Making one does nothing else.
_DEEPSPEED_CLASSES = (
    ("deepspeed.runtime.fp16.loss_scaler", "LossScaler"),
    ("deepspeed.runtime.fp16.loss_scaler", "DynamicLossScaler"),
    ("deepspeed.utils.tensor_fragment", "fragment_address"),
    ("deepspeed.runtime.zero.config", "ZeroStageEnum"),
)


@contextmanager
def loading_without_pickle(engine: Any, *, classes: Sequence[type] = ()) -> Iterator[None]:
    """Inside, `engine.load_checkpoint` opens files with `weights_only`: tensors, plain values and DeepSpeed's classes.

        with loading_without_pickle(engine):
            engine.load_checkpoint(str(checkpoint.path / "actor"), tag="actor")

    `classes`: more that the files may hold, such as those of a client state. A file that holds another raises
    UntrustedFileError with its name, before anything of it is used or executed. Outside of this, or for a folder whose
    writers you trust as you trust your own code, DeepSpeed's loading is as it was.

    Raises CheckpointUsageError for universal checkpoints and mixtures of experts, whose files DeepSpeed opens itself.
    """
    if engine.load_universal_checkpoint() or engine.has_moe_layers:
        raise CheckpointUsageError(
            "DeepSpeed opens files of universal checkpoints and of mixtures of experts itself, with pickle: load them "
            "only from a folder you trust, without loading_without_pickle"
        )
    original = engine.checkpoint_engine
    engine.checkpoint_engine = _SafeReader(original, classes)
    try:
        yield
    finally:
        engine.checkpoint_engine = original


class _SafeReader:
    """Takes a checkpoint engine's place: reads safely, asks the real one everything else."""

    def __init__(self, original: Any, classes: Sequence[type]) -> None:
        self._original = original
        self._classes = [*classes, *(getattr(import_module(module), name) for module, name in _DEEPSPEED_CLASSES)]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)

    def load(self, path: str, map_location: Any = None) -> Any:
        import pickle

        import torch

        try:
            with torch.serialization.safe_globals(self._classes):
                return torch.load(path, map_location=map_location, weights_only=True)
        except pickle.UnpicklingError as error:
            raise UntrustedFileError(f"{path}: cannot be read safely: {str(error).splitlines()[0]}") from error
