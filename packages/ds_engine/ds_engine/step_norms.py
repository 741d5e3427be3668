"""The gradient norm, the overflow check and clipping of stages 1 and 2 in a handful of kernels.

DeepSpeed asks every gradient by itself for its norm, its largest and its smallest element, in a dozen kernels each that
the device finishes sooner than they are launched, and scales gradients in a pass of their own. Here one call takes the
norms of all, once: their sum is finite exactly when all elements are (and their squares do not overflow fp32, at
gradients of 1e19). torch's fused AdamW divides gradients as it reads them. The collectives stay DeepSpeed's.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["batch_step_norms"]

_PIECE = 2**24
"""Elements of a flat gradient whose squares are added up in fp32; sums of pieces are added in fp64."""


def batch_step_norms(optimizer: Any) -> None:
    """Give DeepSpeed's stage 1 and 2 optimizer the methods below; any other object is left as it is."""
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    if type(optimizer) is not DeepSpeedZeroOptimizer:
        return
    norms = _StepNorms(optimizer)
    optimizer.has_overflow_partitioned_grads_serial = norms.has_overflow
    optimizer.get_grad_norm_direct = norms.grad_norm
    if isinstance(optimizer.optimizer, torch.optim.AdamW) and not optimizer.cpu_offload:
        optimizer.unscale_and_clip_grads = norms.scale_in_step


class _StepNorms:
    """What DeepSpeed's step asks for, in the order it does: overflow, norms of parameter groups, scaling of each."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._squares: dict[int, Tensor] = {}

    def has_overflow(self) -> Tensor:
        """[1] bool on the device: does this rank hold an inf or nan?"""
        groups = self._optimizer.averaged_gradients.values()
        self._squares = {id(group): _square_norm(group, self._optimizer.device) for group in groups}
        square = torch.stack(list(self._squares.values())).sum()
        return square.isfinite().logical_not().reshape(1)

    def grad_norm(self, gradients: Iterable[Tensor], params: Iterable[Tensor], norm_type: float = 2) -> Tensor:
        """0-d fp32 norm over all ranks; -1 where it is not finite, as DeepSpeed has it. Padding is zeros, adds none."""
        del params
        assert norm_type == 2, "DeepSpeed's step asks for no other"
        known = self._squares.pop(id(gradients), None)
        square = (_square_norm(gradients, self._optimizer.device) if known is None else known).float()
        dist.all_reduce(square, group=self._optimizer.dp_process_group)
        norm = square.sqrt()
        return torch.where(norm.isfinite(), norm, -torch.ones_like(norm))

    def scale_in_step(self, gradients: Any, total_norm: Tensor) -> None:
        """Hand the loss scale times what exceeds the largest norm to AdamW, which divides each gradient by it."""
        del gradients
        loss_scale, largest = self._optimizer.loss_scale, self._optimizer.clip_grad
        scale = None
        if largest > 0:
            scale = loss_scale * ((total_norm / loss_scale + 1e-6) / largest).clamp(min=1.0)
        elif loss_scale != 1.0:
            scale = torch.full_like(total_norm, loss_scale)
        self._optimizer.optimizer.grad_scale = scale


def _square_norm(gradients: Iterable[Tensor | None] | None, device: torch.device | str) -> Tensor:
    """0-d fp64 on the device."""
    flat: Tensor | None = getattr(gradients, "flat_partition", None)
    if flat is not None:
        gradients = flat.split(_PIECE)
    present = [gradient for gradient in gradients or () if gradient is not None and gradient.numel() > 0]
    if not present:
        return torch.zeros((), dtype=torch.float64, device=device)
    return torch.stack(torch._foreach_norm(present)).double().square().sum()
