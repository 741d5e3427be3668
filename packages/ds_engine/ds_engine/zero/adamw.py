"""AdamW; on CUDA with a Triton kernel, if Triton and a C compiler are available.

torch's fused AdamW writes each unscaled gradient back to memory, where nothing reads it, and splits tensors into chunks
for lists of many, where DeepSpeed passes a single long tensor. States, options and results are torch's.

Source: Loshchilov and Hutter, "Decoupled weight decay regularization", 2019, algorithm 2.
"""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..upstream import FENCE

KERNEL = FENCE.patch(
    name="AdamW kernel",
    reason="torch's fused AdamW writes the unscaled gradient back and splits long tensors",
    otherwise="stock path",
    reads={
        "torch.optim.adam:Adam": (
            "_init_group(group, params_with_grad, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, state_steps)",
            "grad_scale",
        ),
        "torch": ("_foreach_add_",),
    },
)
_HAS_TRITON = importlib.util.find_spec("triton") is not None and any(map(shutil.which, ("gcc", "clang")))
"""Triton compiles its kernel launcher with a C compiler. Without one, torch's own step is used."""


class AdamW(torch.optim.AdamW):
    """torch.optim.AdamW(fused=True). Both divide gradients by the 0-d tensor `grad_scale` if it is set."""

    grad_scale: Tensor | None = None

    def __init__(
        self,
        params: Any,
        *,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ) -> None:
        """Takes the options that the kernel supports, with torch's defaults."""
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, fused=True)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step all parameters that have a gradient."""
        stepped = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        if not _HAS_TRITON or closure is not None or not all(map(_is_supported, stepped)) or not KERNEL.check():
            return super().step(closure)
        KERNEL.calls["step"] += 1
        for group in self.param_groups:
            self._step_group(group)
        return None

    def _step_group(self, group: dict[str, Any]) -> None:
        from .adamw_kernel import adamw

        lists: list[list[Tensor]] = [[] for _ in range(5)]
        params, gradients, means, squares, counts = lists
        self._init_group(group, params, gradients, means, squares, [], counts)
        if not params:
            return
        torch._foreach_add_(counts, 1)
        options = {name: group[name] for name in ("lr", "betas", "eps", "weight_decay")}
        for tensors in zip(*lists, strict=True):
            adamw(*tensors, **options, grad_scale=self.grad_scale)


def _is_supported(param: Tensor) -> bool:
    """True if the kernel can step this parameter: fp32, on CUDA, contiguous."""
    gradient = param.grad
    assert gradient is not None
    return (
        param.is_cuda
        and param.dtype == gradient.dtype == torch.float32
        and param.is_contiguous()
        and gradient.is_contiguous()
    )
