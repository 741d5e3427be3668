"""Makes DeepSpeed's `load_checkpoint` read files without unpickling arbitrary objects.

DeepSpeed opens its checkpoints with `torch.load(weights_only=False)`, so anybody who can write to the folder can run
code in the training job. All files of a usual checkpoint are read by the engine's checkpoint engine, which this module
replaces during a call.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from ..errors import CheckpointUsageError, UntrustedFileError
from ..upstream import FENCE
from .zero_checkpoint import ENUM_MEMBER

#: Classes that DeepSpeed stores besides tensors and plain values. They hold numbers; creating one has no side effects.
_DEEPSPEED_CLASSES = (
    ("deepspeed.runtime.fp16.loss_scaler", "LossScaler"),
    ("deepspeed.runtime.fp16.loss_scaler", "DynamicLossScaler"),
    ("deepspeed.utils.tensor_fragment", "fragment_address"),
    ("deepspeed.runtime.zero.config", "ZeroStageEnum"),
)

ENGINE = FENCE.patch(
    name="loading without pickle",
    reason="DeepSpeed unpickles checkpoints; its checkpoint engine is where it opens them",
    otherwise="refused",
    replaces={"deepspeed.runtime.engine:DeepSpeedEngine": ("checkpoint_engine",)},
    reads={
        "deepspeed.runtime.engine:DeepSpeedEngine": ("load_universal_checkpoint()", "has_moe_layers"),
        "deepspeed.runtime.checkpoint_engine.checkpoint_engine:CheckpointEngine": ("load(path, map_location)",),
        **{module: tuple(n for m, n in _DEEPSPEED_CLASSES if m == module) for module, _ in _DEEPSPEED_CLASSES},
    },
)


@contextmanager
def loading_without_pickle(engine: Any) -> Iterator[None]:
    """Inside, `engine.load_checkpoint` opens files with `weights_only`: tensors, plain values, DeepSpeed's own classes.

        with loading_without_pickle(engine):
            engine.load_checkpoint(str(checkpoint.path / "actor"), tag="actor")

    A file with any other class raises UntrustedFileError with the file's name, before anything in it is used or
    executed. Outside the context DeepSpeed loads as usual.

    Raises CheckpointUsageError for universal checkpoints and mixtures of experts, whose files DeepSpeed opens without
    its checkpoint engine, and for a DeepSpeed whose checkpoint engine is not the tested one.
    """
    ENGINE.check()
    if engine.load_universal_checkpoint() or engine.has_moe_layers:
        raise CheckpointUsageError(
            "DeepSpeed unpickles the files of universal checkpoints and of mixtures of experts without its checkpoint "
            "engine: load them without loading_without_pickle, and only from a folder you trust"
        )
    restore = ENGINE.replace(engine, checkpoint_engine=_SafeReader(engine.checkpoint_engine))
    try:
        yield
    finally:
        restore()


class _SafeReader:
    """Replaces a checkpoint engine: reads with `weights_only`, forwards everything else to the original."""

    def __init__(self, original: Any) -> None:
        self._original = original
        self._classes = [getattr(import_module(module), name) for module, name in _DEEPSPEED_CLASSES]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)

    def load(self, path: str, map_location: Any = None) -> Any:
        import pickle

        import torch

        ENGINE.calls["checkpoint_engine"] += 1
        try:
            with torch.serialization.safe_globals([*self._classes, ENUM_MEMBER]):
                return torch.load(path, map_location=map_location, weights_only=True)
        except pickle.UnpicklingError as error:
            raise UntrustedFileError(f"cannot be read safely: {str(error).splitlines()[0]}", value=str(path)) from error
