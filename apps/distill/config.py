"""Configuration of the distillation app."""

from dataclasses import dataclass, field

from rl_core import ADVANTAGES
from rl_runtime import FrozenModel, PolicyConfig, PolicyJobConfig, TeacherConfig, TrainerConfig
from rl_runtime.rules import Feature, check_value
from rl_runtime.training.teacher_config import TEACHER


@dataclass(frozen=True, kw_only=True)
class AlgorithmConfig(PolicyConfig):
    """The policy update, and the reward beside the teacher."""

    reward_weight: float = 0.0
    """Weight of the reward's advantages (`advantage`) beside the teacher's; 0: the teacher alone. Scores are measured
    in any case."""

    kl_coef: float | None = 0.0
    """0, because the teacher is the reference."""

    @property
    def compares_group(self) -> bool:
        """False without a reward: the teacher compares no samples."""
        return self.learns_from_scores and super().compares_group

    @property
    def learns_from_scores(self) -> bool:
        """False without a weight of the reward."""
        return bool(self.reward_weight)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_value(self, "reward_weight", 0 <= self.reward_weight < float("inf"), "0 or more")
        check_value(self, "kl_coef", not self.kl_coef, "0, because the teacher is the reference")
        advantage = ADVANTAGES[self.advantage]
        is_plain = not advantage.needs_critic and advantage.extra_rollout is None
        check_value(self, "advantage", is_plain, "one without a critic and without an extra rollout")


@dataclass(frozen=True, kw_only=True)
class DistillConfig(PolicyJobConfig):
    """Distillation on the student's own samples, for which a teacher computes log-probs."""

    teacher: TeacherConfig = field(default_factory=TeacherConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    trainer: TrainerConfig = field(default_factory=lambda: TrainerConfig(experiment="distill"))

    @property
    def frozen_models(self) -> tuple[FrozenModel, ...]:
        """The reward model and the teacher, if they are on the ranks."""
        return (*super().frozen_models, *self.teacher.frozen_models)

    @property
    def features(self) -> tuple[Feature, ...]:
        """Features of every job, of the algorithm and of the teacher."""
        return (*super().features, TEACHER)
