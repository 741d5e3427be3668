"""Builds AdamW with its parameter groups and starts DeepSpeed with the replacements of this package."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .adamw import AdamW
from .grad_accumulation import fuse_grad_accumulation
from .optimizer_step import fuse_grad_norm, keep_weight_views
from .zero3_gather import coalesce_gathers, keep_gathered
from .zero3_gradients import fuse_zero3_gradients, keep_nvme_gradients_in_memory
from .zero3_hooks import add_fetch_fast_path, fuse_leaf_hooks, set_leaf_modules

if TYPE_CHECKING:
    from ..config import EngineConfig, OptimConfig


def build_optimizer(module: nn.Module, optim: OptimConfig) -> torch.optim.Optimizer:
    """AdamW for CPU and CUDA; unlike DeepSpeed's it needs no C++ compiler at run time."""
    return AdamW(parameter_groups(module, optim), lr=optim.lr, betas=optim.betas, eps=optim.eps)


def parameter_groups(module: nn.Module, optim: OptimConfig) -> list[dict[str, Any]]:
    """Trained parameters grouped by weight decay, in the module's order; no group is empty."""
    groups: dict[float, list[nn.Parameter]] = {optim.weight_decay: [], 0.0: []}
    for parameter in module.parameters():
        if parameter.requires_grad:
            # At stage 3 parameters are sharded by now; ds_shape is the shape before.
            shape = getattr(parameter, "ds_shape", parameter.shape)
            groups[optim.weight_decay_for(len(shape))].append(parameter)
    return [{"params": params, "weight_decay": decay} for decay, params in groups.items() if params]


def start_deepspeed(
    module: nn.Module, optimizer: torch.optim.Optimizer | None, config: EngineConfig, settings: dict[str, Any]
) -> Any:
    """DeepSpeed's engine for `module`, whose parameters it takes over.

    Args:
        optimizer: None for a frozen model; at stages 1 and 2 that is returned as it is.
        settings: `deepspeed_config` of `config`.
    """
    import deepspeed
    from deepspeed.runtime.zero.utils import ZERO_SUPPORTED_OPTIMIZERS
    from deepspeed.utils import nvtx

    zero = config.zero
    if optimizer is None and zero.stage < 3:
        return module  # whole and frozen: DeepSpeed has nothing to do
    if optimizer is not None and type(optimizer) not in ZERO_SUPPORTED_OPTIMIZERS:
        ZERO_SUPPORTED_OPTIMIZERS.append(type(optimizer))  # DeepSpeed compares the exact class, and would warn
    # DeepSpeed's NVTX ranges query torch.compile before and after every hook while the device waits. To profile with
    # them, set this to True again.
    nvtx.enable_nvtx = False
    if zero.gathers_layers:
        set_leaf_modules(module)
    engine, _, _, _ = deepspeed.initialize(model=module, optimizer=optimizer, config=settings)
    if optimizer is not None:
        _replace_step(engine.optimizer, config)
    if zero.stage == 3:
        coalesce_gathers(module, engine.optimizer)
        if zero.gathers_layers:
            fuse_leaf_hooks(module, engine.optimizer)
            add_fetch_fast_path(engine.optimizer)
        keep_gathered(engine.optimizer)
    return engine


def _replace_step(zero_optimizer: Any, config: EngineConfig) -> None:
    """Replace gradient accumulation and parts of the step of DeepSpeed's ZeRO optimizer."""
    if config.fuses_grad_accumulation:
        fuse_grad_accumulation(zero_optimizer)
    if config.fuses_zero3_gradients:
        fuse_zero3_gradients(zero_optimizer)
    if config.fuses_grad_norm:
        fuse_grad_norm(zero_optimizer)
    if not config.uses_bf16_optimizer:
        keep_weight_views(zero_optimizer)
    if config.zero.offload.optimizer == "nvme":
        keep_nvme_gradients_in_memory(zero_optimizer)
