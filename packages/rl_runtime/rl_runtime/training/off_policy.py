"""Off-policy correction of the policy loss: importance weights between the trainer and the policy that sampled.

Both differ by the numerics of two engines and, for partial rollouts, by the updates since an older policy version.
"""

import math
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Literal

from rl_core import ImportanceLevel
from rollout_vllm import SamplingConfig

from ..rules import Feature, check_value, only

if TYPE_CHECKING:
    from torch import Tensor

    from rl_core import Batch


@dataclass(frozen=True, kw_only=True)
class RolloutCorrection:
    """Importance weights of the token losses for samples of another policy (`rl_core.rollout_weights`).

    The ratio of the probabilities of the generated tokens: before the update, to those when they were sampled.
    """

    mode: Literal["none", "truncate", "mask"] | None = None
    """Treatment of ratios out of bounds. `truncate`: the nearest bound (truncated importance sampling, Yao et al. 2025,
    'Your efficient RL framework secretly brings you off-policy RL training'). `mask`: weight 0 (IcePop,
    arXiv:2510.18855). `none`: no weights. null: `truncate` with `trainer.max_staleness`, else `none`."""
    level: ImportanceLevel = "token"
    """`token`: each token's ratio, low variance but biased. `sequence`: the product over the response, unbiased within
    the bounds. `geometric`: the product to the power 1 / length, which leaves few ratios far from 1."""
    max_ratio: float = 2.0
    """Upper bound, 1 or more. With `mode=mask` and `level=geometric`, bounds near 1 such as 1.001 and 0.999 reject
    responses whose tokens differ a little each."""
    min_ratio: float = 0.0
    """Lower bound, 0 to 1."""

    def __post_init__(self) -> None:
        is_bound = 1 <= self.max_ratio < math.inf
        check_value(self, "max_ratio", is_bound, "a finite number from 1, the ratio of equal probabilities")
        check_value(self, "min_ratio", 0 <= self.min_ratio <= 1, "0 to 1, the ratio of equal probabilities")
        check_value(self, "min_ratio", self.min_ratio != self.max_ratio, f"below max_ratio ({self.max_ratio})")
        others = [key for key in fields(self) if key.name != "mode"]
        is_read = self.enabled or all(getattr(self, key.name) == key.default for key in others)
        problem = f"level ({self.level}), max_ratio ({self.max_ratio}) and min_ratio ({self.min_ratio}) have no effect"
        check_value(self, "mode", is_read, "truncate or mask, or their defaults", problem=problem)

    @property
    def enabled(self) -> bool:
        """True if token losses are weighted."""
        return self.mode not in ("none", None)


_COMPARES = "which compares the servers' log-probs with the trainer's"
ROLLOUT_CORRECTION = Feature(
    key="algorithm.rollout_correction.mode",
    is_on=lambda c: c.algorithm.rollout_correction.enabled,
    rules=(
        *(
            only(f"sampling.{name}", getattr(SamplingConfig(), name), why=f"{_COMPARES}, and these would be reshaped")
            for name in ("top_p", "top_k", "min_p", "min_tokens", "repetition_penalty")
        ),
        only("rollout.log_probs", True, why=_COMPARES),
    ),
)


def correction_weights(batch: "Batch", correction: RolloutCorrection) -> "Tensor | float":
    """Factors of the token losses of a micro batch, [K]: 1 without a correction, else the weights of `old_log_probs`
    and `rollout_log_probs`."""
    return _weights(batch, correction)[0] if correction.enabled else 1.0


def compare_with_rollout(batch: "Batch", correction: RolloutCorrection) -> "dict[str, float]":
    """The metrics of `mismatch` and of the weights; empty if the servers' log-probs were not requested.

    Args:
        batch: with the trainer's `old_log_probs`.
    """
    from rl_core import effective_sample_size

    from .metrics import mismatch

    if "rollout_log_probs" not in batch.columns:
        assert not correction.enabled, "refused by the configuration"
        return {}
    metrics = mismatch(batch)
    if not correction.enabled:
        return metrics
    weights_K, inside_K = _weights(batch, correction)
    return metrics | {
        "rollout/correction_weight_mean": float(weights_K.mean()),
        "rollout/correction_ess": effective_sample_size(weights_K),
        "rollout/correction_outside_share": float((~inside_K).double().mean()),
    }


def _weights(batch: "Batch", correction: RolloutCorrection) -> "tuple[Tensor, Tensor]":
    """`rl_core.rollout_weights` with the settings of `correction`."""
    from rl_core import rollout_weights

    assert correction.mode is not None
    assert correction.mode != "none"
    return rollout_weights(
        batch.columns["old_log_probs"],
        batch.columns["rollout_log_probs"],
        mode=correction.mode,
        level=correction.level,
        max_ratio=correction.max_ratio,
        min_ratio=correction.min_ratio,
        response_lens_S=batch.response_lens_S,
    )
