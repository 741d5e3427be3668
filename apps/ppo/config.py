"""Configuration of the PPO app."""

from dataclasses import dataclass, field
from typing import Literal

from ds_engine import EngineConfig, OptimConfig
from rl_core import ADVANTAGES
from rl_runtime import PolicyConfig, PolicyJobConfig, TrainedModel, TrainerConfig
from rl_runtime.config import MAX_RANKS
from rl_runtime.rules import check_at_least, check_value


@dataclass(frozen=True, kw_only=True)
class AlgorithmConfig(PolicyConfig):
    """PPO with a critic: generalized advantage estimation, clipped policy and value losses (arXiv:1707.06347)."""

    advantage: str = "gae"
    """Estimator of the advantages: `gae` (arXiv:1506.02438). The GRPO app has those without a critic."""
    kl_in: Literal["loss", "reward"] = "reward"
    """Place of the KL term: subtracted from the token rewards (InstructGPT, arXiv:2203.02155), or added to the
    loss (GRPO)."""
    lam: float = 1.0
    """Lambda of GAE (arXiv:1506.02438): 1 gives returns minus values, 0 the one-token TD error."""
    whiten_advantages: bool = True
    """Normalize the advantages of a train batch to zero mean and unit variance."""
    value_clip: float | None = 0.2
    """Clip range of a value around its value before the update; null: no clipping."""
    critic_warmup_steps: int = 0
    """Number of first steps that train the critic alone, so that the actor starts with useful values."""

    def __post_init__(self) -> None:
        super().__post_init__()
        with_critic = [name for name, one in ADVANTAGES.items() if one.needs_critic]
        problem = f"{self.advantage} has no use for this app's critic"
        remedy = f"use the GRPO app: plinth grpo algorithm.advantage={self.advantage}"
        is_allowed = self.advantage in with_critic
        check_value(self, "advantage", is_allowed, ", ".join(with_critic), problem=problem, remedy=remedy)
        check_value(self, "lam", 0 <= self.lam <= 1, "0 to 1")
        check_value(self, "value_clip", self.value_clip is None or self.value_clip > 0, "above 0, or null")
        check_at_least(0, self, "critic_warmup_steps")


@dataclass(frozen=True, kw_only=True)
class PpoTrainerConfig(TrainerConfig):
    """The training loop, with ranks for the critic."""

    experiment: str = "ppo"
    """Name of the run; the run folder is `<output_dir>/<experiment>_<timestamp>`."""
    num_critic_ranks: int = 0
    """Number of ranks for the critic alone, on CUDA one GPU each after the actor's; actor and critic then compute at
    the same time. 0: the critic shares the actor's ranks."""

    def __post_init__(self) -> None:
        super().__post_init__()
        allowed = f"0 (the actor's ranks) to {MAX_RANKS}"
        check_value(self, "num_critic_ranks", 0 <= self.num_critic_ranks <= MAX_RANKS, allowed)


@dataclass(frozen=True, kw_only=True)
class PpoConfig(PolicyJobConfig):
    """RL training with a critic (PPO). Without model and data it trains a tiny model on the built-in task."""

    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    critic: EngineConfig = field(default_factory=lambda: EngineConfig(optim=OptimConfig(lr=None)))
    trainer: PpoTrainerConfig = field(default_factory=PpoTrainerConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        steps = self.trainer.total_training_steps
        trains = steps is None or self.algorithm.critic_warmup_steps < steps
        problem, allowed = "the actor would never train", f"fewer than trainer.total_training_steps ({steps})"
        check_value(self, "algorithm.critic_warmup_steps", trains, allowed, problem=problem)

    @property
    def models(self) -> tuple[TrainedModel, ...]:
        """The actor and the critic."""
        critic = TrainedModel(
            section="critic", engine=self.critic, head="value", own_ranks=self.trainer.num_critic_ranks
        )
        return (*super().models, critic)
