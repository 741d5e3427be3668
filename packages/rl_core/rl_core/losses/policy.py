"""Policy losses: PPO clip with clip-higher and dual clip, GSPO, CISPO; the entropy bonus; their metrics.

Shapes: K response tokens of all sequences one after another, S sequences, V vocabulary. Only `gspo_loss` needs to know
where sequences end; the other functions take any shape, as long as all tensors agree.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from .._tensors import require_same_shape, safe_exp, upcast
from ..batching.segments import broadcast_to_tokens, segment_mean
from ..kl.estimators import k3
from ..options import check_clip


@dataclass(frozen=True, kw_only=True)
class PolicyLossStats:
    """Ratios and clip flags of each token; detached, shaped like the loss."""

    ratio_K: Tensor
    """The importance ratio that entered the loss (token level, or the sequence's for GSPO)."""
    log_ratio_K: Tensor
    """log_probs - old_log_probs of each token; minus its mean estimates KL(old || new)."""
    clipped_K: Tensor
    """bool: the bound was active, so the token's gradient is zero (CISPO: its weight was clipped)."""
    dual_clipped_K: Tensor
    """bool: the dual clip was active. No token is set both here and in `clipped_K`."""


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
    check_clip(clip_low, clip_high, dual_clip)
    log_probs, old_log_probs, advantages = _inputs(log_probs_K, old_log_probs_K, advantages_K)
    log_ratio = log_probs - old_log_probs
    return _clipped_surrogate(safe_exp(log_ratio), log_ratio, advantages, clip_low, clip_high, dual_clip)


def gspo_loss(
    log_probs_K: Tensor,
    old_log_probs_K: Tensor,
    advantages_K: Tensor,
    response_lens_S: Tensor,
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
) -> tuple[Tensor, PolicyLossStats]:
    """Per-token loss of group sequence policy optimization (GSPO), [K], in at least float32.

        s_i = exp(1/|y_i| sum_t (log_probs - old_log_probs)_it)              the sequence's geometric mean ratio
        loss_it = -min(s_it A_it, clip(s_it, 1 - clip_low, 1 + clip_high) A_it)
        s_it = sg(s_i) * exp(log_probs_it - sg(log_probs_it))                value s_i, gradient through token t

    With one advantage per sequence this is GSPO's objective and gradient under the "seq_mean_token_mean" aggregation of
    the paper; advantages that differ by token are GSPO-token. A sequence must not be split over micro batches.
    Source: Zheng et al. 2025, arXiv:2507.18071, equations 5, 7 and 13; the default bounds are theirs.
    Raises `ValueError` for a bound out of range, `ShapeError` for shapes.
    """
    check_clip(clip_low, clip_high)
    log_probs, old_log_probs, advantages = _inputs(log_probs_K, old_log_probs_K, advantages_K)
    log_ratio = log_probs - old_log_probs
    sequence_ratio = safe_exp(segment_mean(log_ratio.detach(), response_lens_S))
    through_token = 1.0 + (log_probs - log_probs.detach())  # value 1, and the gradient of exp at 0
    ratio = broadcast_to_tokens(sequence_ratio, response_lens_S) * through_token
    return _clipped_surrogate(ratio, log_ratio, advantages, clip_low, clip_high, None)


def cispo_loss(
    log_probs_K: Tensor,
    old_log_probs_K: Tensor,
    advantages_K: Tensor,
    *,
    clip_low: float = 1.0,
    clip_high: float = 4.0,
) -> tuple[Tensor, PolicyLossStats]:
    """Per-token loss of CISPO, which clips the importance weight instead of the gradient; [K], in at least float32.

        r = exp(log_probs - old_log_probs)
        loss = -sg(clip(r, 1 - clip_low, 1 + clip_high)) A log_probs

    Every token keeps a gradient; only its weight is bounded. The default has no lower bound (as in the paper) and an
    upper one of 5. Value and gradient are those of a weighted REINFORCE loss, so watch the score instead of the value.
    Source: MiniMax 2025, arXiv:2506.13585; the bound of 5 is among those of Khatri et al. 2025, arXiv:2510.13786.
    Raises `ValueError` for a bound out of range, `ShapeError` for shapes.
    """
    check_clip(clip_low, clip_high)
    log_probs, old_log_probs, advantages = _inputs(log_probs_K, old_log_probs_K, advantages_K)
    log_ratio = (log_probs - old_log_probs).detach()
    ratio = safe_exp(log_ratio)
    weight = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    stats = PolicyLossStats(
        ratio_K=ratio,
        log_ratio_K=log_ratio,
        clipped_K=weight != ratio,
        dual_clipped_K=torch.zeros_like(ratio, dtype=torch.bool),
    )
    return -weight * advantages * log_probs, stats


def policy_metric_shares(stats: PolicyLossStats, weights_K: Tensor) -> dict[str, Tensor]:
    """This micro batch's shares of the weighted means of `stats`; shares add up over micro batches and ranks.

    `weights_K` are the token weights of the loss (or 1 / number of tokens). Values are 0-d tensors: `ratio`, `kl_old`
    (k3 estimate of KL(old || new), never negative), `clip_fraction`, `dual_clip_fraction`.
    """
    require_same_shape(ratio_K=stats.ratio_K, weights_K=weights_K)
    weights, ratio, log_ratio = upcast(weights_K.detach(), stats.ratio_K, stats.log_ratio_K)
    return {
        "ratio": (weights * ratio).sum(),
        "kl_old": (weights * k3(-log_ratio)).sum(),
        "clip_fraction": (weights * stats.clipped_K).sum(),
        "dual_clip_fraction": (weights * stats.dual_clipped_K).sum(),
    }


def _inputs(log_probs_K: Tensor, old_log_probs_K: Tensor, advantages_K: Tensor) -> tuple[Tensor, ...]:
    """The three tensors in one dtype of at least float32; only the log-probs keep their graph."""
    require_same_shape(log_probs_K=log_probs_K, old_log_probs_K=old_log_probs_K, advantages_K=advantages_K)
    return upcast(log_probs_K, old_log_probs_K.detach(), advantages_K.detach())


def _clipped_surrogate(
    ratio: Tensor,
    log_ratio: Tensor,
    advantages: Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None,
) -> tuple[Tensor, PolicyLossStats]:
    """The clipped loss of `ppo_clip_loss` and `gspo_loss`, given the ratio."""
    plain = -ratio * advantages
    bounded = -ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages
    loss = torch.maximum(plain, bounded)
    clipped = bounded > plain
    dual_clipped = torch.zeros_like(clipped)
    if dual_clip is not None:
        ceiling = -dual_clip * advantages
        dual_clipped = (advantages < 0) & (ceiling < loss)
        loss = torch.where(dual_clipped, ceiling, loss)
    stats = PolicyLossStats(
        ratio_K=ratio.detach(), log_ratio_K=log_ratio.detach(), clipped_K=clipped, dual_clipped_K=dual_clipped
    )
    return loss, stats
