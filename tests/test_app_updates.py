"""The updates of the GRPO and PPO apps: which columns, mini batches and epochs their models are given."""

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import apps.grpo.main as grpo
import apps.ppo.main as ppo
from apps.grpo.config import GrpoConfig
from apps.ppo.config import PpoConfig
from ds_engine import StepStats
from rl_data import Prompt
from rl_runtime import Experience, ExperienceBatch, KlCoefficient, MiniBatch, TrainBatch
from rl_runtime.ranks.model_handle import TokenColumns
from run_kit import load_config


class Model:
    """Computes nothing and records what it is given; `ModelHandle` has tests of its own."""

    def __init__(self) -> None:
        self.ranks = object()
        self.computed: list[str] = []
        self.left_first: list[bool] = []
        self.updates: list[tuple[int, dict[str, Any]]] = []
        self.columns: dict[str, list[float]] = {}

    def log_probs(self, batch: TrainBatch, *, column: str, leave_first: bool = False) -> TokenColumns:
        self.computed.append(column)
        self.left_first.append(leave_first)
        batch.add_columns({column: torch.zeros(8)})
        zeros = batch.split(torch.zeros(8))
        return TokenColumns(log_probs=zeros, entropy=zeros)

    def values(self, batch: TrainBatch, *, column: str) -> Any:
        self.computed.append(column)
        return batch.split(torch.full((8,), 0.5))

    def update(self, mini_batch: MiniBatch, loss_fn: Any, *, own_log_probs: str = "") -> StepStats:
        self.own = own_log_probs
        self.updates.append((mini_batch.index, loss_fn.keywords))
        self.columns = {name: column_K.tolist() for name, column_K in mini_batch.batch._columns.items()}
        return StepStats(loss=0.0, metrics={}, grad_norm=1.0, lr=0.1, num_micro_batches=1, num_empty_micro_batches=0)


def sample(group: int, length: int, score: float) -> Experience:
    return Experience(
        prompt=Prompt("p", "p", (1,), "1", "gsm8k"),
        group_id=group,
        sample_index=0,
        response_ids=tuple(range(length)),
        response_text="",
        rollout_log_probs=np.zeros(length, np.float32),
        finish_reason="stop",
        version_spans=((0, length),),
        score=score,
    )


BATCH = ExperienceBatch(items=(sample(0, 1, 4.0), sample(0, 2, 0.0), sample(1, 4, 7.0), sample(1, 1, 7.0)))
TWO_BY_TWO = ("algorithm.num_epochs=2", "algorithm.kl_coef=0.3", "batch.train_batch_size=2", "batch.mini_batch_size=1")


def learn(config: GrpoConfig, batch: ExperienceBatch, ref: Model | None = None) -> tuple[Model, dict[str, float]]:
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
    batch = ExperienceBatch(items=tuple(replace(item, baseline_score=3.0) for item in BATCH.items))
    ref = Model()
    actor, metrics = learn(config, batch, ref)
    assert [(index, keywords["kl_coef"]) for index, keywords in actor.updates] == [(0, 0.3), (1, 0.3)] * 2
    assert (actor.computed, ref.computed) == (["old_log_probs"], ["ref_log_probs"])
    assert actor.columns["advantages"] == pytest.approx(values, rel=1e-5)
    assert (metrics["actor/ref_kl"], metrics["actor/kl_coef"]) == (0.0, 0.3)


@pytest.mark.parametrize(
    ("options", "left"),
    [
        ((), True),
        (("algorithm.kl_coef=0.3",), False),  # the reference is compared before the first update
        (("actor.lora.rank=2",), True),
        (("actor.lora.rank=2", "actor.lora.dropout=0.1"), False),  # the update computes with noise
    ],
)
def test_old_log_probs_of_the_first_update_are_its_own_where_they_can_be(options: tuple[str, ...], left: bool) -> None:
    config = load_config(GrpoConfig, overrides=["batch.train_batch_size=2", "batch.mini_batch_size=1", *options])
    actor, metrics = learn(config, BATCH, Model() if config.algorithm.kl_coef else None)
    assert (actor.left_first, actor.own) == ([left], "old_log_probs")
    assert metrics["rollout/log_prob_mismatch"] == 0

    config = load_config(PpoConfig, overrides=["algorithm.critic_warmup_steps=1", "algorithm.kl_coef=0", *options])
    actor, critic, kl = Model(), Model(), KlCoefficient(config.algorithm)
    models: dict[str, Any] = {"actor": actor, "critic": critic, "ref": Model() if config.algorithm.kl_coef else None}
    for step in (1, 2):
        metrics = ppo.learn(step, BATCH, lambda _: nullcontext(), config=config, kl=kl, **models)
        assert metrics["rollout/log_prob_mismatch"] == 0
    assert actor.left_first == [False, left]  # the first step has no update of the actor


def test_the_greedy_response_is_sampled_for_remax_alone() -> None:
    assert load_config(GrpoConfig, overrides=["algorithm.advantage=remax"]).greedy_baseline
    assert not load_config(GrpoConfig).greedy_baseline


@pytest.mark.parametrize("kl_in", ["reward", "loss"])
def test_ppo_trains_the_critic_on_returns_and_the_actor_on_advantages(kl_in: str) -> None:
    options = ("algorithm.whiten_advantages=false", "algorithm.critic_warmup_steps=1", "algorithm.value_clip=0.7")
    config = load_config(PpoConfig, overrides=[f"algorithm.kl_in={kl_in}", *options, *TWO_BY_TWO])
    models = {name: Model() for name in ("actor", "critic", "ref")}
    for step in (1, 2):
        kl = KlCoefficient(config.algorithm)
        ppo.learn(step, BATCH, lambda _: nullcontext(), config=config, kl=kl, **models)  # type: ignore[arg-type]
    actor, critic = models["actor"], models["critic"]
    assert [(index, keywords["kl_coef"]) for index, keywords in actor.updates] == [(0, 0.3), (1, 0.3)] * 2
    assert critic.updates == [(0, {"value_clip": 0.7}), (1, {"value_clip": 0.7})] * 4
    returns = [4.0, *[0.0] * 2, *[7.0] * 5]
    for columns in (actor.columns, critic.columns):
        assert columns["returns"] == pytest.approx(returns)
        assert columns["advantages"] == pytest.approx([score - 0.5 for score in returns])
