"""Off-policy correction of the policy loss: importance weights between the trainer and the policy that sampled.

Both differ by the numerics of two engines and, for partial rollouts, by the updates since an older policy version.
"""

import math
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Literal

from rl_core import ImportanceLevel

from ..errors import InputError
from ..rules import check_value

if TYPE_CHECKING:
    from torch import Tensor

    from rl_core import PackedBatch
    from rollout_vllm import SamplingConfig

    from ..experience import ExperienceBatch


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
        if not 1 <= self.max_ratio < math.inf:
            raise InputError(
                field="max_ratio",
                value=self.max_ratio,
                allowed="a finite number from 1, the ratio of equal probabilities",
            )
        check_value(self, "min_ratio", 0 <= self.min_ratio <= 1, "0 to 1, the ratio of equal probabilities")
        check_value(self, "min_ratio", self.min_ratio != self.max_ratio, f"below max_ratio ({self.max_ratio})")
        others = [key for key in fields(self) if key.name != "mode"]
        if not self.enabled and any(getattr(self, key.name) != key.default for key in others):
            raise InputError(
                f"level ({self.level}), max_ratio ({self.max_ratio}) and min_ratio ({self.min_ratio}) have no effect",
                field="mode",
                value=self.mode,
                allowed="truncate or mask, or their defaults",
            )

    @property
    def enabled(self) -> bool:
        """Whether token losses are weighted."""
        return self.mode not in ("none", None)


def check_rollout_correction(correction: RolloutCorrection, sampling: "SamplingConfig") -> None:
    """Refuses a correction where the servers' log-probs are those of a truncated or reshaped distribution.

    Raises:
        ValueError: names the sampling key.
    """
    if not correction.enabled:
        return
    neutral = type(sampling)()
    for name in ("top_p", "top_k", "min_p", "min_tokens", "repetition_penalty"):
        value, allowed = getattr(sampling, name), getattr(neutral, name)
        if value != allowed:
            raise ValueError(
                f"sampling.{name} is {value}; allowed: {allowed} with algorithm.rollout_correction.mode="
                f"{correction.mode}, because otherwise the servers' log-probs belong to another distribution than the "
                "trainer's, and their ratio says nothing about the policies"
            )


def rollout_columns(batch: "ExperienceBatch") -> "dict[str, Tensor]":
    """The column `rollout_log_probs` for the loss, float32 [K]; empty if they were not requested
    (`rollout.log_probs=false`)."""
    log_probs_K = batch.rollout_log_probs_K
    return {} if log_probs_K is None else {"rollout_log_probs": log_probs_K}


def correction_weights(batch: "PackedBatch", correction: RolloutCorrection) -> "Tensor | float":
    """What multiplies the token losses of a micro batch, [K]: 1 without a correction, else the weights of
    `old_log_probs` and `rollout_log_probs`."""
    if not correction.enabled:
        return 1.0
    old_K, rollout_K = batch.columns["old_log_probs"], batch.columns["rollout_log_probs"]
    return _weights(old_K, rollout_K, batch.response_lens_S, correction)[0]


def compare_with_rollout(
    batch: "ExperienceBatch", old_log_probs_K: "Tensor", correction: RolloutCorrection
) -> "dict[str, float]":
    """The metrics of `mismatch` and of the weights; empty if the servers' log-probs were not requested.

    Args:
        old_log_probs_K: the trainer's log-probs before the update, in the order of the samples.
    """
    from rl_core import effective_sample_size

    from .metrics import mismatch

    rollout_log_probs_K = batch.rollout_log_probs_K
    if rollout_log_probs_K is None:
        assert not correction.enabled, "refused by the configuration"
        return {}
    metrics = mismatch(batch, old_log_probs_K)
    if not correction.enabled:
        return metrics
    weights_K, inside_K = _weights(old_log_probs_K, rollout_log_probs_K, batch.response_lens_N, correction)
    return metrics | {
        "rollout/correction_weight_mean": float(weights_K.mean()),
        "rollout/correction_ess": effective_sample_size(weights_K),
        "rollout/correction_outside_share": float((~inside_K).double().mean()),
    }


def _weights(
    old_log_probs_K: "Tensor", rollout_log_probs_K: "Tensor", lens_N: "Tensor", correction: RolloutCorrection
) -> "tuple[Tensor, Tensor]":
    """`rl_core.rollout_weights` with the settings of `correction`."""
    from rl_core import rollout_weights

    assert correction.mode is not None
    assert correction.mode != "none"
    return rollout_weights(
        old_log_probs_K,
        rollout_log_probs_K,
        mode=correction.mode,
        level=correction.level,
        max_ratio=correction.max_ratio,
        min_ratio=correction.min_ratio,
        response_lens_S=lens_N,
    )
