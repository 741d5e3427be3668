"""Divergences between a teacher's and a student's next-token distributions, known for some tokens or for all.

Shapes: K positions; C tokens of the vocabulary in each, the same for teacher and student.
"""

import torch
from torch import Tensor

from .._tensors import require_same_shape, upcast
from ..errors import ShapeError, require
from ..options import DivergenceKind, require_option

_LOWEST = -1.0e4
"""Replaces a log-prob of -inf: its exponential is 0, and 0 times it is 0 instead of NaN."""


def divergence(
    log_probs_KC: Tensor,
    teacher_log_probs_KC: Tensor,
    *,
    kind: DivergenceKind = "reverse",
    beta: float = 0.5,
) -> Tensor:
    """Divergence of each position, [K] in nats, in at least float32; differentiable in the student's log-probs.

    The probability that the C tokens leave over is one more outcome (the tail), so the result is never negative, is 0
    for equal distributions, and is a lower bound of the divergence over the whole vocabulary, which it equals if C is
    the whole vocabulary. With teacher t, student s and m = beta t + (1 - beta) s:

        forward  KL(t || s) = sum_c t_c (log t_c - log s_c)           covers all that the teacher does
        reverse  KL(s || t) = sum_c s_c (log s_c - log t_c)           stays within what the teacher does
        jsd      beta KL(t || m) + (1 - beta) KL(s || m)              between the two; at most log 2

    Source: Agarwal et al. 2023, "On-Policy Distillation of Language Models" (GKD), arXiv:2306.13649, section 2 and
    equation 1; reverse: Gu et al. 2023, "MiniLLM", arXiv:2306.08543.

    Args:
        log_probs_KC: the student's log-probs, normalized over its whole vocabulary.
        teacher_log_probs_KC: the teacher's log-probs of the same tokens, such as its C most likely ones; no gradient.
        kind: the divergence.
        beta: weight of the teacher in m, for `jsd`: above 0, below 1.

    Raises `ValueError` for an unknown kind or a beta out of range, `ShapeError` for shapes.
    """
    check_divergence(kind, beta)
    require_same_shape(log_probs_KC=log_probs_KC, teacher_log_probs_KC=teacher_log_probs_KC)
    if log_probs_KC.dim() != 2:
        raise ShapeError(field="log_probs_KC", value=tuple(log_probs_KC.shape), allowed="two dimensions")
    student, teacher = upcast(log_probs_KC, teacher_log_probs_KC.detach())
    return full_divergence(_with_tail(student), _with_tail(teacher), kind, beta)


def check_divergence(kind: str, beta: float) -> None:
    """Raise `ValueError` unless the divergence exists and 0 < beta < 1."""
    require_option("kind", kind, DivergenceKind)
    require(0.0 < beta < 1.0, "beta", beta, "above 0 and below 1 (kind forward or reverse for the ends)")


def full_divergence(student_KV: Tensor, teacher_KV: Tensor, kind: DivergenceKind, beta: float) -> Tensor:
    """Divergence [K] of distributions whose log-probs are complete, without checks."""
    student, teacher = student_KV.clamp(min=_LOWEST), teacher_KV.clamp(min=_LOWEST)
    if kind == "forward":
        return _kl(teacher, student)
    if kind == "reverse":
        return _kl(student, teacher)
    weight = torch.tensor(beta, dtype=student.dtype, device=student.device)
    mixture = torch.logaddexp(teacher + weight.log(), student + (1.0 - weight).log())
    return beta * _kl(teacher, mixture) + (1.0 - beta) * _kl(student, mixture)


def _kl(source: Tensor, target: Tensor) -> Tensor:
    """KL(source || target) over the last dimension; rounding can make it slightly negative."""
    return (source.exp() * (source - target)).sum(dim=-1)


def _with_tail(log_probs_KC: Tensor) -> Tensor:
    """[K, C + 1] with the log of the probability that is left; at least the dtype's epsilon, where it is rounding."""
    rest = 1.0 - log_probs_KC.exp().sum(dim=-1, keepdim=True)
    return torch.cat((log_probs_KC, rest.clamp(min=torch.finfo(rest.dtype).eps).log()), dim=-1)
