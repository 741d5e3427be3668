"""A batch of scored samples: its columns stay aligned with their tokens through mini batches and packing."""

from collections.abc import Sequence
from typing import Any, get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rl_runtime_samples import prompt, sample

from ds_engine import TokenOutputs
from rl_core import Batch, BatchConfig, LossAggregation, split_mini_batches
from rl_runtime.ranks.train_batch import TrainBatch
from rl_runtime.ranks.trainer_worker import RankPart, TrainerWorker
from rl_runtime.samples import batch_of
from rl_runtime.training.policy import PolicyConfig
from rl_runtime.training.policy_loss import loss_weights, policy_loss


def make_batch(groups: list[list[int]], masks: Sequence[Sequence[bool]] | None = None) -> Batch:
    """Groups of response lengths; the column `tag` is the id of the token, which names its sample and its place."""
    items = []
    for group_id, lengths in enumerate(groups):
        for length in lengths:
            number = len(items)
            fields = {"prompt": prompt(range(2 + group_id % 3)), "group": group_id, "score": float(number)}
            mask = None if masks is None else np.array(masks[number])
            items.append(sample([1000 * number + t for t in range(length)], response_mask=mask, **fields))
    batch = batch_of(items)
    batch.add_columns(tag=batch.target_ids_K.float())
    return batch


groups_of_lengths = st.lists(st.lists(st.integers(1, 12), min_size=1, max_size=5), min_size=1, max_size=7)


def micro_batches(batch: Batch, num_ranks: int, budget: int) -> list[list[Batch]]:
    """The micro batches of every rank with their columns, as an update gets them."""
    held: list[list[Batch]] = []

    class Ranks:
        world_size = num_ranks

        def run(self, method: Any) -> list[bool]:
            assert method in (TrainerWorker.shares_prefixes, TrainerWorker.copies_prefixes)
            return [True]

        def run_each(self, method: Any, parts: list[RankPart], number: int) -> list[list[int]]:
            held.extend(part.micro_batches()[0] for part in parts)
            return [[sum(micro.num_tokens for micro in rank)] for rank in held]

    ranks: Any = Ranks()
    train_batch, layout = TrainBatch(batch), (ranks, 1, BatchConfig(token_budget=budget))
    train_batch.send(layout)
    for micros, columns in zip(held, train_batch.missing_columns(layout, 0), strict=True):
        lens = [micro.num_targets for micro in micros]
        for index, micro in enumerate(micros):
            micro.add_columns(**{name: column_Kr.split(lens)[index] for name, column_Kr in columns.items()})
    assert train_batch.missing_columns(layout, 0) == [{}] * num_ranks, "a column is sent twice"
    return held


@given(groups=groups_of_lengths, num_ranks=st.integers(1, 4), budget=st.integers(8, 64), data=st.data())
def test_columns_stay_aligned_with_their_tokens_and_context_is_never_predicted(
    groups: list[list[int]], num_ranks: int, budget: int, data: st.DataObject
) -> None:
    lengths = [length for group in groups for length in group]
    masks = [data.draw(st.lists(st.booleans(), min_size=n, max_size=n)) for n in lengths]
    batch = make_batch(groups, masks)
    assert batch.response_lens_S.tolist() == [sum(mask) for mask in masks]
    ranks = micro_batches(batch, num_ranks, budget)
    assert len({len(rank) for rank in ranks}) == 1, "ranks have different numbers of micro batches"
    micros = [micro for rank in ranks for micro in rank]
    for micro in micros:
        assert micro.columns["tag"].long().tolist() == micro.target_ids_K.tolist()
        assert micro.input_ids_T[micro.target_index_K + 1].tolist() == micro.target_ids_K.tolist()
    assert sum(micro.num_tokens for micro in micros) == batch.num_tokens
    generated = [1000 * n + t for n, mask in enumerate(masks) for t, own in enumerate(mask) if own]
    assert sorted(token for micro in micros for token in micro.target_ids_K.tolist()) == sorted(generated)


def made_up(ids: Any) -> dict[str, Any]:
    """Log-probs, entropies and advantages as functions of the token id."""
    return {
        "log_probs": -0.5 - ids % 7 * 0.1,
        "old_log_probs": -0.5 - ids % 5 * 0.2,
        "ref_log_probs": -0.5 - ids % 3 * 0.3,
        "entropy": ids % 11 * 0.1,
        "advantages": (ids % 13 - 6) / 3,
    }


@settings(max_examples=30)
@given(
    groups=groups_of_lengths,
    num_ranks=st.integers(1, 3),
    budget=st.integers(8, 64),
    mode=st.sampled_from(get_args(LossAggregation)),
)
def test_micro_batches_share_the_policy_loss_and_metrics_of_their_mini_batch(
    groups: list[list[int]], num_ranks: int, budget: int, mode: Any
) -> None:
    config = PolicyConfig(
        clip_low=0.1, clip_high=0.4, dual_clip=1.2, loss_aggregation=mode, kl_kind="k2", entropy_coef=0.01
    )
    batch = make_batch(groups)
    ids_K = batch.columns["tag"].double()
    batch.add_columns(**{name: made_up(ids_K)[name] for name in ("old_log_probs", "ref_log_probs", "advantages")})
    batch.add_columns(**loss_weights(batch, config, max_tokens=16))
    sums: dict[str, float] = {}
    for micro in (micro for rank in micro_batches(batch, num_ranks, budget) for micro in rank if micro.num_targets):
        own = made_up(micro.target_ids_K.double())
        outputs = TokenOutputs(log_probs_K=own["log_probs"], entropy_K=own["entropy"])
        share = policy_loss(outputs, micro, config=config, kl_coef=0.3)
        for name, value in {"loss": share.loss, **share.metrics}.items():
            sums[name] = sums.get(name, 0.0) + float(value)

    lens_N = batch.response_lens_S.double()
    length_K = lens_N.repeat_interleave(batch.response_lens_S)
    divisor_K = {
        "token_mean": torch.full_like(length_K, float(lens_N.sum())),
        "seq_mean_token_sum": torch.full_like(length_K, len(lens_N)),
        "seq_mean_token_mean": len(lens_N) * length_K,
        "fixed_length": torch.full_like(length_K, len(lens_N) * 16),
    }[mode]
    token = made_up(ids_K)
    ratio_K = (token["log_probs"] - token["old_log_probs"]).exp()
    plain_K, bounded_K = -ratio_K * token["advantages"], -ratio_K.clamp(0.9, 1.4) * token["advantages"]
    worse_K = torch.maximum(plain_K, bounded_K)
    ceiling_K = torch.where(token["advantages"] < 0, -1.2 * token["advantages"], torch.inf)
    pg_K = torch.minimum(worse_K, ceiling_K)
    kl_K = ratio_K * (token["log_probs"] - token["ref_log_probs"]).square() / 2
    assert sums == pytest.approx(
        {
            "loss": float(((pg_K + 0.3 * kl_K - 0.01 * token["entropy"]) / divisor_K).sum()),
            "pg_loss": float((pg_K / divisor_K).sum()),
            "clip_fraction": float(((bounded_K > plain_K) & (worse_K <= ceiling_K)).double().mean()),
            "entropy": float(token["entropy"].mean()),
            "kl": float(kl_K.mean()),
            "ratio": float(ratio_K.mean()),
            "kl_old": float((ratio_K - 1 - ratio_K.log()).mean()),
            "dual_clip_fraction": float((worse_K > ceiling_K).double().mean()),
        },
        rel=1e-4,
        abs=1e-5,
    )


def test_every_mini_batch_has_loss_weights_of_its_own() -> None:
    batch = make_batch([[3, 2], [9], [1, 4]])
    minis = split_mini_batches(batch.per_sequence["group_ids"].tolist(), 1)
    batch.add_columns(**loss_weights(batch, PolicyConfig(), max_tokens=16, mini_batches=minis))
    for mini in map(batch.select, minis):
        assert float(mini.columns["weights"].sum()) == pytest.approx(1)
        assert float(mini.columns["mean_weights"].sum()) == pytest.approx(1)


def test_a_batch_names_the_file_of_each_sequence_that_has_images() -> None:
    seen = [sample(2, images="/a"), sample(3), sample(1, images="/b")]
    batch = batch_of(seen)
    assert batch.images == ("/a", None, "/b")
    assert batch.select([2, 1]).images == ("/b", None)
    assert batch_of([sample(2)]).images == ()


def test_sequences_with_images_share_no_prefixes() -> None:
    """Equal placeholders may stand for different images."""
    whole = [sample(4, prompt=prompt(range(40)), images=images) for images in ("/a", "/b")]
    blind = [sample(4, prompt=prompt(range(40))) for _ in range(2)]
    assert TrainBatch(batch_of(whole))._prefixes is None
    assert TrainBatch(batch_of(blind))._prefixes is not None
