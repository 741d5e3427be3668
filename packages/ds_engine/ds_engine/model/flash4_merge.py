"""Triton kernels of shared prefixes: one merges two parts of an attention by their log-sum-exp, with two reads and one
write of the output; one gathers rows of keys and values, and one sums their gradients in a fixed order."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_ROWS = 16
_ROWS_OF_PATHS, _COLUMNS, _GATHERED_COLUMNS = 2, 512, 1024
"""Tiles of the fastest of twelve shapes each on an H200, with 8 key/value heads of 128; all are within 8%."""


def merge_on_gpu(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> None:
    """`merge` of flash4.py. `out` and `other` are [Q, heads, d], contiguous in d; the others [heads, Q]."""
    num_queries, heads, dim = out.shape
    _merge_kernel[(triton.cdiv(num_queries, _ROWS), heads)](
        out, lse, other, other_lse, num_queries, dim,
        out.stride(0), out.stride(1), lse.stride(0), lse.stride(1),
        other.stride(0), other.stride(1), other_lse.stride(0), other_lse.stride(1),
        ROWS=_ROWS, DIM=triton.next_power_of_2(dim),
    )  # fmt: skip


@triton.jit
def _merge_kernel(
    out_ptr, lse_ptr, other_ptr, other_lse_ptr, num_queries, dim,
    out_q, out_h, lse_h, lse_q, other_q, other_h, other_lse_h, other_lse_q,
    ROWS: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    head = tl.program_id(1)
    columns = tl.arange(0, DIM)
    inside_q = rows < num_queries
    inside = inside_q[:, None] & (columns < dim)[None, :]
    lse_ptrs = lse_ptr + head * lse_h + rows * lse_q
    a = tl.load(lse_ptrs, inside_q, 0.0)
    b = tl.load(other_lse_ptr + head * other_lse_h + rows * other_lse_q, inside_q, 0.0)
    largest = tl.maximum(a, b)
    total = largest + tl.log(tl.exp(a - largest) + tl.exp(b - largest))
    out_ptrs = out_ptr + rows[:, None] * out_q + head * out_h + columns[None, :]
    x = tl.load(out_ptrs, inside, 0.0).to(tl.float32)
    y = tl.load(other_ptr + rows[:, None] * other_q + head * other_h + columns[None, :], inside, 0.0).to(tl.float32)
    merged = x * tl.exp(a - total)[:, None] + y * tl.exp(b - total)[:, None]
    tl.store(out_ptrs, merged.to(out_ptr.dtype.element_ty), inside)
    tl.store(lse_ptrs, total, inside_q)


def gather_on_gpu(k: Tensor, v: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """`gather_paths` of prefix_tree.py; `k` and `v` [T, heads, d] are contiguous in d."""
    num_rows, columns = rows.shape[0], max(k[0].numel(), v[0].numel())
    k_out, v_out = (x.new_empty((num_rows, *x.shape[1:])) for x in (k, v))
    _gather_kernel[(triton.cdiv(num_rows, _ROWS_OF_PATHS), triton.cdiv(columns, _GATHERED_COLUMNS))](
        k, v, rows, k_out, v_out, num_rows, k.shape[1], k.shape[2], v.shape[2],
        k.stride(0), k.stride(1), v.stride(0), v.stride(1), ROWS=_ROWS_OF_PATHS, COLUMNS=_GATHERED_COLUMNS,
    )  # fmt: skip
    return k_out, v_out


@triton.jit
def _gather_kernel(
    k_ptr, v_ptr, rows_ptr, k_out_ptr, v_out_ptr, num_rows, num_heads, k_dim, v_dim, k_row, k_head, v_row, v_head,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    places = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    rows = tl.load(rows_ptr + places, places < num_rows, 0)
    _copy_rows(k_ptr, k_out_ptr, rows, places, columns, num_rows, num_heads * k_dim, k_dim, k_row, k_head)
    _copy_rows(v_ptr, v_out_ptr, rows, places, columns, num_rows, num_heads * v_dim, v_dim, v_row, v_head)


@triton.jit
def _copy_rows(x_ptr, out_ptr, rows, places, columns, num_rows, num_columns, dim, x_row, x_head):
    inside = (places < num_rows)[:, None] & (columns < num_columns)[None, :]
    x_columns = columns // dim * x_head + columns % dim
    x = tl.load(x_ptr + rows[:, None] * x_row + x_columns[None, :], inside, 0.0)
    tl.store(out_ptr + places[:, None] * num_columns + columns[None, :], x, inside)


def sum_on_gpu(grad: Tensor, sources: Tensor, borders: Tensor, copies: int) -> Tensor:
    """`sum_sources` of prefix_tree.py."""
    num_rows, dim = borders.shape[0] - 1, grad.shape[-1]
    sums = grad.new_empty((num_rows, grad.shape[1] // copies, dim) if grad.dim() == 3 else (num_rows, dim))
    columns = sums[0].numel()
    grid = (triton.cdiv(num_rows, _ROWS_OF_PATHS), triton.cdiv(columns, _COLUMNS))
    _sum_kernel[grid](
        grad.contiguous(), sources, borders, sums, num_rows, columns, dim,
        COPIES=copies, ROWS=_ROWS_OF_PATHS, COLUMNS=_COLUMNS,
    )  # fmt: skip
    return sums


@triton.jit
def _sum_kernel(
    grad_ptr, sources_ptr, borders_ptr, sums_ptr, num_rows, num_columns, dim,
    COPIES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside_r, inside_c = rows < num_rows, columns < num_columns
    first = tl.load(borders_ptr + rows, inside_r, 0)
    counts = tl.load(borders_ptr + rows + 1, inside_r, 0) - first
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for number in range(tl.max(counts, 0)):
        more = number < counts
        places = tl.load(sources_ptr + first + number, more, 0)
        for copy in tl.static_range(COPIES):
            grad_columns = (columns // dim * COPIES + copy) * dim + columns % dim
            grad_ptrs = grad_ptr + places[:, None] * (num_columns * COPIES) + grad_columns[None, :]
            total += tl.load(grad_ptrs, more[:, None] & inside_c[None, :], 0.0).to(tl.float32)
    sums_ptrs = sums_ptr + rows[:, None] * num_columns + columns[None, :]
    tl.store(sums_ptrs, total.to(sums_ptr.dtype.element_ty), inside_r[:, None] & inside_c[None, :])
