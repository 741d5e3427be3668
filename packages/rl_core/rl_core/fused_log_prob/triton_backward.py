"""Backward pass on the GPU: one block of ``da`` (types.py) at a time, each followed by two library matrix products.

Per block of R rows x C columns: recompute the logits and turn them into ``da`` in the tile kernel's last step (never
written as logits), correct the targets' entries from the saved float32 log-prob, then ``d_weight[C] = da^T @ hidden``
(written once; through a float32 block where several row blocks add up) and, in float32,
``d_hidden[R] += da @ weight[C]``. Columns whose probabilities were kept need no product to recompute them: one pass
turns what was kept into ``da`` in place.
"""

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from . import hopper
from .chunked import matmul_accumulate
from .tiles import TileConfig, plan_blocks
from .triton_forward import LOG2_E, tile_arguments
from .triton_kernels import kept_gradient_kernel, target_gradient_kernel, tile_gradient_kernel
from .types import Gradients, Kept, LogitSpec, Needs, RowGrads

FP16_PEAK = 2.0**14  # what the largest possible |da| is scaled to in fp16, whose smallest normal number is 2**-14


@dataclass(frozen=True, kw_only=True)
class RowFactors:
    """``da = 2^(scale u - lse) (alpha + beta u) (1 - (u / cap)^2)`` times ``loss_scale``, and the target's own value.

    ``loss_scale`` is None except for fp16, whose range the gradients of a mean over many tokens would leave.
    """

    lse_bits_N: Tensor
    alpha_N: Tensor
    beta_N: Tensor | None
    target_da_N: Tensor
    loss_scale: Tensor | None


def row_factors(rows: RowGrads, spec: LogitSpec, dtype: torch.dtype) -> RowFactors:
    """Everything about a row that the tile kernel needs, from the incoming gradients; no wait for the device."""
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


def portable_tile_gradient(
    out_NC: Tensor, hidden_NH: Tensor, weight_CH: Tensor, bias_C: Tensor | None, factors: RowFactors, spec: LogitSpec,
    config: TileConfig,
) -> None:  # fmt: skip
    """Fill ``out`` with da, targets' own entries aside."""
    (num_rows, hidden_size), num_columns = hidden_NH.shape, weight_CH.shape[0]
    tile_gradient_kernel[(triton.cdiv(num_rows, config.block_m) * triton.cdiv(num_columns, config.block_n),)](
        hidden_NH, weight_CH, weight_CH if bias_C is None else bias_C, out_NC, factors.lse_bits_N, factors.alpha_N,
        factors.alpha_N if factors.beta_N is None else factors.beta_N, num_rows, num_columns, hidden_size,
        out_NC.stride(0), LOG2_E / spec.temperature, spec.soft_cap or 1.0, HAS_BETA=factors.beta_N is not None,
        **tile_arguments(hidden_NH, bias_C, spec, config),
    )  # fmt: skip


def fill_block(
    out_NC: Tensor, hidden_NH: Tensor, weight_CH: Tensor, bias_C: Tensor | None, targets_N: Tensor, first_column: int,
    factors: RowFactors, spec: LogitSpec, config: TileConfig | None,
) -> None:  # fmt: skip
    """One block of da, complete. ``config`` None runs the Hopper kernel."""
    if config is None:
        scale = LOG2_E / spec.temperature
        hopper.tile_gradient(out_NC, hidden_NH, weight_CH, factors.lse_bits_N, factors.alpha_N, factors.beta_N, scale)
    else:
        portable_tile_gradient(out_NC, hidden_NH, weight_CH, bias_C, factors, spec, config)
    _write_targets(out_NC, targets_N, first_column, factors)


def fill_kept(
    share_NC: Tensor, first_column: int, kept: Kept, targets_N: Tensor, factors: RowFactors, spec: LogitSpec
) -> None:
    """da of one kept block of columns, in place of what was kept."""
    num_columns = share_NC.shape[1]
    first_tile, num_tiles = first_column // kept.tile_columns, triton.cdiv(num_columns, kept.tile_columns)
    for tile_lse, first in zip(kept.tile_lse, range(0, share_NC.shape[0], kept.rows_per_block), strict=True):
        num_rows = tile_lse.shape[1]
        part = slice_rows(factors, first, first + num_rows)
        share = share_NC[first : first + num_rows]
        kept_gradient_kernel[(triton.cdiv(num_rows, 16), num_tiles)](
            share, tile_lse[first_tile:], part.lse_bits_N, part.alpha_N,
            part.alpha_N if part.beta_N is None else part.beta_N, num_rows, num_columns, share.stride(0),
            spec.temperature / LOG2_E, spec.soft_cap or 1.0, HAS_BETA=part.beta_N is not None,
            HAS_CAP=spec.soft_cap is not None, BLOCK_T=16, BLOCK_N=kept.tile_columns, num_warps=4,
        )  # fmt: skip
    _write_targets(share_NC, targets_N, first_column, factors)


def _write_targets(out_NC: Tensor, targets_N: Tensor, first_column: int, factors: RowFactors) -> None:
    num_rows, num_columns = out_NC.shape
    target_gradient_kernel[(triton.cdiv(num_rows, 1024),)](
        out_NC, targets_N, factors.target_da_N, num_rows, first_column, num_columns, out_NC.stride(0), BLOCK=1024
    )


def slice_rows(factors: RowFactors, start: int, stop: int) -> RowFactors:
    return RowFactors(
        lse_bits_N=factors.lse_bits_N[start:stop],
        alpha_N=factors.alpha_N[start:stop],
        beta_N=None if factors.beta_N is None else factors.beta_N[start:stop],
        target_da_N=factors.target_da_N[start:stop],
        loss_scale=factors.loss_scale,
    )


def product_into(out: Tensor, left: Tensor, right: Tensor, *, add: bool) -> None:
    """``out (+)= left @ right``; a float32 ``out`` of bf16/fp16 factors is never rounded on the way."""
    if out.dtype == left.dtype:
        torch.addmm(out, left, right, beta=1 if add else 0, out=out)
    elif out.is_cuda:
        torch.addmm(out, left, right, beta=1 if add else 0, out_dtype=torch.float32, out=out)
    elif add:
        out += matmul_accumulate(left, right)
    else:
        out.copy_(matmul_accumulate(left, right))


@dataclass(kw_only=True)
class _Sums:
    """Where the gradients gather: hidden and bias in float32, weight in its own dtype."""

    hidden_NH: Tensor | None
    weight_VH: Tensor | None
    bias_V: Tensor | None

    def add_columns(self, da_NC: Tensor, hidden_NH: Tensor, weight_CH: Tensor, start: int) -> None:
        """Everything a block of columns of all rows gives; it is the only one for its rows of the weight."""
        columns = slice(start, start + da_NC.shape[1])
        if self.hidden_NH is not None:
            product_into(self.hidden_NH, da_NC, weight_CH, add=start > 0)
        if self.weight_VH is not None:
            product_into(self.weight_VH[columns], da_NC.T, hidden_NH, add=False)
        if self.bias_V is not None:
            self.bias_V[columns] = da_NC.sum(0, dtype=torch.float32)


def backward_blocks(
    hidden_NH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, targets_N: Tensor, spec: LogitSpec, rows: RowGrads,
    needs: Needs, config: TileConfig | None,
) -> Gradients:  # fmt: skip
    """All gradients asked for: from what was kept, then the rest one block of columns after another."""
    if config is None:
        spec = hopper.corrected(spec, hidden_NH.shape[1])
    factors = row_factors(rows, spec, hidden_NH.dtype)
    d_weight_VH = None
    if needs.weight:
        lent_VH = None if rows.kept is None else rows.kept.lent_VH
        d_weight_VH = torch.empty_like(weight_VH) if lent_VH is None else lent_VH
    sums = _Sums(
        hidden_NH=torch.empty_like(hidden_NH, dtype=torch.float32) if needs.hidden else None,
        weight_VH=d_weight_VH,
        bias_V=weight_VH.new_zeros(weight_VH.shape[0], dtype=torch.float32) if needs.bias else None,
    )
    first = 0
    while rows.kept is not None and rows.kept.shares:
        da_NC = rows.kept.shares.pop(0)
        fill_kept(da_NC, first, rows.kept, targets_N, factors, spec)
        sums.add_columns(da_NC, hidden_NH, weight_VH[first : first + da_NC.shape[1]], first)
        first += da_NC.shape[1]
        del da_NC  # its memory goes to the blocks below
    if first < weight_VH.shape[0]:
        recompute_columns(sums, first, hidden_NH, weight_VH, bias_V, targets_N, spec, factors, config)
    if factors.loss_scale is not None:
        for total in (sums.hidden_NH, sums.bias_V):
            if total is not None:
                total.div_(factors.loss_scale)
    bias_grad = None if sums.bias_V is None or bias_V is None else sums.bias_V.to(bias_V.dtype)
    return Gradients(hidden_NH=sums.hidden_NH, weight_VH=sums.weight_VH, bias_V=bias_grad)


def recompute_columns(
    sums: _Sums, first_column: int, hidden_NH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, targets_N: Tensor,
    spec: LogitSpec, factors: RowFactors, config: TileConfig | None,
) -> None:  # fmt: skip
    """Columns outside, rows inside, so that each piece of the weight's gradient is finished in one go."""
    (num_rows, hidden_size), vocab, dtype = hidden_NH.shape, weight_VH.shape[0], hidden_NH.dtype
    with_hidden = sums.hidden_NH is not None
    block_rows, block_columns = plan_blocks(num_rows, vocab - first_column, hidden_size, dtype.itemsize, with_hidden)
    # Row stride a multiple of 16 bytes whatever the vocabulary: the copy engine and the products want it.
    block = torch.empty(block_rows, -(-block_columns // 8) * 8, dtype=dtype, device=hidden_NH.device)
    in_parts = block_rows < num_rows or factors.loss_scale is not None
    for start in range(first_column, vocab, block_columns):
        stop = min(start + block_columns, vocab)
        weight_CH, bias_C = weight_VH[start:stop], None if bias_V is None else bias_V[start:stop]
        sum_CH = None
        if in_parts and sums.weight_VH is not None:
            sum_CH = torch.empty_like(weight_CH, dtype=torch.float32)
        for first in range(0, num_rows, block_rows):
            part = slice(first, min(first + block_rows, num_rows))
            da_RC = block[: part.stop - first, : stop - start]
            rows_RH, some = hidden_NH[part], slice_rows(factors, first, part.stop)
            fill_block(da_RC, rows_RH, weight_CH, bias_C, targets_N[part], start, some, spec, config)
            if not in_parts:
                sums.add_columns(da_RC, rows_RH, weight_CH, start)
                continue
            if sums.hidden_NH is not None:
                product_into(sums.hidden_NH[part], da_RC, weight_CH, add=start > 0)
            if sum_CH is not None:
                product_into(sum_CH, da_RC.T, rows_RH, add=first > 0)
            if sums.bias_V is not None:
                sums.bias_V[start:stop] += da_RC.sum(0, dtype=torch.float32)
        if sum_CH is not None and sums.weight_VH is not None:
            sums.weight_VH[start:stop] = sum_CH if factors.loss_scale is None else sum_CH.div_(factors.loss_scale)
