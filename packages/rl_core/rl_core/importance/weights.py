"""Importance weights that correct the loss for differences between rollout and trainer log-probs.

Shapes: K response tokens of all sequences one after another, S sequences.
"""

import torch
from torch import Tensor

from .._tensors import require_same_shape, safe_exp, upcast
from ..batching.segments import broadcast_to_tokens, segment_mean, segment_sum
from ..errors import ArgumentError, require
from ..options import ImportanceLevel, ImportanceMode, require_option


def rollout_weights(
    old_log_probs_K: Tensor,
    rollout_log_probs_K: Tensor,
    *,
    mode: ImportanceMode = "truncate",
    level: ImportanceLevel = "token",
    max_ratio: float = 2.0,
    min_ratio: float = 0.0,
    response_lens_S: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Importance weights between trainer and rollout engine: (weights_K, inside_K).

    Multiply the per-token loss by `weights_K`. `inside_K` is bool: the ratio was within the bounds.

    With d_t = old_log_probs - rollout_log_probs (trainer minus rollout, same weights, before the update):

        ratio:      token e^{d_t}    sequence e^{sum_t d_t}    geometric e^{mean_t d_t}   (one for the whole sequence)
        truncate:   w = min(max(ratio, min_ratio), max_ratio)
        mask:       w = ratio where min_ratio <= ratio <= max_ratio, else 0

    Weights are detached and at least float32. Levels "sequence" and "geometric" need `response_lens_S`. Masked tokens
    stay in the denominators of the loss: the aggregation weights are not renormalized.
    To combine levels, multiply: token weights times `inside_K` of the geometric level reject whole sequences.
    Sources: truncated importance sampling, Ionides 2008, and Yao et al. 2025, "Your efficient RL framework secretly
    brings you off-policy RL training"; masking, IcePop (Ling team 2025, arXiv:2510.18855); sequence level, Liu et al.
    2025, "When speed kills stability".
    Raises `ValueError` for a bad bound, mode or level, `ShapeError` for shapes.
    """
    require_option("mode", mode, ImportanceMode)
    require_option("level", level, ImportanceLevel)
    require(max_ratio > 0.0, "max_ratio", max_ratio, "above 0")
    require(0.0 <= min_ratio <= max_ratio, "min_ratio", min_ratio, f"0 to max_ratio, {max_ratio}")
    require_same_shape(old_log_probs_K=old_log_probs_K, rollout_log_probs_K=rollout_log_probs_K)
    old_log_probs, rollout_log_probs = upcast(old_log_probs_K.detach(), rollout_log_probs_K.detach())
    ratio = safe_exp(_level_log_ratio(old_log_probs - rollout_log_probs, level, response_lens_S))
    inside = (ratio >= min_ratio) & (ratio <= max_ratio)
    if mode == "truncate":
        return ratio.clamp(min_ratio, max_ratio), inside
    return torch.where(inside, ratio, 0.0), inside


def _level_log_ratio(difference: Tensor, level: ImportanceLevel, response_lens_S: Tensor | None) -> Tensor:
    if level == "token":
        return difference
    if response_lens_S is None:
        raise ArgumentError("it needs response_lens_S", field="level", value=level)
    reduce = segment_sum if level == "sequence" else segment_mean
    return broadcast_to_tokens(reduce(difference, response_lens_S), response_lens_S)
