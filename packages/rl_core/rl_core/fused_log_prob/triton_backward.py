"""Backward pass on the GPU: one block of ``da`` (types.py) at a time, each followed by two library matrix products.

For each block of R rows x C columns:

1. Recompute the logits and turn them into ``da`` in the epilogue of the tile kernel; logits are never stored. Columns
   whose probabilities were kept skip this product: one pass turns them into ``da`` in place. If all columns were kept
   and da is a factor per row times a probability, that pass is skipped too: the factor is applied to d_hidden at the
   end and, for d_weight, to a copy of hidden.
2. Correct the entries of the targets from the saved float32 log-prob.
3. ``d_weight[C] = da^T @ hidden``, written once per group of rows; several row blocks of a group are summed in a
   float32 block first.
4. ``d_hidden[R] += da @ weight[C]`` in float32.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
import triton
from torch import Tensor

from . import hopper
from .chunked import matmul_accumulate
from .tiles import TileConfig, plan_blocks, plan_groups, sum_bytes
from .triton_forward import factor_pointers, num_tiles, tile_arguments
from .triton_kernels import kept_gradient_kernel, rebase_kernel, target_gradient_kernel, tile_gradient_kernel
from .types import LOG2_E, MARGIN_BITS, Gradients, Kept, LogitInputs, LogitSpec, Needs, Reduce, RowGrads

FP16_PEAK = 2.0**14  # target of the largest possible |da| in fp16, whose smallest normal number is 2**-14


@dataclass(frozen=True, kw_only=True)
class RowFactors:
    """``da = 2^(scale u - lse) (alpha + beta u) (1 - (u / cap)^2)`` times ``loss_scale``, and the value of the target.

    ``loss_scale`` is None except for fp16, where the gradients of a mean over many tokens would underflow.
    """

    lse_bits_N: Tensor
    alpha_N: Tensor
    beta_N: Tensor | None
    target_da_N: Tensor
    loss_scale: Tensor | None


def row_factors(rows: RowGrads, spec: LogitSpec, dtype: torch.dtype) -> RowFactors:
    """Inputs of the tile kernel for each row, from the incoming gradients; without synchronization."""
    probability_N = rows.log_prob_N.exp()
    alpha_N = -rows.grad_log_prob_N
    target_N = -torch.expm1(rows.log_prob_N) * rows.grad_log_prob_N  # 1 - p without cancellation
    bound_N = rows.grad_log_prob_N.abs()
    beta_N = None
    if rows.grad_entropy_N is not None:
        target_z_N = rows.log_prob_N + rows.lse_N
        alpha_N = alpha_N + rows.grad_entropy_N * rows.mean_z_N
        beta_N = -rows.grad_entropy_N / spec.temperature
        target_N = target_N - rows.grad_entropy_N * probability_N * (target_z_N - rows.mean_z_N)
        bound_N = bound_N + 16 * rows.grad_entropy_N.abs()  # |p (log p + entropy)| <= log V + 1
    if spec.soft_cap is not None:
        u_N = (rows.log_prob_N + rows.lse_N) * spec.temperature
        target_N = target_N * (1.0 - (u_N / spec.soft_cap).square())
    factor: Tensor | float = 1.0 / spec.temperature
    loss_scale = None
    if dtype == torch.float16:
        peak = (bound_N.max() / spec.temperature).clamp_min(2.0**-100)
        loss_scale = torch.exp2(torch.floor(torch.log2(FP16_PEAK / peak)))
        factor = factor * loss_scale
    return RowFactors(
        lse_bits_N=rows.lse_N * LOG2_E,
        alpha_N=alpha_N * factor,
        beta_N=None if beta_N is None else beta_N * factor,
        target_da_N=target_N * factor,
        loss_scale=loss_scale,
    )


def portable_tile_gradient(out_NC: Tensor, block: LogitInputs, factors: RowFactors, config: TileConfig) -> None:
    """Fill ``out`` with da, except the entries of the targets."""
    tile_gradient_kernel[num_tiles(block, config)](
        *factor_pointers(block), out_NC, factors.lse_bits_N, factors.alpha_N,
        factors.alpha_N if factors.beta_N is None else factors.beta_N, *block.shape, out_NC.stride(0), block.spec.bits,
        block.spec.soft_cap or 1.0, HAS_BETA=factors.beta_N is not None, **tile_arguments(block, config),
    )  # fmt: skip


def fill_block(out_NC: Tensor, block: LogitInputs, factors: RowFactors, config: TileConfig | None) -> None:
    """Fill one block of da, including the targets. ``config`` None runs the Hopper kernel."""
    if config is None:
        hopper.tile_gradient(out_NC, block, factors.lse_bits_N, factors.alpha_N, factors.beta_N)
    else:
        portable_tile_gradient(out_NC, block, factors, config)
    _write_targets(out_NC, block, factors.target_da_N)


def kept_gradient(share_NC: Tensor, block: LogitInputs, kept: Kept, factors: RowFactors) -> None:
    """Turn one kept block of columns into da, in place, including the targets."""
    num_columns, spec = share_NC.shape[1], block.spec
    for rows, tile_lse in _kept_rows(kept, block):
        part, share_RC = slice_rows(factors, rows), share_NC[rows]
        kept_gradient_kernel[(triton.cdiv(share_RC.shape[0], 16), triton.cdiv(num_columns, kept.tile_columns))](
            share_RC, tile_lse, kept.reference_N[rows], part.lse_bits_N, part.alpha_N,
            part.alpha_N if part.beta_N is None else part.beta_N, share_RC.shape[0], num_columns, share_RC.stride(0),
            spec.temperature / LOG2_E, spec.soft_cap or 1.0, HAS_BETA=part.beta_N is not None,
            HAS_CAP=spec.soft_cap is not None, BLOCK_T=16, BLOCK_N=kept.tile_columns, num_warps=4,
        )  # fmt: skip
    _write_targets(share_NC, block, factors.target_da_N)


def _kept_rows(kept: Kept, block: LogitInputs) -> Iterator[tuple[slice, Tensor]]:
    """Row ranges of a kept block of columns, with the lse of their tiles."""
    first_tile = block.first_column // kept.tile_columns
    for tile_lse, first in zip(kept.tile_lse, range(0, block.shape[0], kept.rows_per_block), strict=True):
        yield slice(first, first + tile_lse.shape[1]), tile_lse[first_tile:]


def kept_row_factors(kept: Kept, factors: RowFactors) -> tuple[Tensor, Tensor]:
    """Factors ``[N]`` that turn the kept probabilities of a row into da, and the da of the targets divided by them.

    The target's quotient is rounded to the input dtype (by at most one part in 512 for bf16). The factor compensates
    this, so that the da of the target is exact; the rest of the row has rounding errors of that size anyway.
    """
    offset_N = kept.reference_N - factors.lse_bits_N
    scale_N = factors.alpha_N * torch.exp2(torch.where(offset_N < -MARGIN_BITS, 0.0, offset_N))
    share_N = torch.where(scale_N == 0, 0.0, factors.target_da_N / scale_N).to(kept.shares[0].dtype).float()
    return torch.where(share_N == 0, scale_N, factors.target_da_N / share_N), share_N


def rebase_kept(share_NC: Tensor, block: LogitInputs, kept: Kept, factors: RowFactors, target_share_N: Tensor) -> None:
    """Prepare a kept block, in place, so that da is the row's factor (kept_row_factors) times the block."""
    num_columns = share_NC.shape[1]
    tiles = triton.cdiv(num_columns, kept.tile_columns)
    for rows, tile_lse in _kept_rows(kept, block):
        share_RC = share_NC[rows]
        rebase_kernel[(triton.cdiv(share_RC.shape[0], 16), triton.cdiv(tiles, 64))](
            share_RC, tile_lse, kept.reference_N[rows], factors.lse_bits_N[rows], share_RC.shape[0], num_columns,
            tiles, share_RC.stride(0), BLOCK_T=16, BLOCK_N=kept.tile_columns, TILES=64, num_warps=4,
        )  # fmt: skip
    _write_targets(share_NC, block, target_share_N)


def _write_targets(out_NC: Tensor, block: LogitInputs, values_N: Tensor) -> None:
    num_rows, num_columns = out_NC.shape
    target_gradient_kernel[(triton.cdiv(num_rows, 1024),)](
        out_NC, block.targets_N, values_N, num_rows, block.first_column, num_columns, out_NC.stride(0), BLOCK=1024
    )


def slice_rows(factors: RowFactors, rows: slice) -> RowFactors:
    parts = {name: x[rows] for name, x in vars(factors).items() if x is not None and name != "loss_scale"}
    return replace(factors, **parts)


def product_into(out: Tensor, left: Tensor, right: Tensor, *, add: bool) -> None:
    """``out (+)= left @ right``; a float32 ``out`` of bf16/fp16 factors is never rounded in between."""
    if out.dtype == left.dtype:
        torch.addmm(out, left, right, beta=1 if add else 0, out=out)
    elif out.is_cuda:
        torch.addmm(out, left, right, beta=1 if add else 0, out_dtype=torch.float32, out=out)
    elif add:
        out += matmul_accumulate(left, right)
    else:
        out.copy_(matmul_accumulate(left, right))


@dataclass(frozen=True, kw_only=True)
class _Sums:
    """Accumulators of the gradients of a group of rows: hidden and bias in float32, weight in its own dtype.

    ``add``: weight and bias already contain the contributions of earlier groups.
    """

    hidden_NH: Tensor | None
    weight_VH: Tensor | None
    bias_V: Tensor | None
    add: bool

    def add_columns(self, da_NC: Tensor, hidden_NH: Tensor, block: LogitInputs) -> None:
        """Add the contributions of a block of columns, for all rows of the group."""
        start = block.first_column
        if self.hidden_NH is not None:
            product_into(self.hidden_NH, da_NC, block.weight_VH, add=start > 0)
        if self.weight_VH is not None:
            product_into(self.weight_VH[start : start + da_NC.shape[1]], da_NC.T, hidden_NH, add=self.add)
        self.add_bias(da_NC, start)

    def add_bias(self, da_NC: Tensor, start: int) -> None:
        if self.bias_V is not None:
            self.bias_V[start : start + da_NC.shape[1]] += da_NC.sum(0, dtype=torch.float32)


def backward_blocks(
    inputs: LogitInputs, rows: RowGrads, needs: Needs, config: TileConfig | None, reduce_hidden: Reduce | None
) -> Gradients:
    """The requested gradients, one group of rows after another (a single group if probabilities were kept)."""
    if config is None:
        inputs = hopper.corrected(inputs)
    hidden_NH, weight_VH, bias_V = inputs.hidden_NH, inputs.weight_VH, inputs.bias_V
    (num_rows, vocab, hidden_size), kept = inputs.shape, rows.kept
    if kept is not None and not kept.shares:
        kept = None
    factors = row_factors(rows, inputs.spec, hidden_NH.dtype)
    d_weight_VH = None
    if needs.weight:
        memory_VH = None if kept is None else kept.grad_memory_VH
        d_weight_VH = torch.empty_like(weight_VH) if memory_VH is None else memory_VH
    d_bias_V = weight_VH.new_zeros(vocab, dtype=torch.float32) if needs.bias else None
    group_rows = num_rows if kept is not None or not needs.hidden else plan_groups(num_rows, hidden_size)
    d_hidden_NH = torch.empty_like(hidden_NH) if needs.hidden and group_rows < num_rows else None
    sum_RH = hidden_NH.new_empty(group_rows, hidden_size, dtype=torch.float32) if needs.hidden else None
    unscale = factors.lse_bits_N.new_ones(()) if factors.loss_scale is None else factors.loss_scale.reciprocal()
    for start in range(0, num_rows, group_rows):
        group = slice(start, min(start + group_rows, num_rows))
        sum_NH = None if sum_RH is None else sum_RH[: group.stop - start]
        sums = _Sums(hidden_NH=sum_NH, weight_VH=d_weight_VH, bias_V=d_bias_V, add=start > 0)
        some = slice_rows(factors, group)
        first, scale = 0, unscale
        if kept is not None:
            first, scale = _take_kept(sums, kept, inputs, some)
        if first < vocab:
            other_bytes = sum_bytes(num_rows, group_rows, hidden_size, hidden_NH.dtype.itemsize) if needs.hidden else 0
            recompute_columns(sums, first, inputs.rows(group), some, config, other_bytes)
        if sum_NH is not None:
            if reduce_hidden is not None:
                reduce_hidden(sum_NH.mul_(scale))
                scale = torch.ones_like(scale)
            if d_hidden_NH is None:
                d_hidden_NH = torch.empty_like(hidden_NH)
            torch.mul(sum_NH, scale, out=d_hidden_NH[group])
    if d_bias_V is not None and factors.loss_scale is not None:
        d_bias_V.div_(factors.loss_scale)
    bias_grad = None if d_bias_V is None or bias_V is None else d_bias_V.to(bias_V.dtype)
    return d_hidden_NH, d_weight_VH, bias_grad


def _take_kept(sums: _Sums, kept: Kept, inputs: LogitInputs, factors: RowFactors) -> tuple[int, Tensor]:
    """Add the contributions of kept columns; returns their number and the factor for hidden's sum."""
    scale, target_share_N, factor_NH = factors.lse_bits_N.new_ones(()), None, inputs.hidden_NH
    if kept.whole and factors.beta_N is None and inputs.spec.soft_cap is None and sums.bias_V is None:
        scale_N, target_share_N = kept_row_factors(kept, factors)
        scale = scale_N[:, None]
        if sums.weight_VH is not None:
            factor_NH = torch.mul(factor_NH, scale, out=torch.empty_like(factor_NH))
    first = 0
    while kept.shares:
        share_NC = kept.shares.pop(0)
        block = inputs.columns(first, first + share_NC.shape[1])
        if target_share_N is None:
            kept_gradient(share_NC, block, kept, factors)
        else:
            rebase_kept(share_NC, block, kept, factors, target_share_N)
        sums.add_columns(share_NC, factor_NH, block)
        first += share_NC.shape[1]
        del share_NC  # frees its memory for the recomputed blocks
    return first, scale


def recompute_columns(
    sums: _Sums, first_column: int, inputs: LogitInputs, factors: RowFactors, config: TileConfig | None, used_bytes: int
) -> None:
    """Add the contributions of all columns from `first_column` on, recomputed block by block.

    Rows are the inner loop, so that the group's contribution to the weight's gradient is added only once.
    """
    (num_rows, vocab, _), dtype = inputs.shape, inputs.hidden_NH.dtype
    block_rows, block_columns = plan_blocks(num_rows, vocab - first_column, dtype.itemsize, used_bytes)
    # TMA and the matrix products need a row stride of a multiple of 16 bytes, for any vocabulary.
    memory = torch.empty(block_rows, -(-block_columns // 8) * 8, dtype=dtype, device=inputs.hidden_NH.device)
    in_parts = block_rows < num_rows or factors.loss_scale is not None
    for start in range(first_column, vocab, block_columns):
        stop = min(start + block_columns, vocab)
        columns = inputs.columns(start, stop)
        sum_CH = None
        if in_parts and sums.weight_VH is not None:
            sum_CH = torch.empty_like(columns.weight_VH, dtype=torch.float32)
        for first in range(0, num_rows, block_rows):
            part = slice(first, min(first + block_rows, num_rows))
            da_RC, block = memory[: part.stop - first, : stop - start], columns.rows(part)
            fill_block(da_RC, block, slice_rows(factors, part), config)
            if not in_parts:
                sums.add_columns(da_RC, block.hidden_NH, block)
                continue
            if sums.hidden_NH is not None:
                product_into(sums.hidden_NH[part], da_RC, block.weight_VH, add=start > 0)
            if sum_CH is not None:
                product_into(sum_CH, da_RC.T, block.hidden_NH, add=first > 0)
            sums.add_bias(da_RC, start)
        if sum_CH is not None and sums.weight_VH is not None:
            if factors.loss_scale is not None:
                sum_CH.div_(factors.loss_scale)
            if sums.add:
                sum_CH += sums.weight_VH[start:stop]
            sums.weight_VH[start:stop] = sum_CH
