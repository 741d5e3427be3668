"""`linear_divergence`: the divergence to a teacher from hidden states, without logits of all positions at once.

Shapes: K positions, H and G hidden sizes of student and teacher, V vocabulary rows, C tokens of a top-k; N positions of
one chunk.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..errors import ShapeError, require
from ..fused_log_prob.chunked import accumulation_dtype, matmul_accumulate
from ..fused_log_prob.reference import all_log_probs
from ..fused_log_prob.types import LogitSpec
from ..options import DivergenceKind
from .divergence import check_divergence, divergence, full_divergence

CHUNK_BYTES = 128 * 2**20
"""Size of the logits [N, V] of a chunk; about six tensors of this size are alive at the peak."""


@dataclass(frozen=True, kw_only=True, eq=False)
class TeacherTopK:
    """Some tokens of each position with the teacher's log-probs, such as its most likely ones."""

    ids_KC: Tensor
    """int64 [K, C]; the tokens of a position differ."""
    log_probs_KC: Tensor
    """[K, C], normalized over the teacher's whole vocabulary."""


@dataclass(frozen=True, kw_only=True, eq=False)
class TeacherHead:
    """Inputs of the teacher's whole distribution at each position. Rows of its head beyond the student's V are unused,
    because heads of one vocabulary are padded to different sizes."""

    hidden_KG: Tensor
    weight_VG: Tensor
    bias_V: Tensor | None = None
    soft_cap: float | None = None


@dataclass(frozen=True, kw_only=True)
class _Spec(LogitSpec):
    """Settings of the student's logits and of the divergence."""

    kind: DivergenceKind
    beta: float
    chunk_bytes: int


def linear_divergence(
    hidden: Tensor,
    weight: Tensor,
    teacher: TeacherTopK | TeacherHead,
    temperature: float = 1.0,
    *,
    kind: DivergenceKind = "reverse",
    beta: float = 0.5,
    bias: Tensor | None = None,
    soft_cap: float | None = None,
    chunk_bytes: int = CHUNK_BYTES,
) -> Tensor:
    """`divergence` of each position, [K], differentiable in `hidden`, `weight` and `bias` of the student's head.

    The logits are computed for a chunk of positions at a time, in float32, and again in the backward pass. Memory
    beyond the gradients is some six chunks, whatever K is.

    Args:
        hidden: ``[K, H]``, the student's hidden states.
        weight: ``[V, H]``, its head. Autograd saves this tensor itself, as for `linear_log_prob` (ZeRO-3).
        teacher: its most likely tokens, or its hidden states and head for the whole vocabulary.
        temperature: divisor of the student's logits, and of the teacher's if it has a head.
        kind: see `divergence`; also `beta`.
        bias: optional ``[V]`` of the student's head.
        soft_cap: optional cap of the student's logits, as for `linear_log_prob`.
        chunk_bytes: size of a chunk's logits.

    Returns:
        ``[K]`` float32 (float64 for float64 inputs), in nats.

    Raises:
        ValueError: an unknown kind, or a number out of range.
        ShapeError: positions or hidden sizes that do not match, or a teacher's head with fewer than V rows.
    """
    check_divergence(kind, beta)
    require(temperature > 0, "temperature", temperature, "above 0")
    _check_shapes(hidden, weight, teacher)
    spec = _Spec(kind=kind, beta=beta, temperature=temperature, soft_cap=soft_cap, chunk_bytes=chunk_bytes)
    result: Tensor = _LinearDivergence.apply(hidden, weight, bias, teacher, spec)
    return result


class _LinearDivergence(torch.autograd.Function):
    """Saves the inputs only. The gradient with respect to a chunk's logits is that of autograd."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_KH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        teacher: TeacherTopK | TeacherHead,
        spec: _Spec,
    ) -> Tensor:
        ctx.save_for_backward(hidden_KH, weight_VH, bias_V)
        ctx.teacher, ctx.spec = teacher, spec
        result_K = hidden_KH.new_zeros(hidden_KH.shape[0], dtype=accumulation_dtype(hidden_KH.dtype))
        for rows in _chunks(hidden_KH, weight_VH, spec):
            logits_NV = matmul_accumulate(hidden_KH[rows], weight_VH.T)
            result_K[rows] = _of_chunk(logits_NV, bias_V, teacher, rows, spec)
        return result_K

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_K: Tensor) -> tuple[Tensor | None, ...]:
        hidden_KH, weight_VH, bias_V = ctx.saved_tensors
        dtype = accumulation_dtype(hidden_KH.dtype)
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        d_hidden_KH = torch.zeros_like(hidden_KH) if needs_hidden else None
        d_weight_VH = torch.zeros_like(weight_VH, dtype=dtype) if needs_weight else None
        bias = None if bias_V is None else bias_V.detach().to(dtype).requires_grad_(needs_bias)
        for rows in _chunks(hidden_KH, weight_VH, ctx.spec):
            logits_NV = matmul_accumulate(hidden_KH[rows], weight_VH.T).requires_grad_()
            with torch.enable_grad():
                result_N = _of_chunk(logits_NV, bias, ctx.teacher, rows, ctx.spec)
            result_N.backward(grad_K[rows])
            d_logits_NV = logits_NV.grad
            assert d_logits_NV is not None
            factor_NV = d_logits_NV.to(weight_VH.dtype) if weight_VH.is_cuda else d_logits_NV
            if d_hidden_KH is not None:
                d_hidden_KH[rows] = matmul_accumulate(factor_NV, weight_VH).to(hidden_KH.dtype)
            if d_weight_VH is not None:
                d_weight_VH += matmul_accumulate(factor_NV.T, hidden_KH[rows])
        d_bias_V = None
        if bias is not None and needs_bias:  # without positions no chunk has set the gradient
            d_bias_V = torch.zeros_like(bias_V) if bias.grad is None else bias.grad.to(bias_V.dtype)
        d_weight = None if d_weight_VH is None else d_weight_VH.to(weight_VH.dtype)
        return d_hidden_KH, d_weight, d_bias_V, None, None


def _of_chunk(
    logits_NV: Tensor, bias_V: Tensor | None, teacher: TeacherTopK | TeacherHead, rows: slice, spec: _Spec
) -> Tensor:
    """Divergence [N] of the positions `rows`, given the products of the student's hidden states and head."""
    student_NV = all_log_probs(logits_NV, bias_V, spec)
    if isinstance(teacher, TeacherTopK):
        student_NC = student_NV.gather(1, teacher.ids_KC[rows])
        return divergence(student_NC, teacher.log_probs_KC[rows], kind=spec.kind, beta=spec.beta)
    size = logits_NV.shape[1]
    with torch.no_grad():
        raw_NV = matmul_accumulate(teacher.hidden_KG[rows], teacher.weight_VG[:size].T).to(logits_NV.dtype)
        bias = None if teacher.bias_V is None else teacher.bias_V[:size]
        teacher_NV = all_log_probs(raw_NV, bias, replace(spec, soft_cap=teacher.soft_cap))
    return full_divergence(student_NV, teacher_NV, spec.kind, spec.beta)


def _chunks(hidden_KH: Tensor, weight_VH: Tensor, spec: _Spec) -> Iterator[slice]:
    """Ranges of positions whose logits have about `spec.chunk_bytes` bytes."""
    size = max(1, spec.chunk_bytes // (weight_VH.shape[0] * accumulation_dtype(hidden_KH.dtype).itemsize))
    for start in range(0, hidden_KH.shape[0], size):
        yield slice(start, min(start + size, hidden_KH.shape[0]))


def _check_shapes(hidden: Tensor, weight: Tensor, teacher: TeacherTopK | TeacherHead) -> None:
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1]:
        shapes = (tuple(hidden.shape), tuple(weight.shape))
        raise ShapeError(field="hidden, weight", value=shapes, allowed="[K, H] and [V, H]")
    num_positions = hidden.shape[0]
    if isinstance(teacher, TeacherTopK):
        ids, log_probs = tuple(teacher.ids_KC.shape), tuple(teacher.log_probs_KC.shape)
        if ids != log_probs or len(ids) != 2 or ids[0] != num_positions:
            allowed = f"[{num_positions}, C] for both"
            raise ShapeError(field="ids_KC, log_probs_KC", value=(ids, log_probs), allowed=allowed)
        return
    of_hidden, of_weight = tuple(teacher.hidden_KG.shape), tuple(teacher.weight_VG.shape)
    if of_hidden != (num_positions, of_weight[1]) or of_weight[0] < weight.shape[0]:
        allowed = f"[{num_positions}, G] and [V, G], V at least {weight.shape[0]}, the rows of the student's head"
        raise ShapeError(field="hidden_KG, weight_VG", value=(of_hidden, of_weight), allowed=allowed)
