"""The clipped policy loss that GRPO and PPO share: settings, token weights, loss function."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rl_core import KLKind, LossAggregation, check_clip

if TYPE_CHECKING:
    from ds_engine import LossOutput, TokenBatch, TokenOutputs

    from ..experience import ExperienceBatch


@dataclass(frozen=True, kw_only=True)
class PolicyConfig:
    """A clipped policy loss with KL and entropy terms (PPO, arXiv:1707.06347)."""

    clip_low: float = 0.2
    """The ratio is clipped below 1 - clip_low."""
    clip_high: float = 0.2
    """The ratio is clipped above 1 + clip_high (DAPO's clip-higher when larger than clip_low)."""
    dual_clip: float | None = None
    """Bound of the loss for negative advantages, times the advantage (dual-clip PPO); above 1, null: no bound."""
    loss_aggregation: LossAggregation = "token_mean"
    """How per-token losses are aggregated; `fixed_length` (Dr. GRPO) divides by sampling.max_tokens."""
    kl_coef: float = 0.0
    """Coefficient of the KL term to the reference model; 0 builds no reference model."""
    kl_kind: KLKind = "k3"
    """KL estimator (Schulman, 'Approximating KL divergence')."""
    entropy_coef: float = 0.0
    """Coefficient of the entropy bonus."""
    num_epochs: int = 1
    """Passes over each train batch."""

    def __post_init__(self) -> None:
        check_clip(self.clip_low, self.clip_high, self.dual_clip)
        if not 0 <= self.kl_coef < math.inf:
            raise ValueError(f"kl_coef is {self.kl_coef}; allowed: 0 or more")
        if not math.isfinite(self.entropy_coef):
            raise ValueError(f"entropy_coef is {self.entropy_coef}; allowed: a finite number")
        if self.num_epochs < 1:
            raise ValueError(f"num_epochs is {self.num_epochs}; allowed: 1 or more")


def with_loss_weights(
    batch: "ExperienceBatch",
    config: PolicyConfig,
    *,
    max_tokens: int,
    mini_batches: Sequence[Sequence[int]] | None = None,
) -> "ExperienceBatch":
    """Adds the columns that turn token losses into the mini-batch loss: `weights`, and `mean_weights` for metrics.

    Args:
        max_tokens: `sampling.max_tokens`, the divisor of `fixed_length`.
        mini_batches: sample indices of each mini batch; None: the batch is one mini batch.
    """
    import torch

    from rl_core import token_weights

    mode = config.loss_aggregation
    fixed_length = max_tokens if mode == "fixed_length" else None
    lens_N = batch.response_lens_N
    weights_N, mean_N = torch.zeros(len(lens_N), dtype=torch.float64), torch.zeros(len(lens_N), dtype=torch.float64)
    for indices in mini_batches or [range(len(lens_N))]:
        chosen = torch.tensor(indices)
        weights_N[chosen] = token_weights(mode, lens_N[chosen], fixed_length=fixed_length).double()
        mean_N[chosen] = token_weights("token_mean", lens_N[chosen]).double()
    return batch.with_per_sequence("weights", weights_N).with_per_sequence("mean_weights", mean_N)


def policy_loss(outputs: "TokenOutputs", batch: "TokenBatch", *, config: PolicyConfig, kl_coef: float) -> "LossOutput":
    """This micro batch's share of the loss: sum_k w_k (clipped policy loss + kl_coef KL - entropy_coef H)_k.

    Columns: `old_log_probs`, `advantages`, `weights`, `mean_weights`, and `ref_log_probs` where `kl_coef` is not 0.
    """
    from ds_engine import LossOutput
    from rl_core import kl_loss, ppo_clip_loss

    columns, log_probs_K = batch.columns, outputs.log_probs_K
    weights_K, mean_K = columns["weights"], columns["mean_weights"]
    loss_K, stats = ppo_clip_loss(
        log_probs_K,
        columns["old_log_probs"],
        columns["advantages"],
        clip_low=config.clip_low,
        clip_high=config.clip_high,
        dual_clip=config.dual_clip,
    )
    metrics = {
        "pg_loss": (weights_K * loss_K).sum().detach(),
        "clip_fraction": (mean_K * stats.clipped_K).sum().detach(),
        "entropy": (mean_K * outputs.entropy_K).sum().detach(),
    }
    if kl_coef:
        kl_K = kl_loss(
            log_probs_K, columns["ref_log_probs"], kind=config.kl_kind, old_log_probs_K=columns["old_log_probs"]
        )
        loss_K = loss_K + kl_coef * kl_K
        metrics["kl"] = (mean_K * kl_K).sum().detach()
    if config.entropy_coef:
        loss_K = loss_K - config.entropy_coef * outputs.entropy_K
    return LossOutput(loss=(weights_K * loss_K).sum(), metrics=metrics)
