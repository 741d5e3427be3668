"""The clipped policy loss of PPO with asymmetric and dual clipping.

Shapes: K response tokens; every function also takes any other shape, as long as all tensors agree.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from .._tensors import require_same_shape, safe_exp, upcast

__all__ = ["PolicyLossStats", "policy_metric_shares", "ppo_clip_loss"]


@dataclass(frozen=True, kw_only=True)
class PolicyLossStats:
    """What happened to each token; detached, shaped like the loss."""

    ratio_K: Tensor
    """The importance ratio that entered the loss (token level, or the sequence's for GSPO)."""
    log_ratio_K: Tensor
    """log_probs - old_log_probs of each token; minus its mean estimates KL(old || new)."""
    clipped_K: Tensor
    """bool: the bound was active, so the token's gradient is zero (CISPO: its weight was clipped)."""
    dual_clipped_K: Tensor
    """bool: the dual clip was active; a subset of neither, disjoint from `clipped_K`."""


def ppo_clip_loss(
    log_probs_K: Tensor,
    old_log_probs_K: Tensor,
    advantages_K: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
) -> tuple[Tensor, PolicyLossStats]:
    """Per-token clipped surrogate loss, [K], in at least float32.

        r = exp(log_probs - old_log_probs)
        loss = -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)
        with dual_clip = c > 1 and A < 0:   loss = -max(min(...), c A)

    Equal bounds are PPO (Schulman et al. 2017, arXiv:1707.06347, equation 7); clip_high > clip_low is clip-higher
    (DAPO, arXiv:2503.14476, equation 10, 0.2 / 0.28); the dual clip is Ye et al. 2020, arXiv:1912.09729.
    The log-ratio is clamped to [-20, 20] before the exponential. Old log-probs and advantages get no gradient.
    Aggregate with `rl_core.aggregate_loss`. Raises `ValueError` for a bound out of range, `ShapeError` for shapes.
    """
    require_bounds(clip_low, clip_high)
    if dual_clip is not None and dual_clip <= 1.0:
        raise ValueError(f"dual_clip={dual_clip}: must be above 1, or None")
    require_same_shape(log_probs_K=log_probs_K, old_log_probs_K=old_log_probs_K, advantages_K=advantages_K)
    log_probs, old_log_probs, advantages = upcast(log_probs_K, old_log_probs_K.detach(), advantages_K.detach())
    log_ratio = log_probs - old_log_probs
    ratio = safe_exp(log_ratio)
    return clipped_surrogate(ratio, log_ratio, advantages, clip_low, clip_high, dual_clip)


def clipped_surrogate(
    ratio: Tensor,
    log_ratio: Tensor,
    advantages: Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None,
) -> tuple[Tensor, PolicyLossStats]:
    """The loss of `ppo_clip_loss` for a ratio already computed (shared with the sequence-level form)."""
    plain = -ratio * advantages
    bounded = -ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages
    loss = torch.maximum(plain, bounded)
    clipped = bounded > plain
    dual_clipped = torch.zeros_like(clipped)
    if dual_clip is not None:
        ceiling = -dual_clip * advantages
        dual_clipped = (advantages < 0) & (ceiling < loss)
        loss = torch.where(dual_clipped, ceiling, loss)
        clipped = clipped & ~dual_clipped
    stats = PolicyLossStats(
        ratio_K=ratio.detach(), log_ratio_K=log_ratio.detach(), clipped_K=clipped, dual_clipped_K=dual_clipped
    )
    return loss, stats


def policy_metric_shares(stats: PolicyLossStats, weights_K: Tensor) -> dict[str, Tensor]:
    """This micro batch's shares of the weighted means people watch; shares add up over micro batches and ranks.

    `weights_K` are the token weights of the loss (or 1 / number of tokens). Values are 0-d tensors: `ratio`, `kl_old`
    (k3 estimate of KL(old || new), never negative), `clip_fraction`, `dual_clip_fraction`.
    """
    require_same_shape(ratio_K=stats.ratio_K, weights_K=weights_K)
    weights, ratio, log_ratio = upcast(weights_K.detach(), stats.ratio_K, stats.log_ratio_K)
    return {
        "ratio": (weights * ratio).sum(),
        "kl_old": (weights * (log_ratio.clamp(-20.0, 20.0).expm1() - log_ratio)).sum(),
        "clip_fraction": (weights * stats.clipped_K).sum(),
        "dual_clip_fraction": (weights * stats.dual_clipped_K).sum(),
    }


def require_bounds(clip_low: float, clip_high: float) -> None:
    """Raise `ValueError` unless 0 <= clip_low <= 1 and clip_high >= 0."""
    if not 0.0 <= clip_low <= 1.0:
        raise ValueError(f"clip_low={clip_low}: must be between 0 and 1")
    if clip_high < 0.0:
        raise ValueError(f"clip_high={clip_high}: must be at least 0")
