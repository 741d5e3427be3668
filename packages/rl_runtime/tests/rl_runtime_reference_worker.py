"""Two ranks: the actor without its adapters computes what a frozen engine of its base model computes.

Run by test_rl_runtime_reference.py with the folder of a model.
"""

import os
import sys
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from ds_engine import EngineConfig, LoraConfig, OptimConfig, ZeroConfig
from plinth_testing import run_ranks
from rl_core import BatchConfig, SequenceData
from rl_runtime.ranks.loss_spec import LossSpec
from rl_runtime.ranks.train_batch import TrainBatch
from rl_runtime.ranks.trainer_worker import TrainerWorker
from rl_runtime.training.supervised import nll_loss

# stage, sequence_parallel, dtype: every pair of values occurs
CASES = ((2, 1, "float32"), (2, 2, "bfloat16"), (3, 1, "bfloat16"), (3, 2, "float32"))


def make_batch() -> TrainBatch:
    """Six sequences in several micro batches, with loss weights."""
    lens = (9, 4, 14, 7, 11, 5)
    ids = torch.randint(3, 64, (100,), generator=torch.Generator().manual_seed(0)).tolist()
    sequences = [
        SequenceData(prompt_ids=ids[n : n + 3], response_ids=ids[n : n + length]) for n, length in enumerate(lens)
    ]
    return TrainBatch(sequences, columns={"weights": torch.full((sum(lens),), 1 / sum(lens))})


def compare(worker: TrainerWorker, folder: str, stage: Any, sp: int, dtype: Any) -> None:
    """Trains adapters, then computes the batch with them, without them, and with a frozen engine."""
    config = EngineConfig(
        dtype=dtype,
        zero=ZeroConfig(stage=stage),
        sequence_parallel=sp,
        lora=LoraConfig(rank=4, alpha=8),
        optim=OptimConfig(lr=0.05, warmup_steps=0),
    )
    ranks: Any = SimpleNamespace(world_size=worker.world_size)
    delivery = make_batch().deliveries(ranks, sp, BatchConfig(token_budget=24), with_columns=True)[worker.rank]
    worker.build("actor", folder, config, 2)
    worker.build("ref", folder, replace(config, optim=OptimConfig()), None)
    for _ in range(2):
        worker.train(delivery, "actor", 0, LossSpec.of(nll_loss), 0.8)
        delivery = replace(delivery, mini_batches=None, columns={})
        ours = worker.log_probs(delivery, "actor", 0.8, None, adapters=False)
        theirs = worker.log_probs(delivery, "ref", 0.8)
        assert torch.equal(ours.log_probs_K, theirs.log_probs_K), (stage, sp, dtype)
        assert torch.equal(ours.entropy_K, theirs.entropy_K), (stage, sp, dtype)
    trained = worker.log_probs(delivery, "actor", 0.8)
    assert (trained.log_probs_K - ours.log_probs_K).abs().max() > 0.1, "the adapters have learned nothing"


def main(folder: str, rank: int) -> None:
    worker = TrainerWorker(rank, 2, device="cpu", num_threads=1)
    worker.connect(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    for stage, sp, dtype in CASES:
        compare(worker, folder, stage, sp, dtype)


if __name__ == "__main__":
    # Before the fork: otherwise every rank imports them.
    import deepspeed  # noqa: F401
    import peft  # noqa: F401
    import transformers.models.qwen3.modeling_qwen3  # noqa: F401

    run_ranks(partial(main, sys.argv[1]))
