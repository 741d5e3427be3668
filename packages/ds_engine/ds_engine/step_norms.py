"""The gradient norm and the overflow check of stages 1 and 2 in a handful of kernels.

DeepSpeed asks every gradient by itself for its norm, its largest and its smallest element, in a dozen kernels each that
the device finishes sooner than they are launched. Here one call takes the norms of all: it is finite exactly when all
elements are (and their squares do not overflow fp32, at gradients of 1e19). The collectives stay DeepSpeed's.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["batch_step_norms"]


def batch_step_norms(optimizer: Any) -> None:
    """Give DeepSpeed's stage 1 and 2 optimizer the two methods below; any other object is left as it is."""
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    if type(optimizer) is not DeepSpeedZeroOptimizer:
        return
    optimizer.has_overflow_partitioned_grads_serial = partial(_has_overflow, optimizer)
    optimizer.get_grad_norm_direct = partial(_grad_norm, optimizer)


def _has_overflow(optimizer: Any) -> Tensor:
    """[1] bool on the device: does this rank hold an inf or nan?"""
    square = sum(_square_norm(group, optimizer.device) for group in optimizer.averaged_gradients.values())
    return torch.as_tensor(square, device=optimizer.device).isfinite().logical_not().reshape(1)


def _grad_norm(optimizer: Any, gradients: Iterable[Tensor], params: Iterable[Tensor], norm_type: float = 2) -> Tensor:
    """0-d fp32 norm over all ranks; -1 where it is not finite, as DeepSpeed has it. Padding is zeros and adds none."""
    del params
    assert norm_type == 2, "DeepSpeed's step asks for no other"
    square = _square_norm(gradients, optimizer.device).float()
    dist.all_reduce(square, group=optimizer.dp_process_group)
    norm = square.sqrt()
    return torch.where(norm.isfinite(), norm, -torch.ones_like(norm))


def _square_norm(gradients: Iterable[Tensor | None] | None, device: torch.device | str) -> Tensor:
    """0-d fp64 on the device."""
    present = [gradient for gradient in gradients or () if gradient is not None and gradient.numel() > 0]
    if not present:
        return torch.zeros((), dtype=torch.float64, device=device)
    return torch.stack(torch._foreach_norm(present)).double().square().sum()
