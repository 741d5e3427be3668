"""Configuration of the distillation app."""

from dataclasses import dataclass, field, replace

from rl_core import ADVANTAGES
from rl_runtime import FrozenModel, InputError, JobConfig, PolicyConfig, TeacherConfig, TrainerConfig
from rl_runtime.rules import check_value


@dataclass(frozen=True, kw_only=True)
class AlgorithmConfig(PolicyConfig):
    """The policy update, and the reward beside the teacher."""

    reward_weight: float = 0.0
    """Weight of the reward's advantages (`advantage`) beside the teacher's; 0: the teacher alone. Scores are measured
    in any case."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_value(self, "reward_weight", 0 <= self.reward_weight < float("inf"), "0 or more")
        check_value(self, "kl_coef", not self.kl_coef, "0, because the teacher is the reference")
        advantage = ADVANTAGES[self.advantage]
        if advantage.needs_critic or advantage.extra_rollout is not None:
            raise InputError(
                field="advantage", value=self.advantage, allowed="one without a critic and without an extra rollout"
            )


@dataclass(frozen=True, kw_only=True)
class DistillConfig(JobConfig):
    """The distillation app."""

    teacher: TeacherConfig = field(default_factory=TeacherConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    trainer: TrainerConfig = field(default_factory=lambda: TrainerConfig(experiment="distill"))

    @property
    def frozen_models(self) -> tuple[FrozenModel, ...]:
        """The reward model and the teacher, if they are on the ranks."""
        return (*super().frozen_models, *self.teacher.frozen_models)

    def __post_init__(self) -> None:
        super().__post_init__()
        algorithm = self.algorithm
        if not algorithm.reward_weight:  # then nothing compares the samples of a prompt
            algorithm = replace(algorithm, advantage="reinforce_pp")
        algorithm.check_sampling(self.sampling, self.dynamic_sampling, log_probs=self.rollout.log_probs)
