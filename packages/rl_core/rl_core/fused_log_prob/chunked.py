"""Chunked backend in plain torch, one block of vocabulary columns at a time: CPUs, float32/float64, no Triton.

On a CPU everything is computed in float32 (float64 for float64 inputs). On a GPU bf16/fp16 products run on the tensor
cores with float32 accumulation and float32 results, like the Triton backend.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from .types import Gradients, Keeping, LogitInputs, Needs, Reduce, RowGrads, RowStats

CHUNK_BYTES = 64 * 2**20  # size of one [N, C] block of logits in the accumulation dtype
MIN_CHUNK = 256  # columns; narrower blocks waste the matrix product


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def matmul_accumulate(left: Tensor, right: Tensor) -> Tensor:
    """``left @ right`` in the accumulation dtype, never rounded to bf16/fp16 in between."""
    if left.is_cuda and left.dtype in (torch.bfloat16, torch.float16):
        return torch.mm(left, right, out_dtype=torch.float32)
    dtype = accumulation_dtype(left.dtype)
    return left.to(dtype) @ right.to(dtype)


def _blocks(inputs: LogitInputs) -> Iterator[LogitInputs]:
    """Blocks of equally many columns (the last one may be narrower)."""
    num_rows, num_columns, _ = inputs.shape
    itemsize = accumulation_dtype(inputs.hidden_NH.dtype).itemsize
    width = max(MIN_CHUNK, CHUNK_BYTES // max(1, num_rows * itemsize))
    for start in range(0, num_columns, width):
        yield inputs.columns(start, min(start + width, num_columns))


def _capped_logits(block: LogitInputs) -> Tensor:
    """``u`` of types.py for one block of columns, in a new tensor that the caller may change in place."""
    logits_NC = matmul_accumulate(block.hidden_NH, block.weight_VH.T)
    if block.bias_V is not None:
        logits_NC += block.bias_V.to(logits_NC.dtype)
    if block.spec.soft_cap is not None:
        logits_NC.div_(block.spec.soft_cap).tanh_().mul_(block.spec.soft_cap)
    return logits_NC


def _target_columns(block: LogitInputs) -> tuple[Tensor, Tensor]:
    """True if each target is in the block, and its column there: [N] and [N, 1]; any column if it is elsewhere."""
    local_N, width = block.targets_N - block.first_column, block.weight_VH.shape[0]
    return (local_N >= 0) & (local_N < width), local_N.clamp(0, width - 1)[:, None]


class ChunkedBackend:
    """See :class:`rl_core.fused_log_prob.types.Backend`."""

    def forward(self, inputs: LogitInputs, keeping: Keeping) -> RowStats:
        """Online softmax over column blocks: running maximum, sum of exponentials and sum of ``z * exp``."""
        del keeping  # this backend always recomputes
        hidden_NH = inputs.hidden_NH
        num_rows, dtype = hidden_NH.shape[0], accumulation_dtype(hidden_NH.dtype)
        peak_N = hidden_NH.new_full((num_rows,), -torch.inf, dtype=dtype)
        sum_N, weighted_N, target_z_N = (hidden_NH.new_zeros(num_rows, dtype=dtype) for _ in range(3))
        for block in _blocks(inputs):
            z_NC = _capped_logits(block).div_(block.spec.temperature)
            inside_N, column_N1 = _target_columns(block)
            target_z_N = torch.where(inside_N, z_NC.gather(1, column_N1)[:, 0], target_z_N)
            new_peak_N = torch.maximum(peak_N, z_NC.amax(1))
            shrink_N = torch.exp(peak_N - new_peak_N)
            exp_NC = torch.exp(z_NC - new_peak_N[:, None])
            sum_N = sum_N * shrink_N + exp_NC.sum(1)
            weighted_N = weighted_N * shrink_N + exp_NC.mul_(z_NC).sum(1)
            peak_N = new_peak_N
        return RowStats(lse_N=peak_N + sum_N.log(), mean_z_N=weighted_N / sum_N, target_z_N=target_z_N)

    def backward(self, inputs: LogitInputs, rows: RowGrads, needs: Needs, reduce_hidden: Reduce | None) -> Gradients:
        """Recompute each column block, turn it into ``da`` (types.py) and take the two products with it."""
        hidden_NH, weight_VH, bias_V = inputs.hidden_NH, inputs.weight_VH, inputs.bias_V
        dtype = accumulation_dtype(hidden_NH.dtype)
        # On a GPU both products take bf16 factors, so that they run on the tensor cores.
        factor_dtype = torch.bfloat16 if hidden_NH.is_cuda and hidden_NH.dtype == torch.bfloat16 else dtype
        hidden_factor_NH = hidden_NH.to(factor_dtype)
        d_hidden_NH = torch.zeros_like(hidden_NH, dtype=dtype) if needs.hidden else None
        d_weight_VH = torch.empty_like(weight_VH) if needs.weight else None
        d_bias_V = torch.empty_like(bias_V) if needs.bias and bias_V is not None else None
        for block in _blocks(inputs):
            columns = slice(block.first_column, block.first_column + block.weight_VH.shape[0])
            da_NC = _raw_logit_gradient(block, rows)
            if d_bias_V is not None:
                d_bias_V[columns] = da_NC.sum(0)
            da_NC = da_NC.to(factor_dtype)
            if d_hidden_NH is not None:
                d_hidden_NH += matmul_accumulate(da_NC, block.weight_VH.to(factor_dtype))
            if d_weight_VH is not None:
                d_weight_VH[columns] = matmul_accumulate(da_NC.T, hidden_factor_NH)
        if d_hidden_NH is not None:
            if reduce_hidden is not None:
                reduce_hidden(d_hidden_NH)
            d_hidden_NH = d_hidden_NH.to(hidden_NH.dtype)
        return d_hidden_NH, d_weight_VH, d_bias_V


def _raw_logit_gradient(block: LogitInputs, rows: RowGrads) -> Tensor:
    """``da`` of types.py for one block of columns."""
    u_NC, spec = _capped_logits(block), block.spec
    z_NC = u_NC / spec.temperature
    p_NC = torch.exp(z_NC - rows.lse_N[:, None])
    if rows.grad_entropy_N is None:
        dz_NC = p_NC.mul_(-rows.grad_log_prob_N[:, None])
    else:
        slope_NC = z_NC.sub_(rows.mean_z_N[:, None]).mul_(rows.grad_entropy_N[:, None])
        dz_NC = p_NC.mul_(slope_NC.add_(rows.grad_log_prob_N[:, None]).neg_())
    inside_N, column_N1 = _target_columns(block)
    dz_NC.scatter_add_(1, column_N1, torch.where(inside_N, rows.grad_log_prob_N, 0.0)[:, None])
    if spec.soft_cap is not None:
        dz_NC.mul_(1.0 - (u_NC / spec.soft_cap).square_())
    return dz_NC.div_(spec.temperature)
