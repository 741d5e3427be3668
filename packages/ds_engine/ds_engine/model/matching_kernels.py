"""Gradients of the operations that servers and ranks share (matching.py), each in one pass on a GPU."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_PARTS = 528
"""Programs of the norm's backward pass; each sums its rows of the weight's gradient, so sums have one order."""


def norm_gradients(x: Tensor, weight: Tensor, grad: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See `matching.norm_gradients`."""
    x, grad = x.contiguous(), grad.contiguous()
    width, grad_x = x.shape[-1], torch.empty_like(x)
    num_rows, padded = x.numel() // width, triton.next_power_of_2(width)
    at_once = max(1, 4096 // padded)
    per_program = triton.cdiv(triton.cdiv(num_rows, _PARTS), at_once) * at_once
    parts = torch.zeros((_PARTS, width), dtype=torch.float32, device=x.device)
    _norm_kernel[(_PARTS,)](
        grad_x, parts, x, weight, grad, eps, num_rows, width, per_program, ROWS=at_once, WIDTH=padded, num_warps=8
    )  # fmt: skip
    return grad_x, parts.sum(0).to(weight.dtype)


def silu_and_mul_gradients(gate: Tensor, up: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """See `matching.silu_and_mul_gradients`."""
    gate, up, grad = gate.contiguous(), up.contiguous(), grad.contiguous()
    grads = torch.empty_like(gate), torch.empty_like(up)
    grid = (triton.cdiv(gate.numel(), 2048),)
    _silu_and_mul_kernel[grid](*grads, gate, up, grad, gate.numel(), BLOCK=2048, num_warps=4)
    return grads


@triton.jit
def _norm_kernel(
    grad_x_ptr, parts_ptr, x_ptr, weight_ptr, grad_ptr, eps, num_rows, width, per_program,
    ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    columns = tl.arange(0, WIDTH)
    inside = columns < width
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    total = tl.zeros([ROWS, WIDTH], tl.float32)
    first = tl.program_id(0) * per_program
    for start in range(first, tl.minimum(first + per_program, num_rows), ROWS):
        rows = start + tl.arange(0, ROWS)
        there = (rows < tl.minimum(first + per_program, num_rows))[:, None] & inside[None, :]
        place = rows.to(tl.int64)[:, None] * width + columns[None, :]
        narrow = tl.load(x_ptr + place, mask=there, other=0.0)
        x, grad = narrow.to(tl.float32), tl.load(grad_ptr + place, mask=there, other=0.0).to(tl.float32)
        scale = 1.0 / tl.sqrt(tl.sum(x * x, axis=1) / width + eps)
        normed, weighted = x * scale[:, None], grad * weight[None, :]
        mean = tl.sum(weighted * normed, axis=1) / width
        grad_x = scale[:, None] * (weighted - normed * mean[:, None])
        tl.store(grad_x_ptr + place, grad_x.to(narrow.dtype), mask=there)
        total += grad * normed.to(narrow.dtype).to(tl.float32)
    tl.store(parts_ptr + tl.program_id(0) * width + columns, tl.sum(total, axis=0), mask=inside)


@triton.jit
def _silu_and_mul_kernel(grad_gate_ptr, grad_up_ptr, gate_ptr, up_ptr, grad_ptr, num, BLOCK: tl.constexpr):
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    there = places < num
    narrow = tl.load(gate_ptr + places, mask=there, other=0.0)
    gate = narrow.to(tl.float32)
    up = tl.load(up_ptr + places, mask=there, other=0.0).to(tl.float32)
    grad = tl.load(grad_ptr + places, mask=there, other=0.0).to(tl.float32)
    sigmoid = 1.0 / (1.0 + tl.exp(-gate))
    slope = sigmoid * (1.0 + gate * (1.0 - sigmoid))
    tl.store(grad_gate_ptr + places, (grad * up * slope).to(narrow.dtype), mask=there)
    tl.store(grad_up_ptr + places, (grad * gate * sigmoid).to(narrow.dtype), mask=there)
