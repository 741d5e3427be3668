"""Triton kernel for one AdamW step of one tensor: four reads and three writes per element."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096
_NUM_WARPS = 8


def adamw(
    param: Tensor,
    gradient: Tensor,
    mean: Tensor,
    square: Tensor,
    count: Tensor,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    grad_scale: Tensor | None,
) -> None:
    """Step `param` and its moments in place.

    Args:
        param, gradient, mean, square: fp32, contiguous, of equal length.
        count: 0-d, number of steps including this one.
        grad_scale: 0-d fp32 divisor of the gradient; None: 1.
    """
    # fp64, because 1 - 0.999 loses four digits in fp32.
    corrections = torch.stack([1 - beta ** count.double() for beta in betas])
    num_elements = param.numel()
    _adamw_kernel[(triton.cdiv(num_elements, _BLOCK),)](
        param, gradient, mean, square, corrections, grad_scale, num_elements,
        lr, betas[0], 1 - betas[0], betas[1], 1 - betas[1], eps, lr * weight_decay,
        HAS_SCALE=grad_scale is not None, BLOCK=_BLOCK, num_warps=_NUM_WARPS,
    )  # fmt: skip


@triton.jit(do_not_specialize=["lr", "beta1", "rest1", "beta2", "rest2", "eps", "decay"])
def _adamw_kernel(
    param_ptr, gradient_ptr, mean_ptr, square_ptr, corrections_ptr, scale_ptr, num_elements,
    lr, beta1, rest1, beta2, rest2, eps, decay,
    HAS_SCALE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < num_elements
    g = tl.load(gradient_ptr + at, inside, 0.0)
    if HAS_SCALE:
        g = g / tl.load(scale_ptr)
    p = tl.load(param_ptr + at, inside, 0.0)
    p -= p * decay  # p * (1 - decay) would round a decay of 5e-8 to 6e-8 in fp32
    m = tl.load(mean_ptr + at, inside, 0.0) * beta1 + g * rest1
    v = tl.load(square_ptr + at, inside, 0.0) * beta2 + g * g * rest2
    bias1 = tl.load(corrections_ptr).to(tl.float32)
    bias2 = tl.sqrt(tl.load(corrections_ptr + 1)).to(tl.float32)
    p -= (lr / bias1) * m / (tl.sqrt(v) / bias2 + eps)
    tl.store(param_ptr + at, p, inside)
    tl.store(mean_ptr + at, m, inside)
    tl.store(square_ptr + at, v, inside)
