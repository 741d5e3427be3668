"""Configuration of the preference-training app."""

from dataclasses import dataclass, field
from typing import Literal

from rl_runtime import LearningRates, PreferenceJobConfig, TrainingConfig
from rl_runtime.rules import check_value
from rl_runtime.supervised_job_config import ExampleKind


@dataclass(frozen=True, kw_only=True)
class AlgorithmConfig:
    """The preference loss."""

    loss: Literal["dpo", "ipo", "kto"] = "dpo"
    """`dpo` (arXiv:2305.18290) and `ipo` (arXiv:2310.12036) learn from pairs, `kto` (arXiv:2402.01306) from responses
    that are labeled one by one."""
    beta: float = 0.1
    """Strength of the tie to the reference, the initial policy; a large value keeps the policy close."""
    label_smoothing: float = 0.0
    """`dpo`: share of pairs whose labels are taken to be the wrong way round; 0 to below 0.5."""
    desirable_weight: float = 1.0
    """`kto`: weight of desirable responses. With as many of both kinds the paper advises 1 to 3/2 times the weight of
    undesirable ones."""
    undesirable_weight: float = 1.0
    """`kto`: weight of undesirable responses."""

    def __post_init__(self) -> None:
        check_value(self, "beta", 0 < self.beta < float("inf"), "above 0")
        check_value(self, "label_smoothing", 0 <= self.label_smoothing < 0.5, "0 to below 0.5")
        for name, default, loss in (
            ("label_smoothing", 0.0, "dpo"),
            ("desirable_weight", 1.0, "kto"),
            ("undesirable_weight", 1.0, "kto"),
        ):
            value = getattr(self, name)
            check_value(self, name, 0 <= value < float("inf"), "0 or more")
            is_used = self.loss == loss
            check_value(self, name, is_used or value == default, f"{default:g} with loss={self.loss}, not {loss}")
        has_weight = self.desirable_weight + self.undesirable_weight > 0
        check_value(self, "undesirable_weight", has_weight, "above 0 where desirable_weight is 0")


@dataclass(frozen=True, kw_only=True)
class DpoConfig(PreferenceJobConfig):
    """Training on preferences: DPO, IPO, KTO. Without model and data it trains a tiny model on the built-in task."""

    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    trainer: TrainingConfig = field(
        default_factory=lambda: TrainingConfig(experiment="dpo", best_metric="val/accuracy")
    )

    @property
    def examples(self) -> ExampleKind:
        """Kind of the data that the run learns from."""
        return "labeled" if self.algorithm.loss == "kto" else "pairs"

    @property
    def learning_rates(self) -> LearningRates:
        """The values of `supervised.optim.lr=null`."""
        return LearningRates(full=1e-6, lora=1e-5, builtin=3e-4)
