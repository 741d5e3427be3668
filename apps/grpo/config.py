"""Configuration of the GRPO app."""

from dataclasses import dataclass, field

from rl_runtime import JobConfig, PolicyConfig, TrainerConfig


@dataclass(frozen=True, kw_only=True)
class AlgorithmConfig(PolicyConfig):
    """GRPO: group-normalized advantages and a clipped policy loss (DeepSeekMath, arXiv:2402.03300)."""

    normalize_by_std: bool = True
    """Divide advantages by the group's standard deviation (GRPO) or not (Dr.GRPO)."""


@dataclass(frozen=True, kw_only=True)
class GrpoConfig(JobConfig):
    """The GRPO app."""

    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    trainer: TrainerConfig = field(default_factory=lambda: TrainerConfig(experiment="grpo"))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sampling.n < 2:
            raise ValueError(f"sampling.n is {self.sampling.n}; allowed: 2 or more, to compare samples in groups")
