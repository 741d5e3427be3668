"""The configuration sections of every reinforcement-learning app; an app adds its algorithm."""

from dataclasses import dataclass, field, replace
from typing import TypeVar

from ds_engine import EngineConfig
from rl_core import BatchConfig
from rl_data import DataConfig
from rollout_vllm import RolloutConfig, SamplingConfig
from run_kit import TrackingConfig
from weight_sync import SyncConfig

from .config import FrozenModel, ModelConfig, TaskSize, TrainedModel, TrainerConfig, check_value
from .rollout.config import DynamicSamplingConfig, EpisodeConfig, OversamplingConfig
from .rollout.scoring_config import ScoringConfig
from .training.supervised_config import SupervisedConfig


@dataclass(frozen=True, kw_only=True)
class JobConfig:
    """Model, data, trained policy, rollout and training loop."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    task: TaskSize = field(default_factory=TaskSize)
    reward: ScoringConfig = field(default_factory=ScoringConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    actor: EngineConfig = field(default_factory=EngineConfig)
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
        self._check_log_probs()
        self._check_quantization()
        self._check_staleness()
        if self.greedy_baseline and self.oversampling.extra_prompts:
            raise ValueError(
                f"oversampling.extra_prompts is {self.oversampling.extra_prompts}; allowed: 0 with a greedy baseline "
                "(ReMax), which a partial rollout of an earlier policy version would lack"
            )
        self._check_reward_model()
        if self.dynamic_sampling.max_rounds and (self.greedy_baseline or self.sampling.n < 2):
            allowed = "with a greedy baseline (ReMax)" if self.greedy_baseline else f"with sampling.n={self.sampling.n}"
            raise ValueError(
                f"dynamic_sampling.max_rounds is {self.dynamic_sampling.max_rounds}; allowed: 0 {allowed}, because no "
                "scores are compared within a group"
            )

    def _check_reward_model(self) -> None:
        """A reward model on the ranks scores after the rollout, which cannot ask for its scores."""
        if not self.reward.model_on_ranks:
            return
        served = "or a served one (reward.url, reward.service=reward_model)"
        if self.greedy_baseline:
            raise ValueError(
                f"reward.model is {self.reward.model}; allowed with a greedy baseline (ReMax): null, {served}"
            )
        if self.dynamic_sampling.max_rounds:
            raise ValueError(
                f"dynamic_sampling.max_rounds is {self.dynamic_sampling.max_rounds}; allowed: 0 with reward.model on "
                f"the ranks, which scores after the rollout, {served}"
            )

    def _check_staleness(self) -> None:
        """What does not work while servers generate for later steps."""
        staleness, oversampling = self.trainer.max_staleness, self.oversampling
        if not staleness:
            if self.trainer.stale_groups != "finish":
                raise ValueError(
                    f"trainer.stale_groups is {self.trainer.stale_groups}; allowed: finish with trainer.max_staleness=0"
                )
            return
        with_it = f"with trainer.max_staleness={staleness}"
        if self.rollout.deterministic:
            raise ValueError(
                f"rollout.deterministic is True; allowed: false {with_it}, because it depends on "
                "time which weights sample a token"
            )
        if self.sync.holds_requests and self.rollout.urls:
            raise ValueError(
                f"sync.running_requests is {self.sync.running_requests}; allowed: wait {with_it} and rollout.urls: "
                "existing servers do not label tokens with policy versions"
            )
        if self.dynamic_sampling.max_rounds and oversampling.extra_prompts:
            raise ValueError(
                f"dynamic_sampling.max_rounds is {self.dynamic_sampling.max_rounds}; allowed: 0 {with_it} and "
                f"oversampling.extra_prompts={oversampling.extra_prompts}, whose steps train on the groups that end "
                "first: use one of the two"
            )
        if oversampling.extra_prompts > self.batch.train_batch_size:
            raise ValueError(
                f"oversampling.extra_prompts is {oversampling.extra_prompts}; allowed: at most batch.train_batch_size "
                f"({self.batch.train_batch_size}) {with_it}, so that a step can train on all that the last one left"
            )
        if oversampling.extra_prompts and not oversampling.partial_rollouts:
            raise ValueError(
                f"oversampling.partial_rollouts is False; allowed: true {with_it} (trainer.stale_groups=drop gives up "
                "groups that are too old)"
            )
        if not oversampling.extra_prompts and self.trainer.stale_groups != "finish":
            raise ValueError(
                f"trainer.stale_groups is {self.trainer.stale_groups}; allowed: finish without "
                "oversampling.extra_prompts, where each step waits for all of its groups"
            )

    def _check_quantization(self) -> None:
        """Servers that round their own base can neither receive whole weights nor equal the trainer's."""
        quantization = self.rollout.quantization
        if quantization == "none":
            return
        if self.rollout.max_lora_rank is None:
            raise ValueError(
                f"rollout.quantization is {quantization}; allowed: none without rollout.max_lora_rank: whole weights "
                "cannot be pushed into quantized layers, adapters alone can"
            )
        if not self.rollout.log_probs:
            raise ValueError(
                f"rollout.log_probs is False; allowed: true with rollout.quantization={quantization}, whose error they "
                "show"
            )

    def _check_log_probs(self) -> None:
        """Without the servers' log-probs, nothing shows how far their policy is from the trainer's."""
        if self.rollout.log_probs:
            return
        if self.oversampling.extra_prompts and self.oversampling.partial_rollouts:
            raise ValueError(
                f"rollout.log_probs is False; allowed: true with oversampling.extra_prompts="
                f"{self.oversampling.extra_prompts} and partial_rollouts, whose responses mix policy versions"
            )
        if self.rollout.kv_cache_dtype != "auto":
            raise ValueError(
                f"rollout.log_probs is False; allowed: true with rollout.kv_cache_dtype={self.rollout.kv_cache_dtype}, "
                "whose error they show"
            )

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
        """Whether the ranks keep a frozen copy of the first policy (`Job.reference`)."""
        return False

    @property
    def frozen_engine(self) -> EngineConfig:
        """The engine of `frozen_models`: as the actor's, without adapters."""
        return replace(self.actor, lora=None)

    @property
    def frozen_models(self) -> tuple[FrozenModel, ...]:
        """Models of other folders that the actor's ranks keep beside the trained ones."""
        return self.reward.frozen_models

    @property
    def greedy_baseline(self) -> bool:
        """Whether the algorithm needs the score of a greedy response to each prompt (`Experience.baseline_score`)."""
        return False


JobConfigT = TypeVar("JobConfigT", bound=JobConfig)
