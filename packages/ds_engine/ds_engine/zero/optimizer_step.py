"""Gradient norm, overflow check, clipping and loss scale of DeepSpeed's optimizer step.

DeepSpeed computes norm, minimum and maximum of every gradient separately, in a dozen kernels each that run faster than
they are launched, waits twice for all ranks (stage 3: in fp16 only), and scales the gradients in a separate pass. Here
one foreach call computes the norms of all gradients and one collective sums them. The sum is finite exactly if all
elements are finite (and their squares do not overflow fp32, which takes gradients of 1e19), so the norm is also the
overflow check, and DeepSpeed waits for the device once. AdamW divides the gradients while it reads them.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from plinth_base.fence import Patch

from ..errors import EngineConfigError
from ..upstream import FENCE

_STAGE_2 = "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer"
_STAGE_3 = "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3"


def _norm_patch(stages: str, optimizer: str, norm: str, first_parameter: str) -> Patch:
    used = ("averaged_gradients", "device", "dp_process_group", "optimizer", "loss_scale", "clip_grad")
    unscale = f"unscale_and_clip_grads({first_parameter}, total_norm)"
    return FENCE.patch(
        name=f"gradient norm of {stages}",
        reason="one norm of all gradients is also the overflow check; AdamW unscales and clips while it reads them",
        otherwise="stock path",
        replaces={optimizer: (norm, "check_overflow(partition_gradients)", unscale)},
        reads={optimizer: used, "torch": ("_foreach_norm",), "torch.optim.adam:Adam": ("grad_scale",)},
    )


NORM_2 = _norm_patch("stages 1 and 2", _STAGE_2, "scaled_global_norm(norm_type)", "grad_groups_flat")
NORM_3 = _norm_patch("stage 3", _STAGE_3, "_get_norm_groups()", "sub_group_id")
LOSS_SCALE = FENCE.patch(
    name="loss scale in float16",
    reason="DeepSpeed doubles the scale within a step, and keeps an overflowed gradient with optimizer offload",
    otherwise="refused",
    replaces={
        _STAGE_2: ("averaged_gradients",),
        "deepspeed.runtime.fp16.loss_scaler:DynamicLossScaler": ("cur_scale",),
    },
    reads={
        _STAGE_2: ("loss_scale", "loss_scaler", "overflow", "all_grad_tensors"),
        _STAGE_3: ("loss_scale", "loss_scaler", "overflow"),
        "deepspeed.runtime.fp16.loss_scaler:DynamicLossScaler": ("cur_iter", "last_overflow_iter", "dynamic"),
    },
)
_CHUNK = 2**24
"""Elements of a gradient whose squares are summed in fp32; the sums of chunks are added in fp64."""
_CPU_CHUNK = 2**16
"""The same on a CPU, where torch adds squares one after another: a norm of 2**24 is off by 6e-4, of 2**16 by 2e-6."""


def fuse_grad_norm(zero_optimizer: Any) -> None:
    """Replace gradient norm, overflow check, unscaling and clipping of DeepSpeed's ZeRO optimizer.

    Args:
        zero_optimizer: of an engine whose settings have `EngineConfig.fuses_grad_norm`.
    """
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

    # The norm is not finite after an overflow, and AdamW divides by its grad_scale.
    unused = {"check_overflow": _do_nothing, "unscale_and_clip_grads": _do_nothing}
    if isinstance(zero_optimizer, DeepSpeedZeroOptimizer_Stage3):
        if NORM_3.check():
            NORM_3.replace(zero_optimizer, _get_norm_groups=lambda: [_global_norm(zero_optimizer)], **unused)
    elif NORM_2.check():
        NORM_2.replace(zero_optimizer, scaled_global_norm=partial(_global_norm, zero_optimizer), **unused)


def _do_nothing(*args: Any, **kwargs: Any) -> None:
    pass


def _global_norm(optimizer: Any, norm_type: float = 2) -> Tensor:
    """0-d fp32 norm of the scaled gradients of all parameter groups and ranks; not finite if any gradient is not.

    Also sets the divisor that AdamW applies, before DeepSpeed waits for the norm. Padding is zero and adds nothing.
    """
    assert norm_type == 2, "DeepSpeed's step uses the L2 norm only"
    groups = optimizer.averaged_gradients.values()
    square = torch.stack([_square_norm(group, optimizer.device) for group in groups]).sum()
    dist.all_reduce(square, group=optimizer.dp_process_group)
    norm = square.sqrt().float()
    optimizer.optimizer.grad_scale = _divisor(norm, optimizer.loss_scale, optimizer.clip_grad)
    return norm


def _divisor(norm: Tensor, loss_scale: float, max_norm: float) -> Tensor | None:
    """Loss scale times the factor by which the norm exceeds `max_norm` (0: no clipping); None if that is always 1."""
    if max_norm > 0:
        return loss_scale * ((norm / loss_scale + 1e-6) / max_norm).clamp(min=1.0)
    return torch.full_like(norm, loss_scale) if loss_scale != 1.0 else None


def _square_norm(gradients: Iterable[Tensor | None] | None, device: torch.device | str) -> Tensor:
    """Sum of squares, 0-d fp64 on `device`."""
    flat: Tensor | None = getattr(gradients, "flat_partition", None)
    whole = (flat,) if flat is not None else gradients or ()
    present = [
        chunk
        for gradient in whole
        if gradient is not None and gradient.numel() > 0
        for chunk in gradient.flatten().split(_CPU_CHUNK if gradient.is_cpu else _CHUNK)
    ]
    if not present:
        return torch.zeros((), dtype=torch.float64, device=device)
    # fp32: bf16 would round the norms, and fp16 would overflow long before an element does.
    return torch.stack(torch._foreach_norm(present, dtype=torch.float32)).double().square().sum()


class LossScale:
    """Dynamic loss scale of one engine; always 1 except in fp16. DeepSpeed's checkpoints contain its state.

    DeepSpeed halves the scale and skips the step when a gradient overflows. Two of its other steps are corrected here:

    * It doubles the scale after many good steps between computing a gradient's norm and unscaling the gradient, so
      each such step uses half its gradient (at stage 3 half its norm, too). ds_config disables this, and the scale is
      doubled here, between steps.
    * At stages 1 and 2 with optimizer offload and fp32 accumulation it keeps the overflowed gradient and adds later
      ones to it, so no step is ever applied again. The gradient is dropped here.
    """

    def __init__(self, zero_optimizer: Any, *, window: int = 1000) -> None:
        """
        Args:
            zero_optimizer: DeepSpeed's optimizer, or None for a frozen model.
            window: number of good steps after which the scale doubles.
        """
        self._optimizer = zero_optimizer
        self._window = window

    @property
    def value(self) -> float:
        """Loss scale of the next backward pass."""
        return float(getattr(self._optimizer, "loss_scale", 1.0))

    def after_step(self) -> None:
        """Drop an overflowed gradient and update the scale. Call it after each step, applied or not."""
        # Stage 3 has no such attribute and clears its gradients itself.
        if getattr(self._optimizer, "overflow", False) and hasattr(self._optimizer, "all_grad_tensors"):
            LOSS_SCALE.replace(self._optimizer, averaged_gradients=dict.fromkeys(self._optimizer.averaged_gradients))
        scaler: Any = getattr(self._optimizer, "loss_scaler", None)
        if not getattr(scaler, "dynamic", False):
            return
        num_good = scaler.cur_iter - scaler.last_overflow_iter - 1
        if num_good > 0 and num_good % self._window == 0:
            LOSS_SCALE.replace(scaler, cur_scale=2.0 * scaler.cur_scale)


def check_fp16(dtype: str, device_type: str) -> None:
    """Refuse float16 where DeepSpeed would.

    Raises:
        EngineConfigError: this device does not compute in float16, or DeepSpeed's loss scale is not the tested one.
    """
    if dtype != "float16":
        return
    LOSS_SCALE.check()
    from deepspeed.accelerator import get_accelerator

    if not get_accelerator().is_fp16_supported():
        reason = "CPU has no fp16 instructions (AMX-FP16 or AVX512-FP16)" if device_type == "cpu" else "GPU has no fp16"
        raise EngineConfigError(f"this {reason}", field="dtype", value="float16", allowed="bfloat16 or float32")
