"""Settings of the policy update that GRPO and PPO share: advantage, loss, KL term, length shaping."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, get_args

from rl_core import KLKind, LossAggregation, check_clip

from ..rollout.config import DynamicSamplingConfig
from ..rules import check_at_least, check_value
from .off_policy import RolloutCorrection, check_rollout_correction

if TYPE_CHECKING:
    from ds_engine import EngineConfig
    from rollout_vllm import SamplingConfig

AdvantageName = Literal["grpo", "dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "remax", "gae"]
LossName = Literal["ppo_clip", "gspo", "cispo"]

GROUP_RELATIVE = ("grpo", "dr_grpo", "rloo", "reinforce_pp_baseline")
"""Advantages that compare the samples of a prompt, and need two of them."""
TOKEN_LEVEL = ("reinforce_pp", "gae")
"""Advantages with a reward per token; the others have one per sample."""


@dataclass(frozen=True, kw_only=True)
class PolicyConfig:
    """Advantage, policy loss, KL and entropy terms; docs/algorithms.md describes each algorithm."""

    advantage: AdvantageName = "grpo"
    """How scores become advantages. `grpo` (arXiv:2402.03300), `dr_grpo` (arXiv:2503.20783), `rloo` (arXiv:2402.14740)
    and `reinforce_pp_baseline` (arXiv:2501.03262) compare the samples of a prompt; `remax` (arXiv:2310.10505) compares
    each with the greedy response, which costs one more response per prompt; `reinforce_pp` (arXiv:2501.03262) compares
    with the whole batch; `gae` (arXiv:1506.02438) with a critic, in the PPO app."""
    gamma: float = 1.0
    """Discount per token, for `gae` and `reinforce_pp`."""
    loss: str = "ppo_clip"
    """The policy loss: `ppo_clip` (arXiv:1707.06347), `gspo` (arXiv:2507.18071; use it with
    `loss_aggregation=seq_mean_token_mean`), `cispo` (arXiv:2506.13585), or your own `package.module:function`. The
    trainer ranks call it as `function(log_probs_K, batch, **loss_options)`. It returns the loss of each token, [K];
    `batch.columns` has old_log_probs, advantages and rollout_log_probs, `batch.response_lens_S` the lengths."""
    loss_options: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of a loss function of yours."""
    clip_low: float | None = None
    """The ratio is clipped below 1 - clip_low; null: 0.2 for `ppo_clip`, 3e-4 for `gspo`, 1 (no bound) for `cispo`."""
    clip_high: float | None = None
    """The ratio is clipped above 1 + clip_high (DAPO's clip-higher when larger than clip_low); null: 0.2 for
    `ppo_clip`, 4e-4 for `gspo`, 4 for `cispo`."""
    dual_clip: float | None = None
    """Bound of `ppo_clip` for negative advantages, times the advantage (dual-clip PPO, arXiv:1912.09729); above 1,
    null: no bound."""
    loss_aggregation: LossAggregation = "token_mean"
    """How per-token losses are aggregated; `fixed_length` (Dr. GRPO) divides by sampling.max_tokens."""
    kl_coef: float = 0.0
    """Coefficient of the KL term to the reference model; 0 builds no reference model."""
    kl_kind: KLKind = "k3"
    """KL estimator (Schulman, 'Approximating KL divergence')."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Where the KL term is applied. `loss`: added to the loss (GRPO). `reward`: subtracted from the reward, of each
    token for `gae` and `reinforce_pp` (InstructGPT, arXiv:2203.02155), as a sum over the response for the others."""
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
        if self.gamma != 1 and self.advantage not in TOKEN_LEVEL:
            raise ValueError(
                f"gamma is {self.gamma}; allowed: 1 with advantage={self.advantage}, which has one reward per sample "
                f"and nothing to discount; {' and '.join(TOKEN_LEVEL)} discount"
            )
        self._check_loss()
        self._check_kl()
        self._check_overlong()
        check_value(self, "entropy_coef", math.isfinite(self.entropy_coef), "a finite number")
        check_at_least(1, self, "num_epochs")

    @property
    def has_own_loss(self) -> bool:
        """Whether `loss` names a function of the user."""
        return ":" in self.loss

    @property
    def clip_bounds(self) -> dict[str, float]:
        """The bounds that differ from the loss's own, as keyword arguments."""
        bounds = {"clip_low": self.clip_low, "clip_high": self.clip_high}
        return {name: bound for name, bound in bounds.items() if bound is not None}

    def check_sampling(
        self, sampling: "SamplingConfig", dynamic_sampling: DynamicSamplingConfig, *, log_probs: bool = True
    ) -> None:
        """Refuses sampling that does not fit the algorithm.

        Args:
            log_probs: whether the servers' log-probs are requested (`rollout.log_probs`).

        Raises:
            ValueError: names the key.
        """
        if self.advantage in GROUP_RELATIVE and sampling.n < 2:
            raise ValueError(
                f"sampling.n is {sampling.n}; allowed: 2 or more with algorithm.advantage={self.advantage}, to compare "
                "the samples of a prompt (reinforce_pp and remax work with 1)"
            )
        if self.overlong_buffer is not None and self.overlong_buffer > sampling.max_tokens:
            raise ValueError(
                f"algorithm.overlong_buffer is {self.overlong_buffer}; allowed: 1 to sampling.max_tokens "
                f"({sampling.max_tokens})"
            )
        if dynamic_sampling.max_rounds and self.advantage not in GROUP_RELATIVE:
            raise ValueError(
                f"dynamic_sampling.max_rounds is {dynamic_sampling.max_rounds}; allowed: 0 with "
                f"algorithm.advantage={self.advantage}, which learns from groups with equal scores too"
            )
        check_rollout_correction(self.rollout_correction, sampling)
        if self.rollout_correction.enabled and not log_probs:
            raise ValueError(
                f"rollout.log_probs is False; allowed: true with algorithm.rollout_correction.mode="
                f"{self.rollout_correction.mode}, which compares them with the trainer's"
            )
        if self.has_own_loss and not log_probs:
            raise ValueError(
                f"rollout.log_probs is False; allowed: true with algorithm.loss={self.loss}, a function of yours that "
                "may read rollout_log_probs"
            )

    def leaves_first_log_probs(self, actor: "EngineConfig") -> bool:
        """Whether old log-probs of a step's first mini batch are left to its update (`ModelHandle.log_probs`).

        A reference is compared with all of them before the first update, and with dropout that update computes others.
        """
        return not self.kl_coef and actor.trains_without_noise

    def _check_loss(self) -> None:
        names = ", ".join(get_args(LossName))
        if self.loss not in get_args(LossName) and not self.has_own_loss:
            raise ValueError(f"loss is {self.loss!r}; allowed: {names}, or package.module:function")
        check_clip(self.clip_low or 0.0, self.clip_high or 0.0, self.dual_clip)
        if self.dual_clip is not None and self.loss != "ppo_clip":
            raise ValueError(f"dual_clip is {self.dual_clip}; allowed: null with loss={self.loss}; ppo_clip has it")
        if self.has_own_loss and self.clip_bounds:
            key, value = next(iter(self.clip_bounds.items()))
            raise ValueError(
                f"{key} is {value}; allowed: null with loss={self.loss}, which gets its settings from loss_options"
            )
        if self.loss_options and not self.has_own_loss:
            raise ValueError(
                f"loss_options is {dict(self.loss_options)}; allowed: empty with loss={self.loss}; they are the "
                "arguments of a function of yours"
            )

    def _check_kl(self) -> None:
        check_value(self, "kl_coef", 0 <= self.kl_coef < math.inf, "0 or more")
        if self.kl_target is not None:
            check_value(self, "kl_target", 0 < self.kl_target < math.inf, "above 0, or null")
            if not self.kl_coef:
                raise ValueError(
                    "kl_target is given, but kl_coef is 0 and cannot adapt; give kl_coef a positive start value"
                )
        check_value(self, "kl_horizon", 0 < self.kl_horizon < math.inf, "above 0")

    def _check_overlong(self) -> None:
        check_value(self, "overlong_penalty", 0 <= self.overlong_penalty < math.inf, "0 (none) or more")
        if self.overlong_buffer is None:
            return
        check_value(self, "overlong_buffer", self.overlong_buffer >= 1, "1 or more tokens, or null")
        if not self.overlong_penalty:
            raise ValueError(
                f"overlong_buffer is {self.overlong_buffer}, but overlong_penalty is 0; allowed: null without a penalty"
            )
