"""Configuration of the GRPO app."""

from dataclasses import dataclass, field

from rl_core import ADVANTAGES
from rl_runtime import PolicyConfig, PolicyJobConfig, TrainerConfig
from rl_runtime.rules import check_value


@dataclass(frozen=True, kw_only=True)
class AlgorithmConfig(PolicyConfig):
    """Policy gradients without a critic: GRPO, Dr. GRPO, DAPO, RLOO, REINFORCE++, ReMax, GSPO, CISPO."""

    def __post_init__(self) -> None:
        super().__post_init__()
        without_critic = [name for name, one in ADVANTAGES.items() if not one.needs_critic]
        problem, remedy = f"{self.advantage} needs a critic", "the PPO app trains a critic (plinth ppo)"
        is_allowed = self.advantage in without_critic
        check_value(self, "advantage", is_allowed, ", ".join(without_critic), problem=problem, remedy=remedy)


@dataclass(frozen=True, kw_only=True)
class GrpoConfig(PolicyJobConfig):
    """RL without a critic: GRPO and relatives. Without model and data it trains SmolLM2, on the CPU a tiny model."""

    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    trainer: TrainerConfig = field(default_factory=lambda: TrainerConfig(experiment="grpo"))
