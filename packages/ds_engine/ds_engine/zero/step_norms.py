"""The gradient norm, the overflow check and clipping in a handful of kernels and one wait.

DeepSpeed asks every gradient by itself for its norm, its largest and its smallest element, in a dozen kernels each that
the device finishes sooner than they are launched, waits for the answers of all ranks twice (stage 3 in fp16 only), and
scales gradients in a pass of their own. Here one call takes the norms of all, and one collective adds them up: the sum
is finite exactly when all elements are (and their squares do not overflow fp32, at gradients of 1e19), which is all
that DeepSpeed then waits for. AdamW divides gradients as it reads them.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["batch_step_norms"]

_PIECE = 2**24
"""Elements of a flat gradient whose squares are added up in fp32; sums of pieces are added in fp64."""


def batch_step_norms(optimizer: Any) -> None:
    """Give DeepSpeed's ZeRO optimizer the methods below; any other object, and one offloaded, is left as it is."""
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    if type(optimizer) is DeepSpeedZeroOptimizer and not optimizer.cpu_offload:
        optimizer.scaled_global_norm = partial(_global_norm, optimizer)
    elif type(optimizer) is DeepSpeedZeroOptimizer_Stage3 and not optimizer.offload_optimizer:
        optimizer._get_norm_groups = lambda: [_global_norm(optimizer)]
    else:
        return
    optimizer.check_overflow = _do_nothing  # the norm tells
    optimizer.unscale_and_clip_grads = _do_nothing  # AdamW does, by what the norm left it


def _do_nothing(*args: Any, **kwargs: Any) -> None:
    pass


def _global_norm(optimizer: Any, norm_type: float = 2) -> Tensor:
    """0-d fp32 norm of the scaled gradients of all parameter groups and ranks, not finite where one of them is not.

    AdamW gets what it is to divide by now, while the device is busy, and not after DeepSpeed has waited for the norm.
    Padding is zeros and adds none.
    """
    assert norm_type == 2, "DeepSpeed's step asks for no other"
    groups = optimizer.averaged_gradients.values()
    square = torch.stack([_square_norm(group, optimizer.device) for group in groups]).sum()
    dist.all_reduce(square, group=optimizer.dp_process_group)
    norm = square.sqrt().float()
    optimizer.optimizer.grad_scale = _divisor(norm, optimizer.loss_scale, optimizer.clip_grad)
    return norm


def _divisor(norm: Tensor, loss_scale: float, largest: float) -> Tensor | None:
    """The loss scale times what exceeds the largest norm; None: gradients are taken as they are."""
    if largest > 0:
        return loss_scale * ((norm / loss_scale + 1e-6) / largest).clamp(min=1.0)
    return torch.full_like(norm, loss_scale) if loss_scale != 1.0 else None


def _square_norm(gradients: Iterable[Tensor | None] | None, device: torch.device | str) -> Tensor:
    """0-d fp64 on the device."""
    flat: Tensor | None = getattr(gradients, "flat_partition", None)
    if flat is not None:
        gradients = flat.split(_PIECE)
    present = [gradient for gradient in gradients or () if gradient is not None and gradient.numel() > 0]
    if not present:
        return torch.zeros((), dtype=torch.float64, device=device)
    # In fp32: bf16 would round the norms of its gradients, and fp16 overflow long before an element does.
    return torch.stack(torch._foreach_norm(present, dtype=torch.float32)).double().square().sum()
