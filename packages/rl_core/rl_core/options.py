"""Names and bounds of the options of losses, KL estimators and importance weights.

Standard library only: an application can use them in its config before torch is imported. The functions that take
these options check them here too, so each rule exists once.
"""

from typing import Literal, get_args

from .errors import require

LossAggregation = Literal["token_mean", "seq_mean_token_sum", "seq_mean_token_mean", "fixed_length"]
"""Aggregations of per-token losses into the mini-batch loss, see `rl_core.token_weights`."""

KLKind = Literal["k1", "k2", "k3", "abs"]
"""KL estimators, see `rl_core.kl_estimate`."""

DivergenceKind = Literal["forward", "reverse", "jsd"]
"""Divergences between a teacher and a student, see `rl_core.divergence`."""

ImportanceLevel = Literal["token", "sequence", "geometric"]
"""Scope of an importance ratio, see `rl_core.rollout_weights`."""

ImportanceMode = Literal["truncate", "mask"]
"""Treatment of importance ratios out of bounds, see `rl_core.rollout_weights`."""

PairLoss = Literal["dpo", "ipo"]
"""Losses of direct preference optimization, see `rl_core.dpo_loss`."""


def check_clip(clip_low: float, clip_high: float, dual_clip: float | None = None) -> None:
    """Check the clip bounds of a policy loss.

    Raises `ValueError` unless 0 <= clip_low <= 1, clip_high >= 0, and dual_clip is None or above 1. A `clip_low` of 1
    means no lower bound, because ratios are positive.
    """
    require(0.0 <= clip_low <= 1.0, "clip_low", clip_low, "0 to 1")
    require(clip_high >= 0.0, "clip_high", clip_high, "0 or more")
    require(dual_clip is None or dual_clip > 1.0, "dual_clip", dual_clip, "above 1, or null for none")


def require_option(name: str, value: object, options: object) -> None:
    """Raise `ValueError` unless `value` is one of the strings of the Literal `options`."""
    require(value in get_args(options), name, value, ", ".join(get_args(options)))
