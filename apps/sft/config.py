"""Configuration of the SFT app."""

from dataclasses import dataclass, field

from ds_engine import EngineConfig
from rl_data import DataConfig
from rl_runtime import ModelConfig, RanksConfig, SupervisedConfig, TaskSize
from run_kit import TrackingConfig


@dataclass(frozen=True, kw_only=True)
class SftConfig:
    """The SFT app. `supervised.optim` is the optimizer; `engine.optim` is not used."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    task: TaskSize = field(default_factory=TaskSize)
    supervised: SupervisedConfig = field(default_factory=lambda: SupervisedConfig(steps=300))
    token_budget: int = 16384
    """Maximum packed tokens (prompt + response) per micro batch; a longer sequence gets a micro batch of its own."""
    engine: EngineConfig = field(default_factory=EngineConfig)
    trainer: RanksConfig = field(default_factory=lambda: RanksConfig(experiment="sft"))
    tracking: TrackingConfig = field(default_factory=TrackingConfig)

    def __post_init__(self) -> None:
        if self.supervised.steps < 1:
            raise ValueError(f"supervised.steps is {self.supervised.steps}; allowed: 1 or more")
        if self.token_budget < 1:
            raise ValueError(f"token_budget is {self.token_budget}; allowed: 1 or more")
