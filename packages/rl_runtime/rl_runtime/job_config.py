"""The configuration sections of every reinforcement-learning app; an app adds its algorithm."""

from dataclasses import dataclass, field, replace
from typing import ClassVar, TypeVar

from ds_engine import EngineConfig, OptimConfig
from rl_core import ADVANTAGES, BatchConfig, ExtraRollout
from rl_data import DataConfig
from rollout_vllm import RolloutConfig, SamplingConfig
from run_kit import TrackingConfig
from weight_sync import SyncConfig

from .config import (
    KEPT_SERVERS,
    STALENESS,
    TURNS,
    UNSERVED,
    FrozenModel,
    ModelConfig,
    TaskSize,
    TrainedModel,
    TrainerConfig,
    check_unserved,
)
from .peer_keys import PEER_KEYS
from .rollout.config import (
    DYNAMIC_SAMPLING,
    GREEDY_BASELINE,
    MATCHED_SERVERS,
    OVERSAMPLING,
    QUANTIZED_CACHE,
    QUANTIZED_SERVERS,
    ROUTER_REPLAY,
    SERVED_ADAPTERS,
    SPECULATIVE,
    DynamicSamplingConfig,
    EpisodeConfig,
    OversamplingConfig,
)
from .rollout.scoring_config import REWARD_MODEL, ScoringConfig
from .rules import Feature, check_features, check_value
from .training.policy import POLICY_FEATURES, PolicyConfig
from .training.supervised_config import SupervisedConfig

FEATURES = (
    MATCHED_SERVERS,
    OVERSAMPLING,
    QUANTIZED_CACHE,
    QUANTIZED_SERVERS,
    SERVED_ADAPTERS,
    SPECULATIVE,
    STALENESS,
    KEPT_SERVERS,
    TURNS,
    GREEDY_BASELINE,
    REWARD_MODEL,
    DYNAMIC_SAMPLING,
    ROUTER_REPLAY,
)
"""Every feature of a job; each stands beside its own configuration."""


@dataclass(frozen=True, kw_only=True)
class InputsConfig:
    """The model and the data of every app."""

    PEER_KEYS: ClassVar = PEER_KEYS
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    task: TaskSize = field(default_factory=TaskSize)


@dataclass(frozen=True, kw_only=True)
class JobConfig(InputsConfig):
    """Model, data, trained policy, rollout and training loop."""

    reward: ScoringConfig = field(default_factory=ScoringConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    actor: EngineConfig = field(default_factory=lambda: EngineConfig(optim=OptimConfig(lr=None)))
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    episode: EpisodeConfig = field(default_factory=EpisodeConfig)
    oversampling: OversamplingConfig = field(default_factory=OversamplingConfig)
    dynamic_sampling: DynamicSamplingConfig = field(default_factory=DynamicSamplingConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    validation: SamplingConfig = field(default_factory=lambda: SamplingConfig(n=1))
    sync: SyncConfig = field(default_factory=SyncConfig)
    warm_start: SupervisedConfig = field(default_factory=SupervisedConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)

    def __post_init__(self) -> None:
        check_value(self, "sampling.temperature", self.sampling.temperature > 0, "above 0")
        check_features(self, self.features)
        for model in self.models[1:]:
            check_unserved(self, model.section)

    @property
    def features(self) -> tuple[Feature, ...]:
        """The features whose demands on other settings are checked; an app adds its own."""
        return FEATURES

    @property
    def models(self) -> tuple[TrainedModel, ...]:
        """The trained models, the actor first."""
        return (TrainedModel(section="actor", engine=self.actor),)

    @property
    def first_stage(self) -> SupervisedConfig:
        """Supervised fine-tuning before the run's own steps."""
        return self.warm_start

    @property
    def keeps_reference(self) -> bool:
        """True if the ranks keep a frozen copy of the first policy (`Job.reference`)."""
        return False

    @property
    def frozen_engine(self) -> EngineConfig:
        """The engine of `frozen_models`: as the actor's, without adapters and what only a served model can have."""
        return replace(self.actor, lora=None, **UNSERVED)

    @property
    def frozen_models(self) -> tuple[FrozenModel, ...]:
        """Models of other folders that the actor's ranks keep beside the trained ones."""
        return self.reward.frozen_models

    @property
    def extra_rollout(self) -> ExtraRollout | None:
        """Further responses to each prompt whose score the algorithm needs, such as a greedy one."""
        return None


@dataclass(frozen=True, kw_only=True)
class PolicyJobConfig(JobConfig):
    """A job whose update is a policy gradient."""

    algorithm: PolicyConfig = field(default_factory=PolicyConfig)

    @property
    def features(self) -> tuple[Feature, ...]:
        """Features of every job and of the algorithm."""
        return (*super().features, *POLICY_FEATURES)

    @property
    def extra_rollout(self) -> ExtraRollout | None:
        """The further responses that the advantage needs."""
        return ADVANTAGES[self.algorithm.advantage].extra_rollout

    @property
    def keeps_reference(self) -> bool:
        """True with a KL term, unless the adapters can be turned off."""
        return bool(self.algorithm.kl_coef) and self.actor.lora is None


JobConfigT = TypeVar("JobConfigT", bound=JobConfig)
