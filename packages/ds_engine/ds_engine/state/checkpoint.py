"""Saves and loads checkpoints in DeepSpeed's format: one shard per rank, trainable parameters only."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn

from ..errors import CheckpointError
from ..upstream import FENCE

STAGE = FENCE.patch(
    name="ZeRO stage in checkpoints of BF16_Optimizer",
    reason="without it zero_to_fp32.py does not recognize them; this package loads them either way",
    otherwise="stock path",
    replaces={"deepspeed.runtime.bf16_optimizer:BF16_Optimizer": ("state_dict()",)},
)


_SETTINGS = ("weight_decay", "betas", "eps", "lr_scale")
"""Settings of parameter groups that come from the configuration; each step sets the learning rate."""


def save_state(engine: Any, folder: str | Path, tag: str, *, num_steps: int) -> None:
    """Write a checkpoint to `folder`/`tag`. Frozen parameters are not saved: the model folder has them.

    Raises:
        CheckpointError: optimizer states are on NVMe.
    """
    _check_not_on_nvme(engine)
    with _without_frozen(engine.module), _with_stage(engine.optimizer):
        engine.save_checkpoint(
            str(folder), tag=tag, client_state={"num_steps": num_steps}, exclude_frozen_parameters=True
        )


def load_state(engine: Any, folder: str | Path, tag: str) -> int:
    """Load `folder`/`tag`, saved by the same number of ranks at the same stage; returns its number of optimizer steps.

    Raises:
        CheckpointError: it does not exist, or belongs to another model or other adapters; or optimizer states are on
            NVMe.
    """
    _check_not_on_nvme(engine)
    path = Path(folder) / tag
    if not path.is_dir():
        raise CheckpointError(f"no such checkpoint in {str(folder)!r}", field="tag", value=tag)
    settings = [{key: group.get(key) for key in _SETTINGS} for group in engine.optimizer.optimizer.param_groups]
    has_no_frozen = all(parameter.requires_grad for parameter in engine.module.parameters())
    try:
        loaded, state = engine.load_checkpoint(
            str(folder), tag=tag, load_lr_scheduler_states=False, load_module_strict=has_no_frozen
        )
    except (RuntimeError, KeyError, IndexError) as error:
        problem = f"it does not fit this engine's model and adapters: {error}"
        raise CheckpointError(problem, field="path", value=str(path)) from error
    if loaded is None or "num_steps" not in state:
        raise CheckpointError("it is not a checkpoint of this engine", field="path", value=str(path))
    # torch's optimizers load those of the run that saved, and a changed configuration would be ignored.
    for group, values in zip(engine.optimizer.optimizer.param_groups, settings, strict=True):
        for key, value in values.items():
            group.pop(key, None)
            group.update({} if value is None else {key: value})
    return int(state["num_steps"])


def _check_not_on_nvme(engine: Any) -> None:
    """DeepSpeed would copy the swap files but restore neither weights, nor counters, nor states too small to swap."""
    if engine.zero_nvme_offload_optimizer():
        raise CheckpointError(
            "optimizer states on NVMe cannot be saved in a checkpoint that training can resume from",
            field="zero.offload.optimizer",
            value="nvme",
            remedy="use cpu, or export_parameters for the weights alone",
        )


@contextmanager
def _without_frozen(module: nn.Module) -> Iterator[None]:
    """Context in which `module.state_dict()` omits frozen parameters under all of their names.

    DeepSpeed's exclude_frozen_parameters omits one name only, and would save a frozen embedding as the tied head.
    """
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
def _with_stage(optimizer: Any) -> Iterator[None]:
    """Context in which BF16_Optimizer (stage 1 in bf16 with fp32 accumulation) saves its ZeRO stage.

    DeepSpeed omits it, and then zero_to_fp32.py does not recognize the files as a ZeRO checkpoint.
    """
    from deepspeed.runtime.bf16_optimizer import BF16_Optimizer

    if not isinstance(optimizer, BF16_Optimizer) or not STAGE.check():
        yield
        return
    original = optimizer.state_dict
    with STAGE.replaced(optimizer, state_dict=lambda: original() | {"zero_stage": 1}):
        yield
