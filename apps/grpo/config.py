"""Configuration of the GRPO app."""

from dataclasses import dataclass, field

from rl_core import ADVANTAGES
from rl_runtime import PolicyConfig, PolicyJobConfig, TrainerConfig
from rl_runtime.rules import Feature, Rule, check_value, only

_IN_PARTS = [
    name
    for name, one in ADVANTAGES.items()
    if one.compares_group and not (one.compares_batch or one.extra_rollout or one.needs_critic)
]


@dataclass(frozen=True, kw_only=True)
class AlgorithmConfig(PolicyConfig):
    """Policy gradients without a critic: GRPO, Dr. GRPO, DAPO, RLOO, REINFORCE++, ReMax, GSPO, CISPO."""

    overlap_rollout: bool = False
    """Compute the gradient of groups that have ended while servers generate the others of the step. The update is the
    same but for rounding; a step is one update."""

    def __post_init__(self) -> None:
        super().__post_init__()
        without_critic = [name for name, one in ADVANTAGES.items() if not one.needs_critic]
        problem, remedy = f"{self.advantage} needs a critic", "the PPO app trains a critic (plinth ppo)"
        is_allowed = self.advantage in without_critic
        check_value(self, "advantage", is_allowed, ", ".join(without_critic), problem=problem, remedy=remedy)


_SUMS = "so the gradient of a step is a sum over its groups"
OVERLAP = Feature(
    key="algorithm.overlap_rollout",
    rules=(
        Rule(
            field="batch.mini_batch_size",
            allowed="batch.train_batch_size",
            holds=lambda c: c.batch.mini_batch_size == c.batch.train_batch_size,
            why=_SUMS,
        ),
        only("algorithm.num_epochs", 1, why=_SUMS),
        only("algorithm.advantage", *_IN_PARTS, why=_SUMS),
        only("algorithm.kl_coef", 0, None, why="so no log-prob of a step is known before its update"),
        only("dynamic_sampling.max_rounds", 0, why=_SUMS),
        only("oversampling.extra_prompts", 0, why=_SUMS),
        only("trainer.max_staleness", 0, why="so servers wait for the update", remedy="staleness overlaps both anyway"),
        only("trainer.take_turns", "never", None, why="so the ranks train while servers generate"),
        only("rollout.deterministic", False, why="so it depends on time in which order gradients are added"),
        only("actor.router_replay", "off", why=_SUMS),
        Rule(
            field="actor.lora.dropout",
            allowed="0",
            holds=lambda c: c.actor.trains_without_noise,
            why="so old log-probs are those of the update",
        ),
        Rule(
            field="reward.model",
            allowed="null, or one behind reward.url",
            holds=lambda c: not c.reward.model_on_ranks,
            why="and a model on the ranks scores whole batches",
        ),
        Rule(field="actor.zero.stage", allowed="2, 3", holds=lambda c: c.actor.zero.stage > 1, why="so gradients wait"),
        only("actor.zero.step_each_micro", False, why="so gradients wait"),
        only("actor.optim.name", "adamw", why="so gradients wait"),
        only("actor.dtype", "bfloat16", "float32", None, why="so the step scales them"),
    ),
)
"""Demands of training in the tail of a rollout."""


@dataclass(frozen=True, kw_only=True)
class GrpoConfig(PolicyJobConfig):
    """RL without a critic: GRPO and relatives. Without model and data it trains SmolLM2, on the CPU a tiny model."""

    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    trainer: TrainerConfig = field(default_factory=lambda: TrainerConfig(experiment="grpo"))

    @property
    def features(self) -> tuple[Feature, ...]:
        """Features of every job with a policy gradient, and of this app."""
        return (*super().features, OVERLAP)

    @property
    def trains_during_rollout(self) -> bool:
        """True with staleness, or if updates overlap with the rollout of their step."""
        return super().trains_during_rollout or self.algorithm.overlap_rollout
