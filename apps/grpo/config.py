"""Configuration of the GRPO app."""

import warnings
from dataclasses import dataclass, field
from typing import get_args

from rl_runtime import JobConfig, PolicyConfig, TrainerConfig
from rl_runtime.training.policy import AdvantageName


@dataclass(frozen=True, kw_only=True)
class AlgorithmConfig(PolicyConfig):
    """Policy gradients without a critic: GRPO, Dr. GRPO, DAPO, RLOO, REINFORCE++, ReMax, GSPO, CISPO."""

    normalize_by_std: bool | None = None
    """Deprecated: write `advantage=grpo` for true, `advantage=dr_grpo` for false."""

    def __post_init__(self) -> None:
        if self.normalize_by_std is not None:
            self._replace_normalize_by_std(self.normalize_by_std)
        super().__post_init__()
        if self.advantage == "gae":
            allowed = ", ".join(name for name in get_args(AdvantageName) if name != "gae")
            raise ValueError(
                f"advantage is gae; allowed: {allowed}. gae needs a critic, which the PPO app trains (plinth ppo)"
            )

    def _replace_normalize_by_std(self, normalize: bool) -> None:
        """Sets `advantage` as the old key says, so that the resolved configuration has the new key alone."""
        if self.advantage not in ("grpo", "dr_grpo"):
            raise ValueError(f"normalize_by_std is {normalize}; allowed: null with advantage={self.advantage}")
        name = "grpo" if normalize else "dr_grpo"
        warnings.warn(
            f"algorithm.normalize_by_std is deprecated: write algorithm.advantage={name}",
            DeprecationWarning,
            stacklevel=4,
        )
        object.__setattr__(self, "advantage", name)
        object.__setattr__(self, "normalize_by_std", None)


@dataclass(frozen=True, kw_only=True)
class GrpoConfig(JobConfig):
    """The GRPO app."""

    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    trainer: TrainerConfig = field(default_factory=lambda: TrainerConfig(experiment="grpo"))

    def __post_init__(self) -> None:
        super().__post_init__()
        self.algorithm.check_sampling(self.sampling, self.dynamic_sampling)
        self.algorithm.check_rollout(log_probs=self.rollout.log_probs)

    @property
    def greedy_baseline(self) -> bool:
        """ReMax subtracts the score of a greedy response."""
        return self.algorithm.advantage == "remax"

    @property
    def keeps_reference(self) -> bool:
        """With a KL term, unless the adapters can be turned off."""
        return self.algorithm.kl_coef > 0 and self.actor.lora is None
