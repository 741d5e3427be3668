"""Estimators of KL(policy || reference) from the log-probs of sampled tokens, as values and as losses.

Shapes: K response tokens; any other shape works too, as long as all tensors agree.
"""

from torch import Tensor

from .._tensors import require_same_shape, safe_exp, upcast
from ..options import KLKind, require_option


def k3(difference: Tensor) -> Tensor:
    """e^-d - 1 + d, with the exponent clamped to [-20, 20]; precise near d = 0."""
    return (-difference).clamp(-20.0, 20.0).expm1() + difference


def kl_estimate(log_probs_K: Tensor, ref_log_probs_K: Tensor, kind: KLKind = "k3") -> Tensor:
    """Per-token estimate of KL(policy || ref) for tokens drawn from the policy, [K], in at least float32.

        d = log_probs - ref_log_probs
        k1 = d            unbiased, may be negative
        k2 = d^2 / 2      biased, never negative
        k3 = e^-d - 1 + d unbiased, never negative, little variance near d = 0
        abs = |d|         a distance to watch, not an estimate of the KL

    Source: Schulman 2020, "Approximating KL divergence". Use it for values (rewards, metrics). Use `kl_loss` for a
    loss: autograd through k1 has zero mean, and autograd through k3 is not the gradient of this KL.
    Raises `ValueError` for an unknown kind, `ShapeError` for shapes that differ.
    """
    require_option("kind", kind, KLKind)
    require_same_shape(log_probs_K=log_probs_K, ref_log_probs_K=ref_log_probs_K)
    log_probs, ref_log_probs = upcast(log_probs_K, ref_log_probs_K)
    difference = log_probs - ref_log_probs
    if kind == "k1":
        return difference
    if kind == "k2":
        return 0.5 * difference.square()
    if kind == "k3":
        return k3(difference)
    return difference.abs()


def kl_loss(
    log_probs_K: Tensor,
    ref_log_probs_K: Tensor,
    *,
    kind: KLKind = "k3",
    old_log_probs_K: Tensor | None = None,
) -> Tensor:
    """Per-token KL loss, [K]: the value of `kl_estimate`, with the gradient of the quantity that it estimates.

    With tokens y drawn from the policy p, the gradient of E[f(y)] is E[(f + df/dlogp) grad log p(y)]. Autograd through
    samples sees only df. Here, with d = log_probs - ref_log_probs held constant:

        k1, k2, k3:  grad = d * grad log p             (expectation: the gradient of KL(policy || ref))
        abs:         grad = (|d| + sign d) * grad log p (expectation: the gradient of E|d|)

    The first omits the term with zero mean (E[grad log p] = 0), for less variance.
    For tokens drawn from an older policy, pass `old_log_probs_K`: value and gradient are then weighted by the
    importance ratio exp(log_probs - old_log_probs), held constant, which keeps both unbiased.
    Source: Tang & Munos 2025, arXiv:2506.09477; Liu et al. 2025, arXiv:2510.01555; k2's own gradient is the same d.
    """
    value = kl_estimate(log_probs_K.detach(), ref_log_probs_K.detach(), kind)
    log_probs, ref_log_probs = upcast(log_probs_K, ref_log_probs_K.detach())
    difference = (log_probs - ref_log_probs).detach()
    slope = difference.abs() + difference.sign() if kind == "abs" else difference
    # log_probs - log_probs.detach() is exactly zero and has gradient one
    loss = value + slope * (log_probs - log_probs.detach())
    if old_log_probs_K is None:
        return loss
    require_same_shape(log_probs_K=log_probs_K, old_log_probs_K=old_log_probs_K)
    (old_log_probs,) = upcast(old_log_probs_K.detach())
    return loss * safe_exp(log_probs.detach() - old_log_probs)
