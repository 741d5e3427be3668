"""AdamW over what is trained, with weight decay where it belongs, and DeepSpeed around it."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .adamw import AdamW
from .ds_config import deepspeed_config
from .grad_accumulation import sum_gradients_in_place
from .nvme_gradients import keep_gradients_in_memory
from .step_norms import batch_step_norms
from .zero3_gather import batch_gathers, keep_whole
from .zero3_layers import gathers_layers, make_leaves, shorten_hooks
from .zero3_step import batch_zero3_step
from .zero3_visits import shorten_visits

if TYPE_CHECKING:
    from ..config import EngineConfig, OptimConfig

__all__ = ["build_optimizer", "parameter_groups", "start_deepspeed"]


def build_optimizer(module: nn.Module, optim: OptimConfig) -> torch.optim.Optimizer:
    """AdamW that runs on CPU and CUDA alike and needs no C++ compiler at run time, unlike DeepSpeed's."""
    return AdamW(parameter_groups(module, optim), lr=optim.lr, betas=optim.betas, eps=optim.eps)


def parameter_groups(module: nn.Module, optim: OptimConfig) -> list[dict[str, Any]]:
    """Trained parameters in groups of one weight decay each, none empty, in the module's order.

    Decay pulls weights to zero. The scales of norms and biases (whatever has one dimension) have no reason to be
    there, so they are left alone unless `optim.decay_1d` says otherwise.
    """
    groups: dict[float, list[nn.Parameter]] = {optim.weight_decay: [], 0.0: []}
    for parameter in module.parameters():
        if parameter.requires_grad:
            # At stage 3 parameters are sharded by now; ds_shape is the shape before.
            shape = getattr(parameter, "ds_shape", parameter.shape)
            groups[optim.weight_decay_for(len(shape))].append(parameter)
    return [{"params": params, "weight_decay": decay} for decay, params in groups.items() if params]


def start_deepspeed(
    module: nn.Module, optimizer: torch.optim.Optimizer | None, config: EngineConfig, *, device: torch.device
) -> Any:
    """DeepSpeed's engine for `module`, whose parameters it takes over; without `optimizer` the model is frozen."""
    import deepspeed
    from deepspeed.runtime.zero.utils import ZERO_SUPPORTED_OPTIMIZERS
    from deepspeed.utils import nvtx

    if optimizer is None and config.zero.stage < 3:
        return module  # whole and frozen: nothing is left for DeepSpeed to do
    settings = deepspeed_config(config, device_type=device.type)
    if optimizer is None:
        settings["zero_optimization"].pop("offload_optimizer", None)
    elif type(optimizer) not in ZERO_SUPPORTED_OPTIMIZERS:
        ZERO_SUPPORTED_OPTIMIZERS.append(type(optimizer))  # DeepSpeed goes by the very class, and would warn
    # Ranges around every visit, wait and release, each with questions to torch.compile before and after, while the
    # device waits. They are back where this is set again.
    nvtx.enable_nvtx = False
    if gathers_layers(config.zero):
        make_leaves(module)
    engine, _, _, _ = deepspeed.initialize(model=module, optimizer=optimizer, config=settings)
    sum_gradients_in_place(engine.optimizer)
    batch_step_norms(engine.optimizer)
    _leave_weights_in_place(engine.optimizer)
    if config.zero.stage == 3:
        batch_gathers(module, engine.optimizer)
        batch_zero3_step(engine.optimizer)
        if gathers_layers(config.zero):
            shorten_hooks(module, engine.optimizer)
            shorten_visits(engine.optimizer)
        keep_whole(engine.optimizer)
    keep_gradients_in_memory(engine.optimizer)
    return engine


def _leave_weights_in_place(zero_optimizer: Any) -> None:
    """After each step DeepSpeed points every parameter, at stage 3 every shard, at its place in the flat weights, where
    it is already: milliseconds of the CPU, when the device has little left to do."""
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    if type(zero_optimizer) is DeepSpeedZeroOptimizer:
        method, flats = "_update_model_bit16_weights", zero_optimizer.bit16_groups_flat
        groups, offsets = zero_optimizer.round_robin_bit16_groups, zero_optimizer.round_robin_bit16_offsets
    elif type(zero_optimizer) is DeepSpeedZeroOptimizer_Stage3:
        method, flats = "_unflatten_partitioned_parameters", zero_optimizer.fp16_partitioned_groups_flat
        groups = zero_optimizer.fp16_partitioned_groups
        offsets = [[0, *accumulate(shard.numel() for shard in group)][:-1] for group in groups]
    else:
        return
    point: Callable[[int], None] = getattr(zero_optimizer, method)

    def point_if_elsewhere(group: int) -> None:
        start, size = flats[group].data_ptr(), flats[group].element_size()
        if any(p.data_ptr() != start + size * offset for p, offset in zip(groups[group], offsets[group], strict=True)):
            point(group)

    setattr(zero_optimizer, method, point_if_elsewhere)
