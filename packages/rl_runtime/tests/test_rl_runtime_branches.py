"""An episode that branches: several sequences of a batch, and one sample wherever samples are counted or compared."""

import json
from dataclasses import replace
from typing import Any, get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rl_runtime_samples import group, sample

from rl_core import ADVANTAGES, Batch, LossAggregation, split_mini_batches
from rl_core.batching.prefixes import find_prefixes
from rl_runtime import PolicyConfig, advantages
from rl_runtime.rollout.groups import Collected, from_state, to_state
from rl_runtime.samples import batch_of
from rl_runtime.training.metrics import rollout_metrics
from rl_runtime.training.policy_loss import loss_weights
from rollout_vllm import Request, Sample
from rollout_vllm.episodes.tree import EpisodeTree

MAX_TOKENS = 12
QUICK = settings(deadline=None, derandomize=True, max_examples=40)
COMPARING = [name for name, advantage in ADVANTAGES.items() if not advantage.discounts]


def branching(whole: Sample, sizes: list[int]) -> Sample:
    """The tokens of a sample in paths of these sizes, each behind a context token of its own."""
    ends = np.cumsum(sizes)
    paths = [
        replace(
            whole,
            response_ids=[7, *whole.response_ids[end - size : end]],
            log_probs=[0.0, *whole.log_probs[end - size : end]],  # type: ignore[index]
            response_mask=[False, *[True] * size],
            version_spans=(),
        )
        for end, size in zip(ends, sizes, strict=True)
    ]
    return replace(paths[0], branches=tuple(replace(path, score=None) for path in paths[1:]))


@st.composite
def episodes(draw: st.DrawFn) -> tuple[list[Sample], list[Sample]]:
    """Samples of one to three groups, each in one sequence, and the same with branches."""
    wholes, branched = [], []
    for number in range(draw(st.integers(1, 3))):
        baseline = draw(st.sampled_from([0.0, 0.5]))
        for _ in range(draw(st.integers(2, 3))):
            sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
            reason = draw(st.sampled_from(["stop", "length"]))
            score = draw(st.sampled_from([0.0, 1.0, 0.3]))
            ids = [len(wholes) * 100 + place for place in range(sum(sizes))]
            values: dict[str, Any] = {"score": score, "baseline_score": baseline, "finish_reason": reason}
            wholes.append(sample(ids, group=number, log_probs=-np.array(ids, np.float32), **values))
            branched.append(branching(wholes[-1], sizes))
    return wholes, branched


@QUICK
@pytest.mark.parametrize("name", COMPARING)
@given(episodes())
def test_advantages_count_an_episode_once(name: str, both: tuple[list[Sample], list[Sample]]) -> None:
    config = PolicyConfig(advantage=name, kl_in="reward" if name == "rloo" else "loss")
    columns = []
    for samples in both:
        batch = batch_of(samples)
        noise = torch.from_numpy(np.random.default_rng(0).normal(size=(2, batch.num_targets)))
        batch.add_columns(old_log_probs=noise[0], ref_log_probs=noise[1])
        columns.append(advantages(batch, config, max_tokens=MAX_TOKENS, kl_coef=0.1)[0]["advantages"])
    torch.testing.assert_close(columns[1], columns[0])


@QUICK
@pytest.mark.parametrize("mode", get_args(LossAggregation))
@given(episodes(), st.booleans(), st.integers(1, 2))
def test_losses_weigh_an_episode_as_one_response(
    mode: Any, both: tuple[list[Sample], list[Sample]], filters: bool, num_groups: int
) -> None:
    config = PolicyConfig(loss_aggregation=mode, overlong_filter=filters)
    columns = []
    for samples in both:
        batch = batch_of(samples)
        minis = split_mini_batches(batch.per_sequence["group_ids"].tolist(), num_groups)
        columns.append(loss_weights(batch, config, max_tokens=MAX_TOKENS, mini_batches=minis))
    for name in columns[0]:
        torch.testing.assert_close(columns[1][name], columns[0][name])


@QUICK
@given(episodes())
def test_every_token_keeps_its_log_prob_and_staleness(both: tuple[list[Sample], list[Sample]]) -> None:
    whole, branched = map(batch_of, both)
    assert torch.equal(whole.target_ids_K, branched.target_ids_K)
    for name in ("rollout_log_probs", "staleness"):
        assert torch.equal(whole.columns[name], branched.columns[name])
    assert branched.num_sequences == sum(len(one.paths) for one in both[1])


def test_the_score_is_at_the_end_of_each_path_and_rewards_of_turns_are_at_theirs() -> None:
    whole = sample(5, score=2.0)
    rewarded = branching(replace(whole, score=2.0), [2, 3])
    last = replace(rewarded.branches[0], turn_rewards=[0.0, 0.5, 0.0])
    batch = batch_of([replace(rewarded, turn_rewards=[0.0, 0.25], branches=(last,))])
    batch.add_columns(values=torch.zeros(5))
    columns, _ = advantages(batch, PolicyConfig(advantage="gae"), max_tokens=MAX_TOKENS)
    # 2 - 0.25 - 0.5 is not of a turn: it is what each path ends with
    assert columns["returns"].tolist() == pytest.approx([1.5, 1.5, 1.75, 1.75, 1.25])


def test_ranks_compute_what_branches_have_in_common_once() -> None:
    """The tree of an episode is the tree of shared prefixes."""
    tree, long = EpisodeTree(), [*range(40)]
    for prompt in (long, [*long, 1, 2, 3], [*long, 1, 2, 4], [*long, 1, 2, 3, 1, 2, 5]):
        tree.add(prompt, Sample(sample_index=0, response_ids=[1, 2], log_probs=[0.0, 0.0]))
    main, *branches = tree.samples(sample(0, score=1.0), {})
    batch = batch_of([replace(main, branches=tuple(branches))])
    prefixes = {tuple(row[:size]) for row in map(list, rows_of(batch)) for size in range(1, len(row) + 1)}
    assert find_prefixes(batch.input_ids_T, batch.cu_seqlens_S1, min_tokens=1).num_tokens == len(prefixes) == 40 + 8 + 3
    assert batch.num_targets == 8


def rows_of(batch: Batch) -> list[list[int]]:
    return [row.tolist() for row in batch.input_ids_T.split(batch.seq_lens_S.tolist())]


def test_metrics_and_checkpoints_count_an_episode_once() -> None:
    samples = [branching(sample(5, score=1.0), [2, 3]), sample(3, score=0.0)]
    metrics = rollout_metrics(Collected(samples=tuple(samples), num_failed=0))
    assert (metrics["critic/score/mean"], metrics["rollout/num_samples"]) == (0.5, 2)
    assert (metrics["rollout/num_paths"], metrics["response_length/mean"]) == (1.5, 4)
    samples[1] = replace(samples[1], sample_index=1)
    held = replace(group(samples), request=Request(prompt_id="0", prompt_ids=[1], prompt=samples[0].prompt))
    restored = from_state(json.loads(json.dumps(to_state(held))))
    before, after = map(batch_of, (samples, restored.samples))
    assert torch.equal(before.input_ids_T, after.input_ids_T)
    assert before.per_sequence["sample_ids"].tolist() == after.per_sequence["sample_ids"].tolist() == [0, 0, 1]
