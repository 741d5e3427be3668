"""Published checkpoints of a few bytes, a stand-in for DeepSpeed's engine, and pickles that call functions."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ckpt import Checkpoint, CheckpointManager


def publish(
    manager: CheckpointManager | Path,
    step: int,
    files: Mapping[str, bytes] | None = None,
    *,
    metrics: Mapping[str, float] | None = None,
    **options: Any,
) -> Checkpoint:
    """A checkpoint of these files whose state is its step; `options` are of `prepare`."""
    manager = CheckpointManager(manager) if isinstance(manager, Path) else manager
    folder = manager.prepare(step, **options)
    for name, content in ({"ranks/0.bin": b"zero", "ranks/1.bin": b"one"} if files is None else files).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return manager.publish(step, state={"step": step}, metrics=metrics)


class Engine:
    """The part of a DeepSpeed engine that saving in the background and loading without pickle use."""

    checkpoint_engine: Any = None
    has_moe_layers = False

    def zero_nvme_offload_optimizer(self) -> bool:
        return False

    def load_universal_checkpoint(self) -> bool:
        return False


class Call:
    """Pickles as a call of `function`, which runs when it is unpickled."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self.call = (function, args)

    def __reduce__(self) -> Any:
        return self.call
