"""CISPO: clip the importance weight, never the token's gradient.

Shapes: K response tokens; any other shape works too, as long as all tensors agree.
"""

import torch
from torch import Tensor

from .._tensors import require_same_shape, safe_exp, upcast
from .policy import PolicyLossStats, require_bounds

__all__ = ["cispo_loss"]


def cispo_loss(
    log_probs_K: Tensor,
    old_log_probs_K: Tensor,
    advantages_K: Tensor,
    *,
    clip_low: float = 1.0,
    clip_high: float = 4.0,
) -> tuple[Tensor, PolicyLossStats]:
    """Per-token loss, [K], in at least float32.

        r = exp(log_probs - old_log_probs)
        loss = -sg(clip(r, 1 - clip_low, 1 + clip_high)) A log_probs

    Every token keeps a gradient; only its weight is bounded. The default has no lower bound (as in the paper) and an
    upper one of 5. Value and gradient of a REINFORCE loss, so the value itself means little; watch the score.
    Source: MiniMax 2025, arXiv:2506.13585; the bound of 5 is among those of Khatri et al. 2025, arXiv:2510.13786.
    """
    require_bounds(clip_low, clip_high)
    require_same_shape(log_probs_K=log_probs_K, old_log_probs_K=old_log_probs_K, advantages_K=advantages_K)
    log_probs, old_log_probs, advantages = upcast(log_probs_K, old_log_probs_K.detach(), advantages_K.detach())
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
