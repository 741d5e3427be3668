"""The updates of the GRPO and PPO apps: which columns, mini batches and epochs their models are given."""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch

import apps.grpo.main as grpo
import apps.ppo.main as ppo
from apps.grpo.config import GrpoConfig
from apps.ppo.config import PpoConfig
from ds_engine import StepStats
from rl_core import Batch, ExtraRollout, pack
from rl_runtime import KlCoefficient, MiniBatch, TrainBatch
from run_kit import load_config


class Model:
    """Computes nothing and records what it is given; `ModelHandle` has tests of its own."""

    def __init__(self) -> None:
        self.ranks = object()
        self.num_passes = 0
        self.num_own = 0
        """Updates that computed their own old log-probs."""
        self.updates: list[tuple[int, dict[str, Any]]] = []
        self.columns: dict[str, list[float]] = {}

    def log_probs(self, batch: TrainBatch, *, mini_batches: Sequence[int] | None = None) -> torch.Tensor:
        self.num_passes += 1
        return torch.zeros(8)

    def values(self, batch: TrainBatch) -> torch.Tensor:
        return torch.full((8,), 0.5)

    def update(self, mini_batch: MiniBatch, loss_fn: Any) -> StepStats:
        self.updates.append((mini_batch.index, loss_fn.keywords))
        self.columns = {name: column_K.tolist() for name, column_K in mini_batch.train_batch.batch.columns.items()}
        return StepStats(loss=0.0, metrics={}, grad_norm=1.0, lr=0.1, num_micro_batches=1, num_empty_micro_batches=0)

    def update_with_own_log_probs(
        self, mini_batch: MiniBatch, loss_fn: Any, *, column: str
    ) -> tuple[StepStats, torch.Tensor]:
        assert column == "old_log_probs"
        self.num_own += 1
        return self.update(mini_batch, loss_fn), torch.zeros(8)


def make_batch(**per_sequence: float) -> Batch:
    """Two groups of two samples, of 1, 2, 4 and 1 tokens."""
    facts = {
        "scores": torch.tensor([4.0, 0.0, 7.0, 7.0], dtype=torch.float64),
        "group_ids": torch.tensor([0, 0, 1, 1]),
        "total_lens": torch.tensor([1, 2, 4, 1]),
        "is_truncated": torch.zeros(4, dtype=torch.bool),
    }
    facts |= {name: torch.full((4,), value, dtype=torch.float64) for name, value in per_sequence.items()}
    columns = {"rollout_log_probs": torch.zeros(8), "staleness": torch.zeros(8, dtype=torch.int32)}
    return pack([[1]] * 4, [range(n) for n in (1, 2, 4, 1)], columns=columns, per_sequence=facts)


TWO_BY_TWO = ("algorithm.num_epochs=2", "algorithm.kl_coef=0.3", "batch.train_batch_size=2", "batch.mini_batch_size=1")


def learn(config: GrpoConfig, batch: Batch, ref: Model | None = None) -> tuple[Model, dict[str, float]]:
    """One step of the GRPO app: the actor, with what it was given, and the metrics."""
    actor, kl = Model(), KlCoefficient(config.algorithm)
    return actor, grpo.learn(1, batch, lambda _: nullcontext(), config=config, actor=actor, ref=ref, kl=kl)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("advantage", "values"),
    [
        ("grpo", [2 * 8**-0.5, *[-2 * 8**-0.5] * 2, *[0.0] * 5]),
        ("dr_grpo", [2.0, *[-2.0] * 2, *[0.0] * 5]),
        ("rloo", [4.0, *[-4.0] * 2, *[0.0] * 5]),
        ("remax", [1.0, *[-3.0] * 2, *[4.0] * 5]),
    ],
)
def test_grpo_trains_on_the_advantage_that_its_configuration_names(advantage: str, values: list[float]) -> None:
    config = load_config(GrpoConfig, overrides=[f"algorithm.advantage={advantage}", *TWO_BY_TWO])
    ref = Model()
    actor, metrics = learn(config, make_batch(baseline_scores=3.0), ref)
    assert [(index, keywords["kl_coef"]) for index, keywords in actor.updates] == [(0, 0.3), (1, 0.3)] * 2
    assert (actor.num_passes, ref.num_passes) == (1, 1)
    assert actor.columns["advantages"] == pytest.approx(values, rel=1e-5)
    assert (metrics["actor/ref_kl"], metrics["actor/kl_coef"]) == (0.0, 0.3)


@pytest.mark.parametrize(
    ("options", "deferred"),
    [
        ((), True),
        (("algorithm.kl_coef=0.3",), False),  # the reference is compared before the first update
        (("actor.lora.rank=2",), True),
        (("actor.lora.rank=2", "actor.lora.dropout=0.1"), False),  # the update computes with noise
    ],
)
def test_the_first_update_computes_its_own_old_log_probs_where_it_can(options: tuple[str, ...], deferred: bool) -> None:
    config = load_config(GrpoConfig, overrides=["batch.train_batch_size=2", "batch.mini_batch_size=1", *options])
    actor, metrics = learn(config, make_batch(), Model() if config.algorithm.kl_coef else None)
    assert (actor.num_passes, actor.num_own) == (1, int(deferred)), "the second mini batch is not deferred"
    assert metrics["rollout/log_prob_mismatch"] == 0

    config = load_config(PpoConfig, overrides=["algorithm.critic_warmup_steps=1", "algorithm.kl_coef=0", *options])
    actor, critic, kl = Model(), Model(), KlCoefficient(config.algorithm)
    models: dict[str, Any] = {"actor": actor, "critic": critic, "ref": Model() if config.algorithm.kl_coef else None}
    for step in (1, 2):
        metrics = ppo.learn(step, make_batch(), lambda _: nullcontext(), config=config, kl=kl, **models)
        assert metrics["rollout/log_prob_mismatch"] == 0
    # The first step has no update of the actor; the only mini batch of the second one needs no pass of its own.
    assert (actor.num_passes, actor.num_own) == ((1, 1) if deferred else (2, 0))


def test_the_greedy_response_is_sampled_for_remax_alone() -> None:
    extra = load_config(GrpoConfig, overrides=["algorithm.advantage=remax"]).extra_rollout
    assert extra == ExtraRollout(num_samples=1, temperature=0.0)
    assert load_config(GrpoConfig).extra_rollout is None


@pytest.mark.parametrize("kl_in", ["reward", "loss"])
def test_ppo_trains_the_critic_on_returns_and_the_actor_on_advantages(kl_in: str) -> None:
    options = ("algorithm.whiten_advantages=false", "algorithm.critic_warmup_steps=1", "algorithm.value_clip=0.7")
    config = load_config(PpoConfig, overrides=[f"algorithm.kl_in={kl_in}", *options, *TWO_BY_TWO])
    models = {name: Model() for name in ("actor", "critic", "ref")}
    for step in (1, 2):
        kl = KlCoefficient(config.algorithm)
        ppo.learn(step, make_batch(), lambda _: nullcontext(), config=config, kl=kl, **models)  # type: ignore[arg-type]
    actor, critic = models["actor"], models["critic"]
    assert [(index, keywords["kl_coef"]) for index, keywords in actor.updates] == [(0, 0.3), (1, 0.3)] * 2
    assert critic.updates == [(0, {"value_clip": 0.7}), (1, {"value_clip": 0.7})] * 4
    returns = [4.0, *[0.0] * 2, *[7.0] * 5]
    for columns in (actor.columns, critic.columns):
        assert columns["returns"] == pytest.approx(returns)
        assert columns["advantages"] == pytest.approx([score - 0.5 for score in returns])
