"""The update of the GRPO app: which advantages, mini batches and epochs its models are given."""

from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch

from apps.grpo.config import GrpoConfig
from apps.grpo.main import learn
from ds_engine import StepStats
from rl_data import Prompt
from rl_runtime import Experience, ExperienceBatch, MiniBatch, TrainBatch
from rl_runtime.ranks.model_handle import TokenColumns
from run_kit import load_config


class Model:
    """Computes nothing and records what it is given; `ModelHandle` has tests of its own."""

    def __init__(self) -> None:
        self.columns: list[str] = []
        self.updates: list[tuple[int, float]] = []
        self.advantages: list[list[float]] = []

    def log_probs(self, batch: TrainBatch, *, column: str) -> TokenColumns:
        self.columns.append(column)
        zeros = batch.split(torch.zeros(8))
        return TokenColumns(log_probs=zeros, entropy=zeros)

    def update(self, mini_batch: MiniBatch, loss_fn: Any) -> StepStats:
        self.updates.append((mini_batch.index, loss_fn.keywords["kl_coef"]))
        self.advantages.append(mini_batch.batch._columns["advantages"].tolist())
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


@pytest.mark.parametrize(("normalize", "scale"), [("true", 8**-0.5), ("false", 1.0)])
def test_advantages_relative_to_the_group_reach_every_token_in_every_epoch(normalize: str, scale: float) -> None:
    config = load_config(
        GrpoConfig,
        overrides=[
            f"algorithm.normalize_by_std={normalize}",
            *("algorithm.num_epochs=2", "algorithm.kl_coef=0.3", "batch.train_batch_size=2", "batch.mini_batch_size=1"),
        ],
    )
    batch = ExperienceBatch(items=(sample(0, 1, 4.0), sample(0, 2, 0.0), sample(1, 4, 7.0), sample(1, 1, 7.0)))
    actor, ref = Model(), Model()
    learn(1, batch, lambda _: nullcontext(), config=config, actor=actor, ref=ref)  # type: ignore[arg-type]
    assert actor.updates == [(0, 0.3), (1, 0.3)] * 2
    assert (actor.columns, ref.columns) == (["old_log_probs"], ["ref_log_probs"])
    assert actor.advantages == [pytest.approx([2 * scale, *[-2 * scale] * 2, *[0.0] * 5], rel=1e-5)] * 4
