"""Columns stay aligned with their samples and tokens through selection, mini batches and packing; so do losses."""

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_engine import TokenOutputs
from rl_core import BatchConfig, LossAggregation, PackedBatch, gae, token_rewards
from rl_runtime.experience import Experience, ExperienceBatch
from rl_runtime.ranks.train_batch import TrainBatch
from rl_runtime.ranks.trainer_worker import TrainerWorker
from rl_runtime.training.policy import PolicyConfig
from rl_runtime.training.policy_loss import policy_loss, with_loss_weights


@dataclass(frozen=True)
class Prompt:
    id: str
    text: str
    token_ids: tuple[int, ...]
    ground_truth: str = "1"
    data_source: str = "gsm8k"


def make_batch(groups: list[list[int]]) -> ExperienceBatch:
    """Groups of response lengths; every response token's id and log-prob tell which sample it belongs to."""
    items = []
    for group_id, lengths in enumerate(groups):
        prompt = Prompt(str(group_id), f"prompt {group_id}", tuple(range(2 + group_id % 3)))
        for sample_index, length in enumerate(lengths):
            number = len(items)
            items.append(
                Experience(
                    prompt=prompt,
                    group_id=group_id,
                    sample_index=sample_index,
                    response_ids=tuple(1000 * number + t for t in range(length)),
                    response_text="",
                    rollout_log_probs=np.full(length, -number, np.float32),
                    finish_reason="stop",
                    version_spans=((0, length),),
                    score=float(number),
                )
            )
    batch = ExperienceBatch(items=tuple(items))
    return batch.with_column("tag", [np.arange(n) + 1000 * i for i, n in enumerate(batch.response_lens_N.tolist())])


groups_of_lengths = st.lists(st.lists(st.integers(1, 12), min_size=1, max_size=5), min_size=1, max_size=7)


@given(groups=groups_of_lengths, num_prompts=st.integers(1, 4))
def test_mini_batches_keep_groups_whole_and_every_sample_once(groups: list[list[int]], num_prompts: int) -> None:
    batch = make_batch(groups)
    minis = list(map(batch.select, batch.mini_batch_indices(num_prompts)))
    assert sorted(item.score for mini in minis for item in mini.items) == sorted(batch.scores_N.tolist())
    seen = [set(mini.group_ids_N.tolist()) for mini in minis]
    assert all(len(groups) <= num_prompts for groups in seen)
    assert sum(map(len, seen)) == len(groups), "a group was split over mini batches"
    for mini in minis:
        for item, column in zip(mini.items, mini.columns["tag"], strict=True):
            assert column[0] == 1000 * item.score


def packed(batch: ExperienceBatch, num_ranks: int, budget: int) -> list[list[PackedBatch]]:
    """The micro batches of every rank with their columns, as an update gets them."""
    ranks: Any = SimpleNamespace(world_size=num_ranks)
    workers = [TrainerWorker(rank, num_ranks, device="cpu", num_threads=1) for rank in range(num_ranks)]
    deliveries = TrainBatch.of(batch).deliveries(ranks, 1, BatchConfig(token_budget=budget), with_columns=True)
    return [worker._receive(one)[0] for worker, one in zip(workers, deliveries, strict=True)]


@given(groups=groups_of_lengths, num_ranks=st.integers(1, 4), budget=st.integers(8, 64))
def test_packed_columns_stay_aligned_with_their_tokens(groups: list[list[int]], num_ranks: int, budget: int) -> None:
    batch = make_batch(groups)
    ranks = packed(batch, num_ranks, budget)
    assert len({len(rank) for rank in ranks}) == 1, "ranks have different numbers of micro batches"
    seen = 0
    for rank in ranks:
        for micro in rank:
            # The column's value is the token id by construction: alignment is equality.
            assert micro.columns["tag"].long().tolist() == micro.target_ids_K.tolist()
            assert micro.input_ids_T[micro.target_index_K + 1].tolist() == micro.target_ids_K.tolist()
            seen += micro.num_targets
    assert seen == int(batch.response_lens_N.sum())


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
    ids_K = batch.flat("tag").double()
    for name in ("old_log_probs", "ref_log_probs", "advantages"):
        batch = batch.with_column(name, [made_up(tag.astype(np.float64))[name] for tag in batch.columns["tag"]])
    batch = with_loss_weights(batch, config, max_tokens=16)
    found: dict[str, float] = {}
    for micro in (micro for rank in packed(batch, num_ranks, budget) for micro in rank if micro.num_targets):
        own = made_up(micro.target_ids_K.double())
        outputs = TokenOutputs(log_probs_K=own["log_probs"], entropy_K=own["entropy"])
        share = policy_loss(outputs, micro, config=config, kl_coef=0.3)
        for name, value in {"loss": share.loss, **share.metrics}.items():
            found[name] = found.get(name, 0.0) + float(value)

    lens_N = batch.response_lens_N.double()
    length_K = lens_N.repeat_interleave(batch.response_lens_N)
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
    assert found == pytest.approx(
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
    minis = batch.mini_batch_indices(1)
    weighted = with_loss_weights(batch, PolicyConfig(), max_tokens=16, mini_batches=minis)
    for mini in map(weighted.select, minis):
        assert float(mini.flat("weights").sum()) == pytest.approx(1)
        assert float(mini.flat("mean_weights").sum()) == pytest.approx(1)


def test_a_column_of_the_wrong_length_is_refused() -> None:
    batch = make_batch([[3, 2]])
    with pytest.raises(ValueError, match="'bad'"):
        batch.with_column("bad", [np.zeros(3), np.zeros(3)])


def test_a_value_per_sample_is_repeated_over_its_tokens() -> None:
    batch = make_batch([[3, 2]])
    (first, second) = batch.with_per_sequence("c", batch.scores_N + 5).columns["c"]
    assert first.tolist() == [5, 5, 5]
    assert second.tolist() == [6, 6]


def with_context(batch: ExperienceBatch, masks: list[list[bool]]) -> ExperienceBatch:
    """The same samples, with tokens of theirs turned into context; the column goes with the others."""
    items = [
        replace(item, response_mask=np.array(mask), rollout_log_probs=item.rollout_log_probs[np.array(mask)])
        for item, mask in zip(batch.items, masks, strict=True)
    ]
    columns = [column[np.array(mask)] for column, mask in zip(batch.columns["tag"], masks, strict=True)]
    return ExperienceBatch(items=tuple(items)).with_column("tag", columns)


@given(groups=groups_of_lengths, data=st.data())
def test_context_is_read_and_never_predicted(groups: list[list[int]], data: st.DataObject) -> None:
    whole = make_batch(groups)
    lengths = [len(item.response_ids) for item in whole.items]
    masks = [data.draw(st.lists(st.booleans(), min_size=n, max_size=n)) for n in lengths]
    batch = with_context(whole, masks)
    assert batch.response_lens_N.tolist() == [sum(mask) for mask in masks]
    assert batch.num_tokens == whole.num_tokens
    seen: list[int] = []
    num_tokens = 0
    for micro in (micro for rank in packed(batch, 2, 32) for micro in rank):
        num_tokens += micro.num_tokens
        assert micro.columns["tag"].long().tolist() == micro.target_ids_K.tolist()
        assert micro.input_ids_T[micro.target_index_K + 1].tolist() == micro.target_ids_K.tolist()
        seen += micro.target_ids_K.tolist()
    assert num_tokens == batch.num_tokens
    generated = [token for item in batch.items for token in np.array(item.response_ids)[item.response_mask].tolist()]
    assert sorted(seen) == sorted(generated)


def test_advantages_skip_context() -> None:
    """A tool's result earns nothing: the value after a call is that of the first token written after it."""
    batch = with_context(make_batch([[4]]), [[True, False, False, True]])
    rewards_K = token_rewards(torch.tensor([1.0]), batch.response_lens_N)
    advantages_K, returns_K = gae(rewards_K, torch.tensor([0.2, 0.6]), batch.response_lens_N, gamma=1.0, lam=0.0)
    assert advantages_K.tolist() == pytest.approx([0.4, 0.4])
    assert returns_K.tolist() == pytest.approx([0.6, 1.0])
