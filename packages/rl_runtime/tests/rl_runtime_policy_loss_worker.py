"""Two ranks: GSPO gives the same update with and without sequence parallelism, and with its own log-probs as old ones.

Run by test_rl_runtime_policy_loss.py with the folder of a model.
"""

import os
import sys
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from ds_engine import EngineConfig, OptimConfig, ZeroConfig
from plinth_testing import run_ranks
from rl_core import BatchConfig, SequenceData
from rl_runtime.ranks.loss_spec import LossSpec
from rl_runtime.ranks.train_batch import TrainBatch
from rl_runtime.ranks.trainer_worker import TrainerWorker
from rl_runtime.training.policy import PolicyConfig
from rl_runtime.training.policy_loss import policy_loss

LENS = (9, 4, 14, 7, 11, 5)


def make_batch(*names: str) -> TrainBatch:
    """Six sequences in several micro batches; old log-probs far enough away that bounds are active."""
    random = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 64, (100,), generator=random).tolist()
    sequences = [
        SequenceData(prompt_ids=ids[n : n + 3], response_ids=ids[n : n + length]) for n, length in enumerate(LENS)
    ]
    num_tokens = sum(LENS)
    columns = {
        "old_log_probs": -4.2 + 0.3 * torch.randn(num_tokens, generator=random),
        "advantages": torch.randn(num_tokens, generator=random),
        "weights": torch.full((num_tokens,), 1 / num_tokens),
        "mean_weights": torch.full((num_tokens,), 1 / num_tokens),
    }
    return TrainBatch(sequences, columns={name: columns[name] for name in names or columns})


def engine_config(sp: int) -> EngineConfig:
    zero, optim = ZeroConfig(stage=2), OptimConfig(lr=1e-3, warmup_steps=0)
    return EngineConfig(dtype="float32", zero=zero, sequence_parallel=sp, optim=optim)


def update(worker: TrainerWorker, folder: str, loss: LossSpec, sp: int) -> dict[str, float]:
    worker.build("actor", folder, engine_config(sp), 1)
    ranks: Any = SimpleNamespace(world_size=worker.world_size)
    delivery = make_batch().deliveries(ranks, sp, BatchConfig(token_budget=24), with_columns=True)[worker.rank]
    stats, _ = worker.train(delivery, "actor", 0, loss, 1.0)
    return {"loss": stats.loss, "grad_norm": stats.grad_norm, **stats.metrics}


def on_policy_update(
    worker: TrainerWorker, folder: str, loss: LossSpec, sp: int, *, own: bool
) -> tuple[dict[str, float], torch.Tensor]:
    """Statistics and old log-probs of an update whose old log-probs are those of the weights that it updates."""
    worker.build("actor", folder, engine_config(sp), 1)
    ranks: Any = SimpleNamespace(world_size=worker.world_size)
    batch, limit = make_batch("advantages", "weights", "mean_weights"), BatchConfig(token_budget=24)
    delivery = batch.deliveries(ranks, sp, limit, with_columns=True)[worker.rank]
    if own:
        stats, old_Kr = worker.train(delivery, "actor", 0, loss, 1.0, own_log_probs="old_log_probs")
        assert old_Kr is not None
    else:
        old_Kr = worker.log_probs(delivery, "actor", 1.0, "old_log_probs").log_probs_K
        again = batch.deliveries(ranks, sp, limit, with_columns=True)[worker.rank]
        stats, nothing = worker.train(again, "actor", 0, loss, 1.0)
        assert nothing is None
    # A second epoch reads what the first one kept.
    later, _ = worker.train(batch.deliveries(ranks, sp, limit, with_columns=True)[worker.rank], "actor", 0, loss, 1.0)
    return {"loss": stats.loss, "grad_norm": stats.grad_norm, "later": later.loss, **stats.metrics}, old_Kr


def main(folder: str, rank: int) -> None:
    worker = TrainerWorker(rank, 2, device="cpu", num_threads=1)
    worker.connect(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    loss = LossSpec.of(partial(policy_loss, config=PolicyConfig(loss="gspo"), kl_coef=0.0))
    whole, shared = update(worker, folder, loss, 1), update(worker, folder, loss, 2)
    assert whole["grad_norm"] > 1e-3, whole
    assert 0 < whole["clip_fraction"] < 1, "the bounds are not active"
    for key, value in whole.items():
        assert abs(shared[key] - value) <= 1e-5 + 1e-4 * abs(value), (key, value, shared[key])
    for sp in (1, 2):
        (apart, old_Kr), (own, kept_Kr) = (on_policy_update(worker, folder, loss, sp, own=own) for own in (False, True))
        assert torch.allclose(old_Kr, kept_Kr, atol=1e-5), (old_Kr - kept_Kr).abs().max()
        assert own["kl_old"] == 0, own
        assert abs(own["later"] - own["loss"]) > 1e-5, own
        for key, value in apart.items():
            assert abs(own[key] - value) <= 1e-5 + 1e-4 * abs(value), (sp, key, value, own[key])


if __name__ == "__main__":
    # Before the fork: otherwise every rank imports them.
    import deepspeed  # noqa: F401
    import torch._dynamo
    import transformers.models.qwen3.modeling_qwen3  # noqa: F401

    run_ranks(partial(main, sys.argv[1]))
