"""Settings of the policy update that GRPO and PPO share: advantage, loss, KL term, length shaping."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from rl_core import ADVANTAGES, POLICY_LOSSES, KLKind, LossAggregation, check_clip

from ..errors import InputError
from ..rules import Feature, Rule, check_at_least, check_value, only
from .off_policy import ROLLOUT_CORRECTION, RolloutCorrection

if TYPE_CHECKING:
    from ds_engine import EngineConfig


@dataclass(frozen=True, kw_only=True)
class PolicyConfig:
    """Advantage, policy loss, KL and entropy terms; docs/algorithms.md describes each algorithm."""

    advantage: str = "grpo"
    """Estimator of the advantages (`rl_core.ADVANTAGES`). `grpo` (arXiv:2402.03300), `dr_grpo` (arXiv:2503.20783),
    `rloo` (arXiv:2402.14740) and `reinforce_pp_baseline` (arXiv:2501.03262) compare the samples of a prompt; `remax`
    (arXiv:2310.10505) compares each with the greedy response, which costs one more response per prompt; `reinforce_pp`
    (arXiv:2501.03262) compares with the whole batch; `turn_grpo` (arXiv:2505.11821), `turn_rloo` and `gigpo`
    (arXiv:2505.10978) compare the returns of turns; `gae` (arXiv:1506.02438) with a critic, in the PPO app."""
    gamma: float = 1.0
    """Discount per token, for `gae` and `reinforce_pp`; per turn for `turn_grpo`, `turn_rloo` and `gigpo`."""
    loss: str = "ppo_clip"
    """The policy loss (`rl_core.POLICY_LOSSES`): `ppo_clip` (arXiv:1707.06347), `gspo` (arXiv:2507.18071; use it with
    `loss_aggregation=seq_mean_token_mean`), `cispo` (arXiv:2506.13585), or your own `package.module:function`. The
    trainer ranks call yours as `function(log_probs_K, batch, **loss_options)`. It returns the loss of each token, [K];
    `batch.columns` has old_log_probs, advantages, rollout_log_probs and staleness, `batch.response_lens_S` the
    lengths."""
    loss_options: Mapping[str, Any] = field(default_factory=dict)
    """Further keyword arguments of the loss."""
    clip_low: float | None = None
    """The ratio is clipped below 1 - clip_low; null: 0.2 for `ppo_clip`, 3e-4 for `gspo`, 1 (no bound) for `cispo`."""
    clip_high: float | None = None
    """The ratio is clipped above 1 + clip_high (DAPO's clip-higher when larger than clip_low); null: 0.2 for
    `ppo_clip`, 4e-4 for `gspo`, 4 for `cispo`."""
    dual_clip: float | None = None
    """Bound of `ppo_clip` for negative advantages, times the advantage (dual-clip PPO, arXiv:1912.09729); above 1,
    null: no bound."""
    loss_aggregation: LossAggregation = "token_mean"
    """Aggregation of per-token losses; `fixed_length` (Dr. GRPO) divides by sampling.max_tokens."""
    kl_coef: float | None = None
    """Coefficient of the KL term to the reference model; 0 builds no reference model. null: 0 with rewards of a rule,
    which cannot be exploited, and 0.01 with a reward model."""
    kl_kind: KLKind = "k3"
    """KL estimator (Schulman, 'Approximating KL divergence')."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Place of the KL term. `loss`: added to the loss (GRPO). `reward`: subtracted from the reward, of each
    token for `gae` and `reinforce_pp` (InstructGPT, arXiv:2203.02155), as a sum over the turn for `turn_grpo`,
    `turn_rloo` and `gigpo`, and over the response for the others."""
    kl_target: float | None = None
    """Target of the mean KL per token, to which `kl_coef` adapts (arXiv:1909.08593); null: fixed `kl_coef`."""
    kl_horizon: float = 10_000.0
    """Horizon of the adaptation, in sequences."""
    entropy_coef: float = 0.0
    """Coefficient of the entropy bonus."""
    num_epochs: int = 1
    """Passes over each train batch."""
    overlong_penalty: float = 0.0
    """DAPO's soft overlong punishment (arXiv:2503.14476): the training score falls by up to this much over the last
    `overlong_buffer` tokens before sampling.max_tokens. The paper has 1; 0: no penalty."""
    overlong_buffer: int | None = None
    """Tokens before sampling.max_tokens over which `overlong_penalty` grows; null: a fifth of sampling.max_tokens, the
    share of DAPO."""
    overlong_filter: bool = False
    """Train neither policy nor critic on responses cut at sampling.max_tokens (DAPO's overlong filtering); their scores
    still count in the advantages of the others."""
    rollout_correction: RolloutCorrection = field(default_factory=RolloutCorrection)

    def __post_init__(self) -> None:
        check_value(self, "gamma", 0 <= self.gamma <= 1, "0 to 1")
        check_value(self, "advantage", self.advantage in ADVANTAGES, ", ".join(ADVANTAGES))
        discounting = [name for name, one in ADVANTAGES.items() if one.discounts]
        is_read = self.gamma == 1 or self.advantage in discounting
        problem = f"advantage={self.advantage} has one reward per sample and nothing to discount"
        check_value(self, "gamma", is_read, f"1; {' and '.join(discounting)} discount", problem=problem)
        self._check_loss()
        self._check_kl()
        self._check_overlong()
        check_value(self, "entropy_coef", math.isfinite(self.entropy_coef), "a finite number")
        check_at_least(1, self, "num_epochs")

    @property
    def has_own_loss(self) -> bool:
        """True if `loss` names a function of the user."""
        return ":" in self.loss

    @property
    def learns_from_scores(self) -> bool:
        """True if the scores of samples are in the loss."""
        return True

    @property
    def loss_settings(self) -> dict[str, Any]:
        """The loss's keyword arguments that differ from its own defaults."""
        clips = {"clip_low": self.clip_low, "clip_high": self.clip_high, "dual_clip": self.dual_clip}
        return {name: value for name, value in clips.items() if value is not None} | dict(self.loss_options)

    @property
    def compares_group(self) -> bool:
        """True if the samples of a prompt are compared."""
        return ADVANTAGES[self.advantage].compares_group

    def may_defer_log_probs(self, actor: "EngineConfig") -> bool:
        """True if old log-probs of a step's first mini batch may be left to its update (`OldLogProbs`).

        A reference is compared with all of them before the first update, with dropout that update computes others, and
        router replay R2 needs the routes of all.
        """
        return not self.kl_coef and actor.trains_without_noise and actor.router_replay != "R2"

    def _check_loss(self) -> None:
        if self.has_own_loss:
            problem = f"loss={self.loss} gets its settings from loss_options"
            for key in ("clip_low", "clip_high", "dual_clip"):
                check_value(self, key, getattr(self, key) is None, "null", problem=problem)
            return
        names = f"{', '.join(POLICY_LOSSES)}, or package.module:function"
        check_value(self, "loss", self.loss in POLICY_LOSSES, names)
        options = POLICY_LOSSES[self.loss].options
        check_clip(self.clip_low or 0.0, self.clip_high or 0.0, self.dual_clip)
        for key, value in self.loss_settings.items():
            if key not in options:
                is_own_key = key not in self.loss_options
                raise InputError(
                    f"loss={self.loss} has no option {key}",
                    field=key if is_own_key else f"loss_options.{key}",
                    value=value,
                    allowed="null" if is_own_key else ", ".join(options),
                )

    def _check_kl(self) -> None:
        check_value(self, "kl_coef", 0 <= (self.kl_coef or 0) < math.inf, "0 or more")
        if self.kl_target is not None:
            check_value(self, "kl_target", 0 < self.kl_target < math.inf, "above 0, or null")
            problem, remedy = "kl_coef is 0 or null and cannot adapt", "give kl_coef a positive start value"
            check_value(self, "kl_target", bool(self.kl_coef), "null", problem=problem, remedy=remedy)
        check_value(self, "kl_horizon", 0 < self.kl_horizon < math.inf, "above 0")

    def _check_overlong(self) -> None:
        check_value(self, "overlong_penalty", 0 <= self.overlong_penalty < math.inf, "0 (none) or more")
        check_at_least(1, self, "overlong_buffer")
        is_read = self.overlong_buffer is None or self.overlong_penalty > 0
        check_value(self, "overlong_buffer", is_read, "null where overlong_penalty is 0")


POLICY_FEATURES = (
    ROLLOUT_CORRECTION,
    Feature(
        key="algorithm.advantage",
        is_on=lambda c: c.algorithm.compares_group,
        rules=(
            Rule(
                field="sampling.n",
                allowed="2 or more",
                holds=lambda c: c.sampling.num_samples >= 2,
                why="which compares the samples of a prompt",
                remedy="reinforce_pp and remax work with 1",
            ),
        ),
    ),
    Feature(
        key="algorithm.advantage",
        is_on=lambda c: not c.algorithm.compares_group,
        rules=(only("dynamic_sampling.max_rounds", 0, why="which learns from groups with equal scores too"),),
    ),
    Feature(
        key="algorithm.overlong_buffer",
        rules=(
            Rule(
                field="algorithm.overlong_buffer",
                allowed="at most sampling.max_tokens",
                holds=lambda c: c.algorithm.overlong_buffer <= c.sampling.response_tokens,
            ),
        ),
    ),
    Feature(
        key="algorithm.loss",
        is_on=lambda c: c.algorithm.has_own_loss,
        rules=(only("rollout.log_probs", True, why="a function of yours, which may read rollout_log_probs"),),
    ),
)
"""Demands of `algorithm` on the sampling of a job."""
