"""Two ranks: updates summed over parts of their batch against updates on the whole batch."""

from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from rl_runtime_samples import prompt, sample

from ds_engine import EngineConfig, OptimConfig, ZeroConfig
from plinth_testing import SpmdGroup
from rl_core import Batch, BatchConfig
from rl_runtime import (
    OldLogProbs,
    PolicyConfig,
    SummedUpdate,
    TrainBatch,
    advantages,
    compare_with_rollout,
    loss_weights,
    policy_loss,
    update_metrics,
)
from rl_runtime.ranks.model_handle import ModelHandle
from rl_runtime.ranks.trainer_worker import TrainerWorker
from rl_runtime.samples import batch_of
from rollout_vllm import Sample

MAX_TOKENS = 16
BATCH = BatchConfig(token_budget=12)
# ZeRO stage and sequence parallelism, settings of the algorithm
CASES: tuple[tuple[Any, int, dict[str, Any]], ...] = (
    (2, 1, {}),
    (3, 1, {"loss_aggregation": "seq_mean_token_mean", "loss": "gspo", "overlong_filter": True}),
    (2, 2, {"loss_aggregation": "fixed_length", "advantage": "dr_grpo", "entropy_coef": 0.1}),
)


def make_groups() -> list[list[Sample]]:
    """Five groups of three samples, some of them truncated; one group teaches nothing."""
    random = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 64, (200,), generator=random).tolist()
    lens = torch.randint(1, 15, (5, 3), generator=random).tolist()
    return [
        [
            sample(
                ids[10 * number + index : 10 * number + index + length],
                group=number,
                sample_index=index,
                prompt=prompt(ids[100 + number : 104 + number]),
                score=float(number and (index == number % 3)),
                finish_reason="length" if length > 11 else "stop",
            )
            for index, length in enumerate(row)
        ]
        for number, row in enumerate(lens)
    ]


def learn_whole(batch: Batch, actor: ModelHandle, config: PolicyConfig) -> dict[str, float]:
    """The update of the GRPO app on one mini batch."""
    batch.add_columns(**loss_weights(batch, config, max_tokens=MAX_TOKENS))
    columns, metrics = advantages(batch, config, max_tokens=MAX_TOKENS)
    batch.add_columns(**columns)
    with TrainBatch(batch) as train_batch:
        old = OldLogProbs(actor, train_batch, defer_first=True)
        old.compute()
        stats = old.update(train_batch.mini_batches[0], partial(policy_loss, config=config, kl_coef=0.0))
    return metrics | compare_with_rollout(batch, config.rollout_correction) | update_metrics("actor", [stats])


def learn_in_parts(
    update: SummedUpdate, parts: list[list[list[Sample]]], rest: list[list[Sample]]
) -> tuple[dict[str, float], Batch]:
    taken: list[Sample] = []
    for part in parts:
        samples = [one for group in part for one in group]
        assert update.offer(samples)
        taken += samples
    batch = batch_of([*taken, *(one for group in rest for one in group)])
    return update.learn(1, batch, lambda _: nullcontext()), batch


def compare(ranks: SpmdGroup, folder: str, stage: Any, sp: int, settings: dict[str, Any]) -> None:
    config, groups = PolicyConfig(**settings), make_groups()
    engine = EngineConfig(
        dtype="float32",
        zero=ZeroConfig(stage=stage, param_persistence_elements=0),
        sequence_parallel=sp,
        optim=OptimConfig(lr=3e-3, eps=1e-4, warmup_steps=2, grad_clip=0.02),
    )
    whole, summed = (ModelHandle(ranks, role, BATCH, temperature=0.9) for role in ("whole", "summed"))  # type: ignore[arg-type]
    for actor in (whole, summed):
        actor.build(folder, engine, total_steps=4)
    update = SummedUpdate(summed, config, max_tokens=MAX_TOKENS)
    assert not update.offer(groups[0][:1]), "one sample does not fill the micro batches"
    a, b, c, d, e = groups
    for parts, rest in (([[c, a], [b, e]], [d]), ([[e, d, b, a]], [c]), ([[c, d, e], [a, b]], []), ([], groups)):
        metrics, batch = learn_in_parts(update, parts, rest)
        early = sum(one.token_ids.size for part in parts for group in part for one in group)
        assert metrics.pop("actor/early_share") == early / batch.num_tokens
        assert (metrics.pop("actor/early_s") > 0) == bool(parts)
        other = batch_of([one for group in groups for one in group])
        expected = learn_whole(other, whole, config)
        assert metrics.keys() == expected.keys(), metrics.keys() ^ expected.keys()
        for name in ("actor/num_micro_batches", "actor/computed_tokens_per_update"):  # of other micro batches
            del metrics[name], expected[name]
        for name, value in expected.items():
            assert abs(metrics[name] - value) <= 1e-6 + 1e-5 * abs(value), (settings, name, value, metrics[name])
        assert expected["actor/grad_norm"] > 0.02, "clipping acts"
    with TrainBatch(batch) as one, TrainBatch(other) as two:
        ours_K, theirs_K = summed.log_probs(one), whole.log_probs(two)
    assert torch.allclose(ours_K, theirs_K, atol=2e-5), (ours_K - theirs_K).abs().max()
    for role in ("whole", "summed"):
        ranks.worker.drop(role)


def compare_summed_updates(folder: str) -> None:
    ranks = SpmdGroup(TrainerWorker(dist.get_rank(), 2, device="cpu", num_threads=1))
    for stage, sp, settings in CASES:
        compare(ranks, folder, stage, sp, settings)
