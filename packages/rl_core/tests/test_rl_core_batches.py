"""Partitions, mini batches, micro-batch plans and layouts."""

import dataclasses
import random
import re
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plinth_testing.strategies import seeds
from rl_core import (
    BatchConfig,
    BatchError,
    BatchLayout,
    MicroBatchPlan,
    balanced_partition,
    batch_layout,
    plan_micro_batches,
    split_mini_batches,
)
from rl_core.batching.plan import first_fit, level_bins

PROPERTY = settings(deadline=None, derandomize=True, max_examples=100)
lengths_strategy = st.lists(st.integers(1, 300), min_size=1, max_size=60)
limits_strategy = st.one_of(
    st.fixed_dictionaries({"token_budget": st.integers(1, 900)}),
    st.fixed_dictionaries({"micro_batch_size": st.integers(1, 9)}),
    st.fixed_dictionaries({"token_budget": st.integers(1, 900), "micro_batch_size": st.integers(1, 9)}),
)
ranks_strategy = st.integers(1, 8)


@st.composite
def plan_cases(draw: st.DrawFn) -> tuple[list[int], int, dict[str, int]]:
    """lengths, num_ranks, limits; half of them split full budgets, where level_bins fails and first_fit is used."""
    num_ranks = draw(ranks_strategy)
    if draw(st.booleans()):
        return draw(lengths_strategy), num_ranks, draw(limits_strategy)
    budget = draw(st.integers(4, 40))
    lengths: list[int] = []
    for cuts in draw(st.lists(st.lists(st.integers(1, budget - 1), max_size=3), min_size=1, max_size=9)):
        borders = [0, *sorted(set(cuts)), budget]
        lengths += [after - before for before, after in pairwise(borders)]
    limits = {"token_budget": budget}
    if draw(st.booleans()):
        limits["micro_batch_size"] = draw(st.integers(1, 4))
    return draw(st.permutations(lengths)), num_ranks, limits


def tokens(lengths: list[int], members: tuple[int, ...] | list[int]) -> int:
    return sum(lengths[i] for i in members)


def micros(plan: MicroBatchPlan) -> list[tuple[int, ...]]:
    return [micro for rank in plan.assignment for micro in rank]


@PROPERTY
@given(plan_cases())
def test_plan_computes_every_sample_once_within_the_limits(case: tuple[list[int], int, dict[str, int]]) -> None:
    lengths, num_ranks, limits = case
    plan = plan_micro_batches(lengths, num_ranks=num_ranks, **limits)
    all_micros = micros(plan)
    assert sorted(i for micro in all_micros for i in micro) == list(range(len(lengths)))
    for micro in all_micros:
        assert len(micro) <= limits.get("micro_batch_size", len(lengths))
        assert len(micro) <= 1 or tokens(lengths, micro) <= limits.get("token_budget", sum(lengths))
    # the same arguments give the same plan
    assert plan == plan_micro_batches(tuple(lengths), num_ranks=num_ranks, **limits)


@PROPERTY
@given(plan_cases())
def test_plan_has_equal_counts_and_balanced_tokens_on_every_rank(case: tuple[list[int], int, dict[str, int]]) -> None:
    lengths, num_ranks, limits = case
    plan = plan_micro_batches(lengths, num_ranks=num_ranks, **limits)
    assert len(plan.assignment) == num_ranks
    assert {len(rank) for rank in plan.assignment} == {plan.num_micro_batches}
    assert plan.num_micro_batches >= 1
    # micro batches are empty only if there are too few samples
    num_empty = sum(not micro for micro in micros(plan))
    assert num_empty == max(0, num_ranks * plan.num_micro_batches - len(lengths))
    rank_tokens = [tokens(lengths, sum(plan.assignment[rank], ())) for rank in range(num_ranks)]
    micro_tokens = [tokens(lengths, micro) for micro in micros(plan)]
    assert max(rank_tokens) - min(rank_tokens) <= max(micro_tokens) - min(micro_tokens)
    # micro batches that run at the same time are of similar size
    rounds = [[tokens(lengths, micro) for micro in column] for column in zip(*plan.assignment, strict=True)]
    for earlier, later in pairwise(rounds):
        assert min(earlier) >= max(later)


@PROPERTY
@given(lengths_strategy, ranks_strategy, st.integers(1, 9))
def test_fixed_size_micro_batches_differ_by_one_item(lengths: list[int], num_ranks: int, size: int) -> None:
    plan = plan_micro_batches(lengths, num_ranks=num_ranks, micro_batch_size=size)
    sizes = [len(micro) for micro in micros(plan)]
    assert max(sizes) - min(sizes) <= 1
    assert plan.num_micro_batches == -(-len(lengths) // (num_ranks * size))
    if len(lengths) % (num_ranks * size) == 0:
        assert set(sizes) == {size}


@PROPERTY
@given(lengths_strategy, ranks_strategy, st.integers(1, 900))
def test_plan_needs_no_more_micro_batches_than_first_fit(lengths: list[int], num_ranks: int, budget: int) -> None:
    plan = plan_micro_batches(lengths, num_ranks=num_ranks, token_budget=budget)
    assert plan.num_micro_batches == -(-len(first_fit(lengths, budget)) // num_ranks)
    assert plan.num_micro_batches >= -(-sum(min(length, budget) for length in lengths) // (budget * num_ranks))


@PROPERTY
@given(st.lists(st.integers(0, 300), max_size=60), st.integers(1, 12))
def test_balanced_partition_bounds(sizes: list[int], num_bins: int) -> None:
    bins = balanced_partition(sizes, num_bins)
    assert sorted(i for members in bins for i in members) == list(range(len(sizes)))
    counts, loads = [len(members) for members in bins], [tokens(sizes, members) for members in bins]
    assert max(counts) - min(counts) <= 1
    ordered = sorted(sizes, reverse=True)
    rounds = [ordered[start : start + num_bins] for start in range(0, len(ordered), num_bins)]
    spreads = [max(items) - (min(items) if len(items) == num_bins else 0) for items in rounds]
    assert max(loads) - min(loads) <= max(spreads, default=0) <= max(sizes, default=0)


@PROPERTY
@given(lengths_strategy, st.integers(1, 900), st.one_of(st.none(), st.integers(1, 6)))
def test_first_fit_bounds(lengths: list[int], capacity: int, max_items: int | None) -> None:
    bins = first_fit(lengths, capacity, max_items)
    assert sorted(i for members in bins for i in members) == list(range(len(lengths)))
    assert all(members for members in bins)
    for members in bins:
        assert len(members) == 1 or tokens(lengths, members) <= capacity
    if max_items is None:
        # no two bins fit into one, so there are less than twice as many as necessary
        loads = sorted(tokens(lengths, members) for members in bins)
        assert len(loads) < 2 or loads[0] + loads[1] > capacity


@PROPERTY
@given(st.lists(st.integers(0, 9), min_size=1, max_size=30), st.integers(1, 6))
def test_mini_batches_keep_groups_whole_and_every_sample_once(group_ids: list[int], num_groups: int) -> None:
    minis = split_mini_batches(group_ids, num_groups)
    assert sorted(sample for mini in minis for sample in mini) == list(range(len(group_ids)))
    groups = [list(dict.fromkeys(group_ids[sample] for sample in mini)) for mini in minis]
    assert [group for mini in groups for group in mini] == list(dict.fromkeys(group_ids)), "a group is split or moved"
    assert [len(mini) for mini in groups[:-1]] == [num_groups] * (len(minis) - 1)
    with pytest.raises(BatchError):
        split_mini_batches(group_ids, 0)


@st.composite
def layouts(draw: st.DrawFn) -> tuple[BatchConfig, dict[str, int]]:
    mini = draw(st.integers(1, 64))
    config = BatchConfig(
        train_batch_size=mini * draw(st.integers(1, 4)),
        mini_batch_size=mini,
        micro_batch_size=draw(st.one_of(st.none(), st.integers(1, 8))),
        token_budget=draw(st.integers(1, 4096)),
    )
    sizes = {
        "samples_per_prompt": draw(st.integers(1, 8)),
        "dp": draw(st.integers(1, 8)),
        "sp": draw(st.integers(1, 4)),
    }
    return config, sizes


def numbers_after(allowed: str, label: str) -> list[int]:
    listed = re.search(rf"{label}(\d+(, \d+)*)", allowed)
    return [int(number) for number in listed[1].split(", ")] if listed else []


@PROPERTY
@given(layouts())
def test_accepted_layouts_satisfy_deepspeeds_assertion(made: tuple[BatchConfig, dict[str, int]]) -> None:
    config, sizes = made
    sequences = config.mini_batch_size * sizes["samples_per_prompt"]
    unit = (config.micro_batch_size or 1) * sizes["dp"] * sizes["sp"]
    try:
        layout = batch_layout(config, **sizes)
    except BatchError:
        assert sequences % unit != 0
        return
    assert sequences % unit == 0
    assert min(layout.micro_batch_size, layout.gradient_accumulation_steps) >= 1
    product = layout.micro_batch_size * layout.gradient_accumulation_steps * layout.dp * layout.sp
    assert layout.train_batch_size == product == sequences


@PROPERTY
@given(layouts())
def test_rejected_layouts_name_sizes_that_work(made: tuple[BatchConfig, dict[str, int]]) -> None:
    config, sizes = made
    try:
        batch_layout(config, **sizes)
    except BatchError as error:
        message = error.allowed or ""
    else:
        return
    offers: list[tuple[BatchConfig, dict[str, int]]] = []
    for mini in numbers_after(message, "mini_batch_size "):
        offers.append((dataclasses.replace(config, mini_batch_size=mini), sizes))
    for train in numbers_after(message, "train_batch_size "):
        offers.append((dataclasses.replace(config, train_batch_size=train, mini_batch_size=train), sizes))
    for micro in numbers_after(message, "micro_batch_size "):
        offers.append((dataclasses.replace(config, micro_batch_size=micro), sizes))
    for samples in numbers_after(message, "samples per prompt "):
        offers.append((config, {**sizes, "samples_per_prompt": samples}))
    assert len(offers) >= 2
    for offered_config, offered_sizes in offers:
        batch_layout(offered_config, **offered_sizes)


@PROPERTY
@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4), st.integers(1, 3), st.integers(1, 3), seeds())
def test_plans_match_the_deepspeed_config(gas: int, micro: int, dp: int, sp: int, samples: int, seed: int) -> None:
    config = BatchConfig(
        train_batch_size=gas * micro * dp * sp, mini_batch_size=gas * micro * dp * sp, micro_batch_size=micro
    )
    layout: BatchLayout = batch_layout(config, samples_per_prompt=samples, dp=dp, sp=sp)
    rng = random.Random(seed)
    lengths = [rng.randint(1, 500) for _ in range(layout.train_batch_size)]
    plan = plan_micro_batches(lengths, num_ranks=dp, micro_batch_size=layout.micro_batch_size * sp)
    assert plan.num_micro_batches == layout.gradient_accumulation_steps == gas * samples
    assert {len(micro) for micro in micros(plan)} == {layout.micro_batch_size * sp}


def test_tight_budgets_reach_the_fallback() -> None:
    """level_bins cannot fit these lengths into two bins; first_fit can."""
    lengths = [5, 5, 4, 3, 3]
    assert level_bins(lengths, 2, 10) is None
    plan = plan_micro_batches(lengths, num_ranks=2, token_budget=10)
    assert sorted(tokens(lengths, micro) for micro in micros(plan)) == [10, 10]
