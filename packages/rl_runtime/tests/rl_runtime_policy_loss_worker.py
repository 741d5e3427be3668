"""Two ranks: GSPO updates alike with and without sequence parallelism, with its own log-probs as old ones, and with the
prompts of groups computed once."""

from functools import partial

import torch
import torch.distributed as dist

from ds_engine import EngineConfig, LossFn, OptimConfig, ZeroConfig
from plinth_testing import SpmdGroup
from rl_core import BatchConfig, pack
from rl_runtime.ranks.model_handle import ModelHandle
from rl_runtime.ranks.old_log_probs import OldLogProbs
from rl_runtime.ranks.train_batch import TrainBatch
from rl_runtime.ranks.trainer_worker import TrainerWorker
from rl_runtime.training.policy import PolicyConfig
from rl_runtime.training.policy_loss import policy_loss

LENS = (9, 4, 14, 7, 11, 5)


def make_batch(*names: str, groups: bool = False) -> TrainBatch:
    """Six sequences in several micro batches; old log-probs far enough away that bounds are active.

    Args:
        groups: two prompts of 40 tokens with three sequences each, in place of a short prompt of each.
    """
    random = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 64, (100,), generator=random).tolist()
    num_tokens = sum(LENS)
    columns = {
        "old_log_probs": -4.2 + 0.3 * torch.randn(num_tokens, generator=random),
        "advantages": torch.randn(num_tokens, generator=random),
        "weights": torch.full((num_tokens,), 1 / num_tokens),
        "mean_weights": torch.full((num_tokens,), 1 / num_tokens),
    }
    prompts = [ids[n % 2 : n % 2 + 40] if groups else ids[n : n + 3] for n, _ in enumerate(LENS)]
    responses = [ids[n : n + length] for n, length in enumerate(LENS)]
    return TrainBatch(pack(prompts, responses, columns={name: columns[name] for name in names or columns}))


def engine_config(sp: int) -> EngineConfig:
    zero, optim = ZeroConfig(stage=2), OptimConfig(lr=1e-3, warmup_steps=0)
    return EngineConfig(dtype="float32", zero=zero, sequence_parallel=sp, optim=optim)


def update(ranks: SpmdGroup, folder: str, loss: LossFn, sp: int) -> dict[str, float]:
    actor = ModelHandle(ranks, "actor", BatchConfig(token_budget=24))  # type: ignore[arg-type]
    actor.build(folder, engine_config(sp), total_steps=1)
    with make_batch() as train_batch:
        stats = actor.update(train_batch.mini_batches[0], loss)
    return {"loss": stats.loss, "grad_norm": stats.grad_norm, **stats.metrics}


def update_of_groups(ranks: SpmdGroup, folder: str, loss: LossFn, sp: int, *, share: bool) -> dict[str, float]:
    """Statistics of two updates, after which the weights are compared too, by the mean log-prob."""
    actor = ModelHandle(ranks, "actor", BatchConfig(token_budget=64, share_prefixes=share))  # type: ignore[arg-type]
    actor.build(folder, engine_config(sp), total_steps=2)
    with make_batch(groups=True) as train_batch:
        first, second = (actor.update(train_batch.mini_batches[0], loss) for _ in range(2))
        mean = float(actor.log_probs(train_batch).mean())
    return {"grad_norm": first.grad_norm, "later": second.grad_norm, "mean": mean, **second.metrics}


def on_policy_update(
    ranks: SpmdGroup, folder: str, loss: LossFn, sp: int, *, defer_first: bool
) -> tuple[dict[str, float], torch.Tensor]:
    """Statistics and old log-probs of an update whose old log-probs are those of the weights that it updates."""
    actor = ModelHandle(ranks, "actor", BatchConfig(token_budget=24))  # type: ignore[arg-type]
    actor.build(folder, engine_config(sp), total_steps=1)
    with make_batch("advantages", "weights", "mean_weights") as train_batch:
        old = OldLogProbs(actor, train_batch, defer_first=defer_first)
        old.compute()
        stats, later = (old.update(train_batch.mini_batches[0], loss) for _ in range(2))
        old_K = train_batch.batch.columns["old_log_probs"]
    return {"loss": stats.loss, "grad_norm": stats.grad_norm, "later": later.loss, **stats.metrics}, old_K


def update_with_gspo(folder: str) -> None:
    worker = TrainerWorker(dist.get_rank(), 2, device="cpu", num_threads=1)
    ranks = SpmdGroup(worker)
    loss = partial(policy_loss, config=PolicyConfig(loss="gspo"), kl_coef=0.0)
    plain, shared = update(ranks, folder, loss, 1), update(ranks, folder, loss, 2)
    assert plain["grad_norm"] > 1e-3, plain
    assert 0 < plain["clip_fraction"] < 1, "the bounds are not active"
    whole, once = (update_of_groups(ranks, folder, loss, 2, share=share) for share in (False, True))
    assert whole.pop("computed_tokens_per_update") == whole["tokens_per_update"] == 6 * 40 + sum(LENS)
    assert once.pop("computed_tokens_per_update") <= 4 * 40 + sum(LENS)
    (apart, old_K), (own, own_K) = (
        on_policy_update(ranks, folder, loss, 2, defer_first=defer_first) for defer_first in (False, True)
    )
    assert torch.allclose(old_K, own_K, atol=1e-5), (old_K - own_K).abs().max()
    assert own["kl_old"] == 0, own
    assert abs(own["later"] - own["loss"]) > 1e-5, own
    for expected, actual in ((plain, shared), (whole, once), (apart, own)):
        for key, value in expected.items():
            assert abs(actual[key] - value) <= 1e-5 + 1e-4 * abs(value), (key, value, actual[key])
    worker.drop("actor")
