"""Configuration of the GRPO app."""

from dataclasses import dataclass, field
from typing import get_args

from rl_runtime import JobConfig, PolicyConfig, TrainerConfig
from rl_runtime.training.policy import AdvantageName


@dataclass(frozen=True, kw_only=True)
class AlgorithmConfig(PolicyConfig):
    """Policy gradients without a critic: GRPO, Dr. GRPO, DAPO, RLOO, REINFORCE++, ReMax, GSPO, CISPO."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.advantage == "gae":
            allowed = ", ".join(name for name in get_args(AdvantageName) if name != "gae")
            raise ValueError(
                f"advantage is gae; allowed: {allowed}. gae needs a critic, which the PPO app trains (plinth ppo)"
            )


@dataclass(frozen=True, kw_only=True)
class GrpoConfig(JobConfig):
    """The GRPO app."""

    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    trainer: TrainerConfig = field(default_factory=lambda: TrainerConfig(experiment="grpo"))

    def __post_init__(self) -> None:
        super().__post_init__()
        self.algorithm.check_sampling(self.sampling, self.dynamic_sampling, log_probs=self.rollout.log_probs)

    @property
    def greedy_baseline(self) -> bool:
        """ReMax subtracts the score of a greedy response."""
        return self.algorithm.advantage == "remax"

    @property
    def keeps_reference(self) -> bool:
        """With a KL term, unless the adapters can be turned off."""
        return self.algorithm.kl_coef > 0 and self.actor.lora is None
