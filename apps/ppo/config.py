"""Configuration of the PPO app."""

from dataclasses import dataclass, field
from typing import Literal

from ds_engine import EngineConfig
from rl_runtime import JobConfig, PolicyConfig, TrainerConfig
from rl_runtime.config import MAX_RANKS


@dataclass(frozen=True, kw_only=True)
class AlgorithmConfig(PolicyConfig):
    """PPO with a critic: generalized advantage estimation, clipped policy and value losses (arXiv:1707.06347)."""

    gamma: float = 1.0
    """Discount per token."""
    lam: float = 1.0
    """Lambda of GAE (arXiv:1506.02438): 1 gives returns minus values, 0 the one-token TD error."""
    whiten_advantages: bool = True
    """Normalize the advantages of a train batch to zero mean and unit variance."""
    value_clip: float | None = 0.2
    """Clip range of a value around its value before the update; null: no clipping."""
    critic_warmup_steps: int = 0
    """Number of first steps that train the critic alone, so that the actor starts with useful values."""
    kl_in: Literal["reward", "loss"] = "reward"
    """Where the KL term is applied: subtracted from the token rewards (InstructGPT), or added to the loss (GRPO)."""
    kl_target: float | None = None
    """Target of the mean KL per token, to which `kl_coef` adapts (arXiv:1909.08593); null: fixed `kl_coef`."""
    kl_horizon: float = 10_000.0
    """Horizon of the adaptation, in sequences."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("gamma", "lam"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} is {getattr(self, name)}; allowed: 0 to 1")
        if self.value_clip is not None and self.value_clip <= 0:
            raise ValueError(f"value_clip is {self.value_clip}; allowed: above 0, or null")
        if self.critic_warmup_steps < 0:
            raise ValueError(f"critic_warmup_steps is {self.critic_warmup_steps}; allowed: 0 or more")
        if self.kl_target is not None:
            if self.kl_target <= 0:
                raise ValueError(f"kl_target is {self.kl_target}; allowed: above 0, or null")
            if not self.kl_coef:
                raise ValueError(
                    "kl_target is given, but kl_coef is 0 and cannot adapt; give kl_coef a positive start value"
                )
        if self.kl_horizon <= 0:
            raise ValueError(f"kl_horizon is {self.kl_horizon}; allowed: above 0")


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
        if not 0 <= self.num_critic_ranks <= MAX_RANKS:
            raise ValueError(
                f"num_critic_ranks is {self.num_critic_ranks}; allowed: 0 (the actor's ranks) to {MAX_RANKS}"
            )


@dataclass(frozen=True, kw_only=True)
class PpoConfig(JobConfig):
    """The PPO app."""

    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    critic: EngineConfig = field(default_factory=EngineConfig)
    trainer: PpoTrainerConfig = field(default_factory=PpoTrainerConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.algorithm.critic_warmup_steps >= self.trainer.total_training_steps:
            raise ValueError(
                f"algorithm.critic_warmup_steps is {self.algorithm.critic_warmup_steps}; allowed: fewer than the "
                f"{self.trainer.total_training_steps} of trainer.total_training_steps, or the actor never trains"
            )
