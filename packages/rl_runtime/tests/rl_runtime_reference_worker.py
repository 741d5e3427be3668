"""Two ranks: the actor without its adapters computes what a frozen engine of its base model computes."""

from typing import Any

import torch
import torch.distributed as dist

from ds_engine import EngineConfig, LoraConfig, OptimConfig, ZeroConfig
from plinth_testing import SpmdGroup
from rl_core import BatchConfig, pack
from rl_runtime.ranks.model_handle import ModelHandle, WithoutAdapters
from rl_runtime.ranks.train_batch import TrainBatch
from rl_runtime.ranks.trainer_worker import TrainerWorker
from rl_runtime.training.supervised import nll_loss

# stage, sequence_parallel, dtype
CASES = ((2, 1, "float32"), (3, 2, "bfloat16"))


def make_batch() -> TrainBatch:
    """Six sequences in several micro batches, with loss weights."""
    lens = (9, 4, 14, 7, 11, 5)
    ids = torch.randint(3, 64, (100,), generator=torch.Generator().manual_seed(0)).tolist()
    prompts = [ids[n : n + 3] for n, _ in enumerate(lens)]
    responses = [ids[n : n + length] for n, length in enumerate(lens)]
    return TrainBatch(pack(prompts, responses, columns={"weights": torch.full((sum(lens),), 1 / sum(lens))}))


def compare(ranks: SpmdGroup, folder: str, stage: Any, sp: int, dtype: Any) -> None:
    """Trains adapters, then computes the batch with them, without them, and with a frozen engine."""
    config = EngineConfig(
        dtype=dtype,
        zero=ZeroConfig(stage=stage),
        sequence_parallel=sp,
        lora=LoraConfig(rank=4, alpha=8),
        optim=OptimConfig(lr=0.05, warmup_steps=0),
    )
    limit: Any = BatchConfig(token_budget=24)
    actor, ref = (ModelHandle(ranks, role, limit, temperature=0.8) for role in ("actor", "ref"))  # type: ignore[arg-type]
    actor.build(folder, config, total_steps=2)
    ref.build_frozen(folder, config)
    with make_batch() as batch:
        for _ in range(2):
            actor.update(batch.mini_batches[0], nll_loss)
            ours_K, theirs_K = WithoutAdapters(actor).log_probs(batch), ref.log_probs(batch)
            assert torch.equal(ours_K, theirs_K), (stage, sp, dtype)
        trained_K = actor.log_probs(batch)
    assert (trained_K - ours_K).abs().max() > 0.1, "the adapters have learned nothing"


def compare_references(folder: str) -> None:
    worker = TrainerWorker(dist.get_rank(), 2, device="cpu", num_threads=1)
    for stage, sp, dtype in CASES:
        compare(SpmdGroup(worker), folder, stage, sp, dtype)
    for role in ("actor", "ref"):
        worker.drop(role)
