"""Everything `apps.grpo.main` can be told, section by section."""

import math
from dataclasses import dataclass, field
from typing import Literal

from ds_engine import EngineConfig
from rl_core import BatchConfig
from rl_data import DataConfig, RewardConfig
from rl_runtime import ModelConfig, SupervisedConfig, TaskSize, TrackingConfig, TrainerConfig
from rollout_vllm import RolloutConfig, SamplingConfig
from weight_sync import SyncConfig


@dataclass(frozen=True, kw_only=True)
class AlgorithmConfig:
    """GRPO: group-normalised advantages and a clipped policy loss (DeepSeekMath, arXiv:2402.03300)."""

    normalize_by_std: bool = True
    """Divide advantages by the group's standard deviation (GRPO) or not (Dr.GRPO)."""
    clip_low: float = 0.2
    """The ratio is clipped below 1 - clip_low."""
    clip_high: float = 0.2
    """The ratio is clipped above 1 + clip_high (DAPO's clip-higher when larger than clip_low)."""
    dual_clip: float | None = None
    """For negative advantages the loss is bounded by dual_clip times the advantage; above 1, null for no bound."""
    loss_aggregation: Literal["token_mean", "seq_mean_token_sum", "seq_mean_token_mean", "fixed_length"] = "token_mean"
    """How token losses make the mini-batch loss; `fixed_length` (Dr.GRPO) divides by sampling.max_tokens."""
    kl_coef: float = 0.0
    """Weight of the KL term to the reference model in the loss; 0 builds no reference model."""
    kl_kind: Literal["k1", "k2", "k3", "abs"] = "k3"
    """KL estimator (Schulman, 'Approximating KL divergence')."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus."""
    num_epochs: int = 1
    """Passes over each train batch."""

    def __post_init__(self) -> None:
        if not 0 < self.clip_low < 1:
            raise ValueError(f"clip_low is {self.clip_low}; allowed: between 0 and 1")
        if self.clip_high <= 0:
            raise ValueError(f"clip_high is {self.clip_high}; allowed: above 0")
        if self.dual_clip is not None and self.dual_clip <= 1:
            raise ValueError(f"dual_clip is {self.dual_clip}; allowed: above 1, or null")
        if not 0 <= self.kl_coef < math.inf:
            raise ValueError(f"kl_coef is {self.kl_coef}; allowed: 0 or more")
        if not math.isfinite(self.entropy_coef):
            raise ValueError(f"entropy_coef is {self.entropy_coef}; allowed: a finite number")
        if self.num_epochs < 1:
            raise ValueError(f"num_epochs is {self.num_epochs}; allowed: 1 or more")


@dataclass(frozen=True, kw_only=True)
class GrpoConfig:
    """The GRPO app."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    task: TaskSize = field(default_factory=TaskSize)
    reward: RewardConfig = field(default_factory=RewardConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    actor: EngineConfig = field(default_factory=EngineConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    validation: SamplingConfig = field(default_factory=lambda: SamplingConfig(n=1))
    sync: SyncConfig = field(default_factory=SyncConfig)
    warm_start: SupervisedConfig = field(default_factory=SupervisedConfig)
    trainer: TrainerConfig = field(default_factory=lambda: TrainerConfig(experiment="grpo"))
    tracking: TrackingConfig = field(default_factory=TrackingConfig)

    def __post_init__(self) -> None:
        if self.sampling.n < 2:
            raise ValueError(f"sampling.n is {self.sampling.n}; allowed: 2 or more, samples are compared in groups")
        if self.sampling.temperature <= 0:
            raise ValueError(f"sampling.temperature is {self.sampling.temperature}; allowed: above 0")
