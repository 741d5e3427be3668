"""`linear_log_prob`: argument checks, removal of ignored tokens, choice of the backend, and the autograd function.

Shapes: ``T`` tokens, ``N`` tokens that are not ignored, ``H`` hidden size, ``V`` vocabulary rows on this rank.
"""

import functools
import math
import os
from dataclasses import replace
from importlib.util import find_spec
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import ArgumentError, ShapeError, require
from .chunked import ChunkedBackend, accumulation_dtype
from .reference import reference_log_prob
from .types import KEEP_NOTHING, Backend, Keeping, LogitInputs, LogitSpec, Needs, RowGrads, RowStats

BackendName = Literal["auto", "triton", "chunked", "reference"]

# Logit of a token with a bias of -inf. Small enough for every dtype but fp16, also after a division by the temperature.
_EXCLUDED = -1.0e20


def linear_log_prob(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float = 1.0,
    *,
    bias: Tensor | None = None,
    soft_cap: float | None = None,
    ignore_index: int | None = None,
    backend: BackendName = "auto",
    deterministic: bool | None = None,
    keep_bytes: int | None = None,
    group: dist.ProcessGroup | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probability of each target token and entropy of its distribution, without materializing ``[T, V]`` logits.

    ``z = soft_cap(hidden @ weight.T + bias) / temperature``; ``log_probs = z[target] - logsumexp(z)``;
    ``entropy = logsumexp(z) - sum(softmax(z) * z)``. Both outputs are differentiable with respect to ``hidden``,
    ``weight`` and ``bias``; no gradient is filtered or dropped. The forward pass keeps three numbers per token; the
    backward pass recomputes logits one block of vocabulary at a time.
    Source: the online softmax of Milakov and Gimelshein 2018, arXiv:1805.02867; block recomputation as in Wijmans et
    al. 2024, "Cut your losses in large-vocabulary language models", arXiv:2411.09009.

    Args:
        hidden: ``[T, H]``, bf16, fp16, fp32 or fp64.
        weight: ``[V, H]``, same dtype and device; with ``group`` this rank's rows, equally many on every rank. Autograd
            saves this tensor itself, so a parameter that is partitioned between forward and backward (ZeRO-3) works.
        targets: ``[T]`` int64, token ids in the whole vocabulary. A target out of range raises on a CPU and gives NaN
            on a GPU (where a check would have to synchronize).
        temperature: positive divisor of the logits.
        bias: optional ``[V]``. -inf excludes a token: probability 0, log-prob -inf, no gradient. Not all may be -inf.
        soft_cap: optional positive cap, ``cap * tanh(logit / cap)`` before the temperature.
        ignore_index: targets equal to it are removed before the computation and get log-prob 0, entropy 0 and no
            gradient. None (the default) ignores no target and avoids a synchronization.
        backend: "auto" is Triton on CUDA for bf16 and fp16, and "chunked" otherwise; "reference" materializes all
            logits and is the oracle of the tests.
        deterministic: True fixes the tile shapes of the kernels, so that two processes give the same bits; None follows
            ``torch.are_deterministic_algorithms_enabled()``. No backend uses atomics, so results repeat within a
            process in any case.
        keep_bytes: trades memory for speed. Up to this many bytes of probabilities stay in memory between forward and
            backward, and the backward pass recomputes only the others. ``T * V * 2`` bytes (bf16) keep all of them and
            save a quarter of the time (the backward pass then also copies ``hidden``). 0 keeps nothing. None (the
            default) limits the working memory beyond the gradients to 0.5 GiB at the peak: it keeps all probabilities
            if they fit; otherwise as many as fit into 0.5 GiB plus the memory of ``weight``'s gradient, which is then
            allocated in the forward pass. Pass 0 if many forward passes precede one backward pass. Used by the Triton
            backend for bf16 and fp32.
        group: vocabulary-parallel process group. Every rank passes the same hidden and targets and gets the same
            results; ``hidden.grad`` is summed over the group.

    Returns:
        ``(log_probs, entropy)``, both ``[T]`` float32 (float64 for float64 inputs).

    Raises:
        ShapeError, ArgumentError: for a shape, dtype, device or number that is not allowed.
    """
    _check(hidden, weight, targets, temperature, bias, soft_cap, backend)
    require(keep_bytes is None or keep_bytes >= 0, "keep_bytes", keep_bytes, "None, or 0 or more")
    spec = LogitSpec(temperature=float(temperature), soft_cap=None if soft_cap is None else float(soft_cap))
    bias = None if bias is None else _finite(bias)
    inputs = LogitInputs(hidden_NH=hidden, weight_VH=weight, bias_V=bias, targets_N=targets, spec=spec)
    chosen = _choose_backend(backend, hidden, deterministic)
    kept_N = None if ignore_index is None else (targets != ignore_index).nonzero()[:, 0]
    if kept_N is None or kept_N.numel() == targets.numel():
        return _compute(inputs, chosen, keep_bytes, group)
    inputs = replace(inputs, hidden_NH=hidden[kept_N], targets_N=targets[kept_N])
    results = _compute(inputs, chosen, keep_bytes, group)
    blank_T = results[0].new_zeros(targets.shape)
    return blank_T.index_put((kept_N,), results[0]), blank_T.index_put((kept_N,), results[1])


def _compute(
    inputs: LogitInputs, backend: Backend | None, keep_bytes: int | None, group: dist.ProcessGroup | None
) -> tuple[Tensor, Tensor]:
    """`linear_log_prob` without ignored tokens; `backend` None is the reference."""
    weight_VH, bias_V, targets_N = inputs.weight_VH, inputs.bias_V, inputs.targets_N
    num_rows = weight_VH.shape[0] * (1 if group is None else dist.get_world_size(group))
    outside_N = (targets_N < 0) | (targets_N >= num_rows)
    if not targets_N.is_cuda and bool(outside_N.any()):
        worst = targets_N[outside_N][0].item()
        remedy = "use ignore_index for tokens to ignore"
        raise ArgumentError(field="targets", value=worst, allowed=f"0 to {num_rows - 1}", remedy=remedy)
    if backend is None:
        require(group is None, "backend", "reference", "auto, triton or chunked with a group")
        log_prob_N, entropy_N = reference_log_prob(inputs)
    else:
        # Keep probabilities only if a backward pass can follow.
        factors = (inputs.hidden_NH, weight_VH, bias_V)
        keeps = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in factors)
        keeping = Keeping(own_bytes=keep_bytes, use_grad_memory=weight_VH.requires_grad) if keeps else KEEP_NOTHING
        log_prob_N, entropy_N = _LinearLogProb.apply(*factors, targets_N, inputs.spec, backend, group, keeping)
        if targets_N.is_cuda:
            log_prob_N = torch.where(outside_N, torch.nan, log_prob_N)
    if bias_V is not None:  # -inf for targets that a bias of -inf excludes
        excluded_N = log_prob_N.detach() < 0.1 * _EXCLUDED / inputs.spec.temperature
        log_prob_N = torch.where(excluded_N, -torch.inf, log_prob_N)
    return log_prob_N, entropy_N


def _finite(bias_V: Tensor) -> Tensor:
    """The bias with -inf replaced by a logit whose probability is exactly 0, as 0 times it is, and not NaN."""
    return (bias_V.float() if bias_V.dtype == torch.float16 else bias_V).clamp_min(_EXCLUDED)


def _choose_backend(name: BackendName, hidden: Tensor, deterministic: bool | None) -> Backend | None:
    """The backend object; None for the reference."""
    if name == "reference":
        return None
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    has_triton = find_spec("triton") is not None
    if name == "triton" and not has_triton:
        raise ArgumentError("the package is not installed", field="backend", value="triton", allowed="auto or chunked")
    if name == "triton" and not hidden.is_cuda and os.environ.get("TRITON_INTERPRET") != "1":
        raise ArgumentError(
            f"the tensors are on {hidden.device}",
            field="backend",
            value="triton",
            allowed="auto or chunked without a GPU",
            remedy="TRITON_INTERPRET=1 interprets the kernels",
        )
    fits = hidden.is_cuda and hidden.dtype in (torch.bfloat16, torch.float16) and hidden.shape[1] % 16 == 0
    # Triton's tiles do not fit into the shared memory of GPUs before Ampere.
    fits = fits and torch.cuda.get_device_capability(hidden.device) >= (8, 0)
    if name == "triton" or (name == "auto" and has_triton and fits):
        from .triton_backend import TritonBackend  # imported here: importing the package must not import Triton

        return TritonBackend(deterministic=deterministic)
    return ChunkedBackend()


class _LinearLogProb(torch.autograd.Function):
    """Saves the inputs themselves (never a view or copy of the weight) and three numbers per token."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        targets_N: Tensor,
        spec: LogitSpec,
        backend: Backend,
        group: dist.ProcessGroup | None,
        keeping: Keeping,
    ) -> tuple[Tensor, Tensor]:
        rows_N = targets_N if group is None else _local_targets(targets_N, weight_VH.shape[0], group)
        if rows_N.numel() == 0:
            blank_N = hidden_NH.new_zeros(0, dtype=accumulation_dtype(hidden_NH.dtype))
            stats = RowStats(lse_N=blank_N, mean_z_N=blank_N, target_z_N=blank_N)
        else:
            with torch.autocast(hidden_NH.device.type, enabled=False):
                stats = backend.forward(_contiguous(hidden_NH, weight_VH, bias_V, rows_N, spec), keeping)
        if group is not None:
            stats = _reduce_stats(stats, group)
        log_prob_N = (stats.target_z_N - stats.lse_N).clamp_max(0)  # rounding could make it positive
        ctx.save_for_backward(hidden_NH, weight_VH, bias_V, rows_N, stats.lse_N, stats.mean_z_N, log_prob_N)
        ctx.spec, ctx.backend, ctx.group, ctx.kept = spec, backend, group, stats.kept
        ctx.set_materialize_grads(False)
        # A copy, because the caller may change an output in place.
        return log_prob_N.clone(), stats.lse_N - stats.mean_z_N

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_log_prob_N: Tensor | None, grad_entropy_N: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden_NH, weight_VH, bias_V, rows_N, lse_N, mean_z_N, log_prob_N = ctx.saved_tensors
        if grad_log_prob_N is None:
            grad_log_prob_N = torch.zeros_like(lse_N)
        rows = RowGrads(
            lse_N=lse_N,
            mean_z_N=mean_z_N,
            log_prob_N=log_prob_N,
            grad_log_prob_N=grad_log_prob_N.contiguous(),
            grad_entropy_N=None if grad_entropy_N is None else grad_entropy_N.contiguous(),
            kept=ctx.kept,
        )
        ctx.kept = None  # the backward pass overwrites it; a second one through the same graph recomputes everything
        if rows_N.numel() == 0:  # zero gradients for an empty micro batch, so that all ranks run the same collectives
            blank = [None if x is None else torch.zeros_like(x) for x in (hidden_NH, weight_VH, bias_V)]
            return (*blank, None, None, None, None, None)
        with torch.autocast(hidden_NH.device.type, enabled=False):
            inputs = _contiguous(hidden_NH, weight_VH, bias_V, rows_N, ctx.spec)
            reduce = None if ctx.group is None else functools.partial(dist.all_reduce, group=ctx.group)
            grads = ctx.backend.backward(inputs, rows, Needs(*ctx.needs_input_grad[:3]), reduce)
        return (*grads, None, None, None, None, None)


def _local_targets(targets_N: Tensor, num_local_rows: int, group: dist.ProcessGroup) -> Tensor:
    """Targets relative to this rank's first row, -1 where another rank holds them. All ranks hold equally many rows."""
    local_N = targets_N - dist.get_rank(group) * num_local_rows
    return torch.where((local_N >= 0) & (local_N < num_local_rows), local_N, -1)


def _reduce_stats(stats: RowStats, group: dist.ProcessGroup) -> RowStats:
    """Statistics over the whole vocabulary from those of each rank: two all-reduces, of ``[N]`` and ``[3, N]``."""
    peak_N = stats.lse_N.clone()
    dist.all_reduce(peak_N, op=dist.ReduceOp.MAX, group=group)
    share_N = torch.exp(stats.lse_N - peak_N)
    sums_3N = torch.stack((share_N, share_N * stats.mean_z_N, stats.target_z_N))
    dist.all_reduce(sums_3N, group=group)
    return replace(stats, lse_N=peak_N + sums_3N[0].log(), mean_z_N=sums_3N[1] / sums_3N[0], target_z_N=sums_3N[2])


def _contiguous(
    hidden_NH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, rows_N: Tensor, spec: LogitSpec
) -> LogitInputs:
    hidden_NH, weight_VH = hidden_NH.contiguous(), weight_VH.contiguous()
    return LogitInputs(hidden_NH=hidden_NH, weight_VH=weight_VH, bias_V=bias_V, targets_N=rows_N, spec=spec)


def _check(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float,
    bias: Tensor | None,
    soft_cap: float | None,
    backend: str,
) -> None:
    if hidden.ndim != 2 or weight.ndim != 2 or hidden.shape[1] != weight.shape[1] or weight.shape[0] == 0:
        shapes = (tuple(hidden.shape), tuple(weight.shape))
        raise ShapeError(field="hidden, weight", value=shapes, allowed="[T, H] and [V, H] with V > 0")
    if targets.shape != hidden.shape[:1] or targets.dtype != torch.int64:
        given = (*targets.shape, str(targets.dtype))
        raise ShapeError(field="targets", value=given, allowed=f"[{hidden.shape[0]}] torch.int64")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ShapeError(field="bias", value=tuple(bias.shape), allowed=f"[{weight.shape[0]}]")
    floating = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
    require(hidden.dtype in floating, "hidden", hidden.dtype, "bfloat16, float16, float32 or float64")
    require(weight.dtype == hidden.dtype, "weight", weight.dtype, f"the dtype of hidden, {hidden.dtype}")
    devices = [str(x.device) for x in (hidden, targets, weight, bias) if x is not None]
    require(len(set(devices)) == 1, "devices", devices, "one device for all")
    # Greedy decoding has no log-prob.
    require(math.isfinite(temperature) and temperature > 0, "temperature", temperature, "a positive number")
    allowed_cap = soft_cap is None or (math.isfinite(soft_cap) and soft_cap > 0)
    require(allowed_cap, "soft_cap", soft_cap, "None, or a positive number")
    require(backend in get_args(BackendName), "backend", backend, ", ".join(get_args(BackendName)))
