"""Gradients that overflow, and the factor fp16 losses are multiplied by, so that small gradients do not vanish.

DeepSpeed halves the factor when a gradient overflows, and skips that step. Two things it does are mended here:

* It doubles the scale after many good steps between taking a gradient's norm and dividing the gradient by the scale:
  every such step is taken with half its gradient (at stage 3 half its norm, too). So it is told never to, and the
  scale is doubled here, between steps.
* At stages 1 and 2 with optimizer offload and fp32 accumulation it keeps the overflown gradient and adds the next ones
  to it: no step is ever applied again. So the gradient is dropped here.
"""

from __future__ import annotations

from typing import Any

from ..errors import EngineConfigError

__all__ = ["NEVER", "LossScale", "check_fp16"]

NEVER = 2**62
"""Good steps after which DeepSpeed itself would raise the scale."""


class LossScale:
    """The scale of one engine; 1 and constant except in fp16. Its state is DeepSpeed's, and in its checkpoints."""

    def __init__(self, zero_optimizer: Any, *, window: int = 1000) -> None:
        """
        Args:
            zero_optimizer: DeepSpeed's, or None for a frozen model.
            window: good steps after which the scale doubles.
        """
        self._optimizer = zero_optimizer
        self._window = window

    @property
    def value(self) -> float:
        """The scale of the next backward pass."""
        return float(getattr(self._optimizer, "loss_scale", 1.0))

    def after_step(self) -> None:
        """Drop what an overflow left, double the scale when it is time; call it after each step, applied or not."""
        # Stage 3 has no such attribute, and clears its gradients by itself.
        if getattr(self._optimizer, "overflow", False) and hasattr(self._optimizer, "all_grad_tensors"):
            self._optimizer.averaged_gradients = dict.fromkeys(self._optimizer.averaged_gradients)
        scaler: Any = getattr(self._optimizer, "loss_scaler", None)
        if not getattr(scaler, "dynamic", False):
            return
        num_good = scaler.cur_iter - scaler.last_overflow_iter - 1
        if num_good > 0 and num_good % self._window == 0:
            scaler.cur_scale *= 2.0


def check_fp16(dtype: str, device_type: str) -> None:
    """Refuse fp16 where DeepSpeed would.

    Raises:
        EngineConfigError: this device does not compute in fp16.
    """
    if dtype != "float16":
        return
    from deepspeed.accelerator import get_accelerator

    if not get_accelerator().is_fp16_supported():
        reason = "CPU has no fp16 instructions (AMX-FP16 or AVX512-FP16)" if device_type == "cpu" else "GPU has no fp16"
        raise EngineConfigError(f"dtype='float16' cannot work: this {reason}; use bfloat16 or float32")
