"""DeepSpeed's own checkpoints: every rank its shard, of what is trained only."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn

from ..errors import CheckpointError

__all__ = ["load_state", "save_state"]


def save_state(engine: Any, folder: str | Path, tag: str, *, num_steps: int) -> None:
    """Write `folder`/`tag`. Frozen parameters are left out: the model folder has them.

    Raises:
        CheckpointError: optimizer states are on NVMe.
    """
    _refuse_nvme(engine)
    with _trained_only(engine.module), _stage_noted(engine.optimizer):
        engine.save_checkpoint(
            str(folder), tag=tag, client_state={"num_steps": num_steps}, exclude_frozen_parameters=True
        )


def load_state(engine: Any, folder: str | Path, tag: str) -> int:
    """Continue from `folder`/`tag`, written by as many ranks at the same stage; returns the steps taken by then.

    Raises:
        CheckpointError: there is none, or it is of another model or other adapters; optimizer states are on NVMe.
    """
    _refuse_nvme(engine)
    path = Path(folder) / tag
    if not path.is_dir():
        raise CheckpointError(f"no checkpoint {tag!r} in {str(folder)!r}")
    is_whole = all(parameter.requires_grad for parameter in engine.module.parameters())
    try:
        found, state = engine.load_checkpoint(
            str(folder), tag=tag, load_lr_scheduler_states=False, load_module_strict=is_whole
        )
    except (RuntimeError, KeyError, IndexError) as error:
        raise CheckpointError(f"{str(path)!r} does not fit this engine's model and adapters: {error}") from error
    if found is None or "num_steps" not in state:
        raise CheckpointError(f"{str(path)!r} is not a checkpoint this engine wrote")
    return int(state["num_steps"])


def _refuse_nvme(engine: Any) -> None:
    """DeepSpeed would copy the swap files and restore neither weights, nor counters, nor states too small to swap."""
    if engine.zero_nvme_offload_optimizer():
        raise CheckpointError(
            "optimizer states on NVMe cannot be saved so that training could continue from them: "
            "use zero.offload.optimizer=cpu, or export_parameters for the weights alone"
        )


@contextmanager
def _trained_only(module: nn.Module) -> Iterator[None]:
    """Inside, `module.state_dict()` lacks what is frozen, under all of its names: DeepSpeed's own option forgets that
    a frozen embedding may be tied to the head, and would write that."""
    frozen = [n for n, p in module.named_parameters(remove_duplicate=False) if not p.requires_grad]

    def drop(_: nn.Module, state: dict[str, Any], prefix: str, __: Any) -> None:
        for name in frozen:
            state.pop(prefix + name, None)

    handle = module.register_state_dict_post_hook(drop)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def _stage_noted(optimizer: Any) -> Iterator[None]:
    """Inside, what the optimizer saves says of which stage it is. DeepSpeed's class for stage 1 in bf16 with fp32
    accumulation forgets that, and DeepSpeed's zero_to_fp32.py takes its files for none of ZeRO."""
    from deepspeed.runtime.bf16_optimizer import BF16_Optimizer

    if not isinstance(optimizer, BF16_Optimizer):
        yield
        return
    original = optimizer.state_dict
    optimizer.state_dict = lambda: original() | {"zero_stage": 1}
    try:
        yield
    finally:
        del optimizer.state_dict
