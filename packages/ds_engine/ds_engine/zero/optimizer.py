"""Builds the optimizer with its parameter groups and starts DeepSpeed with the replacements of this package."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..errors import EngineConfigError
from ..model.parts import is_vector, table_parameters
from ..upstream import FENCE
from .grad_accumulation import fuse_grad_accumulation
from .optimizer_step import fuse_grad_norm
from .zero3_gather import coalesce_gathers
from .zero3_gradients import fuse_zero3_gradients, keep_nvme_gradients_in_memory
from .zero3_hooks import LEAVES, add_fetch_fast_path, fuse_leaf_hooks, set_leaf_modules

if TYPE_CHECKING:
    from ..config import EngineConfig, OptimConfig

SHARDS = FENCE.patch(
    name="shards of stage 3",
    reason="weight decay, exports, LoRA and NF4 need the shape and the number of elements of a sharded parameter",
    otherwise="refused",
    reads={"deepspeed.runtime.zero.partition_parameters": ("ds_id", "ds_shape", "ds_numel", "ds_tensor")},
)
TESTED_OPTIMIZERS = FENCE.patch(
    name="list of tested optimizers",
    reason="DeepSpeed compares the exact class, and would warn of ours",
    otherwise="stock path",
    replaces={"deepspeed.runtime.zero.utils": ("ZERO_SUPPORTED_OPTIMIZERS",)},
)
MUON = FENCE.patch(
    name="import of Muon",
    reason="DeepSpeed imports it at every start, which loads torch's compiler (2 s): its kernels compile when called",
    otherwise="stock path",
    replaces={"deepspeed.runtime.compiler": ("compile()",)},
)
NVTX = FENCE.patch(
    name="NVTX ranges",
    reason="they query torch.compile before and after every hook while the device waits; restore this to profile",
    otherwise="stock path",
    replaces={"deepspeed.utils.nvtx": ("enable_nvtx",)},
)


def build_optimizer(module: nn.Module, optim: OptimConfig) -> torch.optim.Optimizer:
    """The optimizer named `optim.name`, for CPU and CUDA."""
    groups = parameter_groups(module, optim)
    optimizer: torch.optim.Optimizer = optim.optimizer.build(groups, optim.peak_lr, optim)
    return optimizer


def parameter_groups(module: nn.Module, optim: OptimConfig) -> list[dict[str, Any]]:
    """Trained parameters grouped by weight decay and kind of step, in the module's order; no group is empty."""
    trained = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
    params = list(trained.values())
    # At stage 3 parameters are sharded by now; ds_shape is the shape before.
    tables = table_parameters(module)
    kinds = (
        (1 if is_vector(name) else len(getattr(p, "ds_shape", p.shape)), id(p) in tables) for name, p in trained.items()
    )
    groups = optim.parameter_groups(kinds)
    return [
        {"params": [params[i] for i in indices], "weight_decay": decay, **({"matrices": True} if matrices else {})}
        for (decay, matrices), indices in groups.items()
    ]


def start_deepspeed(
    module: nn.Module, optimizer: torch.optim.Optimizer | None, config: EngineConfig, settings: dict[str, Any]
) -> Any:
    """DeepSpeed's engine for `module`, whose parameters it takes over.

    Args:
        optimizer: None for a frozen model; at stages 1 and 2 that is returned as it is.
        settings: `deepspeed_config` of `config`.
    """
    import deepspeed
    from deepspeed.runtime.zero import utils as zero_utils
    from deepspeed.utils import nvtx

    zero = config.zero
    if optimizer is None and zero.stage < 3:
        return module  # whole and frozen: DeepSpeed has nothing to do
    if zero.stage == 3:
        SHARDS.check()
    if optimizer is not None and TESTED_OPTIMIZERS.check():
        known = zero_utils.ZERO_SUPPORTED_OPTIMIZERS
        if type(optimizer) not in known:
            TESTED_OPTIMIZERS.replace(zero_utils, ZERO_SUPPORTED_OPTIMIZERS=[*known, type(optimizer)])
    if optimizer is not None and MUON.check():
        _import_muon()
    if NVTX.check():
        NVTX.replace(nvtx, enable_nvtx=False)
    gathers_layers = zero.gathers_layers and LEAVES.check()
    if gathers_layers:
        set_leaf_modules(module)
    elif zero.stage == 3 and config.compile:
        raise EngineConfigError(f"at stage 3: {LEAVES.problem()}", field="compile", value=True, allowed="false")
    engine, _, _, _ = deepspeed.initialize(model=module, optimizer=optimizer, config=settings)
    if optimizer is not None:
        if engine.optimizer.optimizer is not optimizer:  # Adagrad, whose learning rate nothing would set any more
            raise EngineConfigError("DeepSpeed replaces it", field="optim.name", value=config.optim.name)
        _replace_step(engine.optimizer, config)
    if zero.stage == 3:
        coalesce_gathers(module, engine.optimizer)
        if gathers_layers:
            fuse_leaf_hooks(module, engine.optimizer)
            add_fetch_fast_path(engine.optimizer)
    return engine


def _import_muon() -> None:
    from deepspeed.runtime import compiler

    with MUON.replaced(compiler, compile=lambda: _compile_when_called):
        import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401


def _compile_when_called(function: Callable[..., Any]) -> Callable[..., Any]:
    compiled = cache(lambda: torch.compile(function))
    return wraps(function)(lambda *args, **kwargs: compiled()(*args, **kwargs))


def _replace_step(zero_optimizer: Any, config: EngineConfig) -> None:
    """Replace gradient accumulation and parts of the step of DeepSpeed's ZeRO optimizer."""
    if config.fuses_grad_accumulation:
        fuse_grad_accumulation(zero_optimizer)
    if config.fuses_zero3_gradients:
        fuse_zero3_gradients(zero_optimizer)
    if config.fuses_grad_norm:
        fuse_grad_norm(zero_optimizer)
    if config.zero.offload.optimizer == "nvme":
        keep_nvme_gradients_in_memory(zero_optimizer)
