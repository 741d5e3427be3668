"""Configuration of the reward-model app."""

from dataclasses import dataclass, field

from rl_runtime import LearningRates, PreferenceJobConfig, TrainingConfig
from rl_runtime.rules import check_value


@dataclass(frozen=True, kw_only=True)
class AlgorithmConfig:
    """The Bradley-Terry loss."""

    center_coef: float = 0.0
    """Weight of (chosen score + rejected score)^2, which keeps the scores of a pair around 0 (arXiv:2312.09244 takes
    0.01); the loss alone leaves their sum open."""

    def __post_init__(self) -> None:
        check_value(self, "center_coef", 0 <= self.center_coef < float("inf"), "0 or more")


@dataclass(frozen=True, kw_only=True)
class RewardConfig(PreferenceJobConfig):
    """Training of reward models on pairs. Without model and data it trains a tiny model on the built-in task."""

    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    trainer: TrainingConfig = field(
        default_factory=lambda: TrainingConfig(experiment="reward", best_metric="val/accuracy")
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        num_samples = self.supervised.num_samples
        check_value(self, "supervised.num_samples", not num_samples, "0, because a reward model answers no prompts")

    @property
    def learning_rates(self) -> LearningRates:
        """The values of `supervised.optim.lr=null`."""
        return LearningRates(full=1e-5, lora=1e-4, builtin=1e-3)
