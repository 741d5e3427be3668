"""Shared prefixes: the tree of a batch, its order, and selections of both."""

import time
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rl_core import (
    ArgumentError,
    Batch,
    MicroBatchPlan,
    PrefixOrder,
    PrefixTree,
    find_prefixes,
    order_prefixes,
    pack,
    plan_micro_batches,
)

PROPERTY = settings(deadline=None, derandomize=True, max_examples=150)


@st.composite
def sequences(draw: st.DrawFn, *, least: int = 0, most: int = 9) -> list[list[int]]:
    """Sequences that branch from earlier ones anywhere, repeat them, or are their prefixes; shuffled."""
    rows: list[list[int]] = []
    for _ in range(draw(st.integers(least, most))):
        start = draw(st.sampled_from(rows))[: draw(st.integers(0, 12))] if rows and draw(st.booleans()) else []
        row = start + draw(st.lists(st.integers(-1, 2), min_size=not start, max_size=7))
        rows.append(row)
    return draw(st.permutations(rows))


def packed(rows: list[list[int]]) -> Batch:
    """All but the first token of each sequence are targets."""
    return pack([row[:1] for row in rows], [row[1:] for row in rows])


def tree_of(rows: list[list[int]], min_tokens: int) -> tuple[Batch, PrefixTree]:
    batch = packed(rows)
    return batch, find_prefixes(batch.input_ids_T, batch.cu_seqlens_S1, min_tokens=min_tokens)


def path(tree: PrefixTree, node: int) -> list[int]:
    return [] if node < 0 else [*path(tree, tree.parents_N[node]), node]


def common(a: Tensor, b: Tensor) -> int:
    """Length of the longest common prefix."""
    length = min(len(a), len(b))
    return int((a[:length] == b[:length]).long().cumprod(0).sum())


@PROPERTY
@given(sequences(), st.integers(1, 5))
def test_the_path_of_a_sequence_is_its_tokens_at_its_positions(rows: list[list[int]], min_tokens: int) -> None:
    batch, tree = tree_of(rows, min_tokens)
    borders = tree.cu_seqlens_N1.tolist()
    assert borders[-1] == len(tree.computed_U) == tree.num_tokens
    assert all(start < end for start, end in pairwise(borders)), "a node is empty"
    assert len(tree.place_T) == batch.num_tokens
    assert {tree.computed_U.dtype, tree.place_T.dtype} == {torch.int64}
    # a computed token has the id and the position of every token that it stands for
    source_T = tree.computed_U[tree.place_T]
    assert torch.equal(batch.input_ids_T[source_T], batch.input_ids_T)
    assert torch.equal(batch.position_ids_T[source_T], batch.position_ids_T)
    assert sorted(set(tree.place_T.tolist())) == list(range(len(tree.computed_U))), "it is computed for nothing"
    node_U = torch.arange(len(borders) - 1).repeat_interleave(tree.cu_seqlens_N1.diff().long())
    for places in tree.place_T.split(batch.seq_lens_S.tolist()):
        nodes = path(tree, int(node_U[places[-1]]))
        on_path = [place for node in nodes for place in range(borders[node], borders[node + 1])]
        assert places.tolist() == on_path[: len(places)]


@PROPERTY
@given(sequences(), st.integers(1, 5))
def test_nodes_stand_level_by_level_and_branch(rows: list[list[int]], min_tokens: int) -> None:
    _, tree = tree_of(rows, min_tokens)
    levels = [len(path(tree, node)) for node in range(len(tree.parents_N))]
    assert levels == sorted(levels)
    assert list(tree.parents_N) == sorted(tree.parents_N)
    assert all(parent < node for node, parent in enumerate(tree.parents_N))
    parents = [parent for parent in tree.parents_N if parent >= 0]
    assert all(parents.count(parent) > 1 for parent in parents), "a node with one child is not merged with it"
    lens = tree.cu_seqlens_N1.diff().tolist()
    assert all(lens[parent] >= min_tokens for parent in parents)


@PROPERTY
@given(sequences(), st.integers(1, 5))
def test_fewer_than_min_tokens_of_a_common_prefix_are_computed_twice(rows: list[list[int]], min_tokens: int) -> None:
    batch, tree = tree_of(rows, min_tokens)
    ids, places = (x.split(batch.seq_lens_S.tolist()) for x in (batch.input_ids_T, tree.place_T))
    for i in range(len(rows)):
        for j in range(i):
            assert common(ids[i], ids[j]) - min_tokens < common(places[i], places[j]) <= common(ids[i], ids[j])
    if min_tokens == 1:
        assert tree.num_tokens == len({tuple(row[:end]) for row in rows for end in range(1, len(row) + 1)})


@PROPERTY
@given(sequences(), st.integers(1, 5))
def test_the_mask_is_causal_along_each_path(rows: list[list[int]], min_tokens: int) -> None:
    batch, tree = tree_of(rows, min_tokens)
    expected_UU = torch.zeros(tree.num_tokens, tree.num_tokens, dtype=torch.bool)
    for places in tree.place_T.split(batch.seq_lens_S.tolist()):
        for end in range(len(places)):
            expected_UU[places[end], places[: end + 1]] = True
    assert torch.equal(tree.mask(), expected_UU)


@PROPERTY
@given(sequences(), st.integers(1, 5), st.data())
def test_a_selection_shares_the_same_prefixes(rows: list[list[int]], min_tokens: int, data: st.DataObject) -> None:
    batch = packed(rows)
    order = order_prefixes(batch.input_ids_T, batch.cu_seqlens_S1, min_tokens=min_tokens)
    chosen = data.draw(st.permutations(range(len(rows))))[: data.draw(st.integers(0, len(rows)))]
    part, whole = batch.select(chosen), order.tree(batch.cu_seqlens_S1)
    selected = order.select(chosen)
    tree = selected.tree(part.cu_seqlens_S1)
    assert torch.equal(part.input_ids_T[tree.computed_U][tree.place_T], part.input_ids_T)
    places = [whole.place_T.split(batch.seq_lens_S.tolist())[i] for i in chosen]
    assert tree.num_tokens == len({int(place) for row in places for place in row})
    assert tree.num_tokens == part.num_tokens - selected.shared_S.sum()
    same_TT = tree.place_T[:, None] == tree.place_T
    places_T = torch.cat([*places, torch.zeros(0, dtype=torch.int64)])
    assert torch.equal(same_TT, places_T[:, None] == places_T)


def test_prefixes_of_prefixes_and_duplicates_need_no_node() -> None:
    _, tree = tree_of([[1, 2, 3, 4], [1, 2], [1, 2, 3, 4], [1]], 1)
    assert tree.parents_N == (-1,)
    assert tree.computed_U.numel() == 4
    _, tree = tree_of([[1, 2, 5], [1, 2], [1, 2, 6], [1, 2, 6]], 2)
    assert tree.parents_N == (-1, 0, 0)
    assert tree.computed_U.numel() == 4


def test_a_batch_carries_its_tree() -> None:
    batch = pack([[1, 2, 3]] * 2 + [[7]], [[4], [5], [8]], columns={"a": torch.arange(3.0)}).with_prefixes(min_tokens=3)
    assert batch.prefixes is not None
    assert (batch.num_tokens, batch.num_computed_tokens) == (10, 7)
    assert batch.to("cpu").prefixes is not None
    assert batch.without_columns().prefixes is not None
    assert batch.select([0, 1]).prefixes is None
    assert batch.with_prefixes().prefixes is None, "nothing is shared, so there is no tree"
    assert pack([], []).with_prefixes(min_tokens=1).prefixes is None
    with pytest.raises(ArgumentError):
        batch.with_prefixes(min_tokens=0)


limits_strategy = st.one_of(
    st.fixed_dictionaries({"token_budget": st.integers(1, 60)}),
    st.fixed_dictionaries({"micro_batch_size": st.integers(1, 5)}),
    st.fixed_dictionaries({"token_budget": st.integers(1, 60), "micro_batch_size": st.integers(1, 5)}),
)


def planned(
    batch: Batch,
    num_ranks: int,
    limits: dict[str, int],
    min_tokens: int = 1,
    loads: Sequence[int] | None = None,
) -> tuple[MicroBatchPlan, PrefixOrder]:
    order = order_prefixes(batch.input_ids_T, batch.cu_seqlens_S1, min_tokens=min_tokens)
    options = {"num_ranks": num_ranks, "prefixes": order, "loads": loads}
    return plan_micro_batches(batch.seq_lens_S.tolist(), **options, **limits), order


def computed(batch: Batch, order: PrefixOrder, micro: tuple[int, ...]) -> int:
    """Tokens of the tree of a micro batch."""
    return order.select(micro).tree(batch.select(micro).cu_seqlens_S1).num_tokens


@PROPERTY
@given(sequences(least=1, most=20), st.integers(1, 4), limits_strategy, st.integers(1, 3))
def test_plans_keep_their_limits_in_computed_tokens(
    rows: list[list[int]], num_ranks: int, limits: dict[str, int], min_tokens: int
) -> None:
    batch = packed(rows)
    targets = [max(0, len(row) - 2) for row in rows]
    plan, order = planned(batch, num_ranks, limits, min_tokens, targets)
    micros = [micro for rank in plan.assignment for micro in rank]
    assert sorted(i for micro in micros for i in micro) == list(range(len(rows)))
    assert {len(rank) for rank in plan.assignment} == {plan.num_micro_batches}
    assert sum(not micro for micro in micros) == max(0, len(micros) - len(rows))
    sizes = [[computed(batch, order, micro) for micro in rank] for rank in plan.assignment]
    for micro, size in zip(micros, [size for rank in sizes for size in rank], strict=True):
        assert len(micro) <= limits.get("micro_batch_size", len(rows))
        assert len(micro) <= 1 or size <= limits.get("token_budget", size)
        assert len(micro) <= 1 or sum(targets[i] for i in micro) <= limits.get("token_budget", sum(targets))
    if "token_budget" not in limits:
        assert plan.num_micro_batches == -(-len(rows) // (num_ranks * limits["micro_batch_size"]))
        assert max(map(len, micros)) - min(map(len, micros)) <= 1
    totals, flat = [sum(rank) for rank in sizes], [size for rank in sizes for size in rank]
    assert max(totals) - min(totals) <= max(flat) - min(flat)
    for earlier, later in pairwise(zip(*sizes, strict=True)):
        assert min(earlier) >= max(later)
    without = plan_micro_batches(batch.seq_lens_S.tolist(), num_ranks=num_ranks, **limits)
    assert max(totals) <= max(sum(len(rows[i]) for i in sum(without.assignment[rank], ())) for rank in range(num_ranks))


@PROPERTY
@given(st.lists(st.integers(1, 30), min_size=1, max_size=20), st.integers(1, 4), limits_strategy)
def test_without_shared_prefixes_the_plan_is_the_same(lens: list[int], num_ranks: int, limits: dict[str, int]) -> None:
    batch = packed([[number] * length for number, length in enumerate(lens)])
    assert planned(batch, num_ranks, limits)[0] == plan_micro_batches(lens, num_ranks=num_ranks, **limits)


def groups_of(num_groups: int, size: int, prompt: int, response: int) -> Batch:
    """Groups whose members share a prompt, in a mixed order."""
    ids = np.arange(10_000_000)
    prompts = [10_000 * (n + 1) + ids[:prompt] for n in range(num_groups)]
    places = [n for _ in range(size) for n in range(num_groups)]
    responses = [1_000_000 + 1_000 * n + ids[:response] for n in range(len(places))]
    return pack([prompts[n] for n in places], responses)


@pytest.mark.parametrize(
    ("num_ranks", "budget", "num_micro_batches", "largest"),
    [
        (1, 16_384, 3, 8 * 4344),  # three groups of 4,344 fit
        (4, 16_384, 1, 2 * 4344),
        (8, 16_384, 1, 4344),
        (4, 4_096, 4, 4 * (248 + 4 * 512)),  # a group does not fit, its halves do
        (16, 16_384, 1, 248 + 4 * 512),  # half a group per rank, though whole ones fit
    ],
)
def test_groups_stay_whole_unless_they_do_not_fit_or_leave_ranks_idle(
    num_ranks: int, budget: int, num_micro_batches: int, largest: int
) -> None:
    batch = groups_of(8, 8, 248, 512)
    plan, order = planned(batch, num_ranks, {"token_budget": budget})
    sizes = [sum(computed(batch, order, micro) for micro in rank) for rank in plan.assignment]
    assert plan.num_micro_batches == num_micro_batches
    assert max(sizes) == largest


def test_one_group_is_split_over_two_ranks_and_fixed_sizes_keep_it_together() -> None:
    batch = groups_of(1, 8, 4096, 64)
    plan, order = planned(batch, 2, {"token_budget": 16_384})
    assert [[len(micro) for micro in rank] for rank in plan.assignment] == [[4], [4]]
    batch = groups_of(4, 4, 100, 50)
    plan, order = planned(batch, 2, {"micro_batch_size": 4})
    assert {computed(batch, order, micro) for rank in plan.assignment for micro in rank} == {100 + 4 * 50}


def test_a_tree_that_fits_is_planned_in_linear_time() -> None:
    """Choosing a cut of 3,000 sequences takes half of their square of steps; none is needed."""
    batch = packed([[*range(40), n] for n in range(3_000)])
    order = order_prefixes(batch.input_ids_T, batch.cu_seqlens_S1)
    started = time.process_time()
    plan = plan_micro_batches(batch.seq_lens_S.tolist(), num_ranks=1, token_budget=16_384, prefixes=order)
    assert plan.num_micro_batches == 1
    assert time.process_time() - started < 1


def test_only_as_many_runs_are_split_as_micro_batches_are_missing() -> None:
    """One of two groups does not fit; on two ranks three micro batches become four, not six with one sequence each."""
    responses = [[100 + 20 * n + t for t in range(length)] for n, length in enumerate((9, 4, 14, 7, 11, 5))]
    batch = pack([[1 + n % 2] * 40 for n in range(6)], responses)
    plan, order = planned(batch, 2, {"token_budget": 64})
    sizes = [computed(batch, order, micro) for rank in plan.assignment for micro in rank]
    assert len(sizes) == 4
    assert sum(sizes) == 4 * 40 + 50


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_targets_of_equal_responses_fit_the_budget_though_they_are_computed_once(num_ranks: int) -> None:
    batch = packed([list(range(100))] * 64)
    plan, _ = planned(batch, num_ranks, {"token_budget": 800}, loads=[50] * 64)
    assert [[len(micro) for micro in rank] for rank in plan.assignment] == [[16] * (4 // num_ranks)] * num_ranks


def test_a_tree_is_split_where_the_fewest_tokens_are_computed_twice() -> None:
    """Seven responses to a prompt and one to another, both of a template: parts of equal size would compute more."""
    template, ids = list(range(40)), iter(range(1_000, 10_000))
    one, other = ([next(ids) for _ in range(60)] for _ in range(2))
    prompts = [template + (other if n == 3 else one) for n in range(8)]
    batch = pack(prompts, [[next(ids) for _ in range(50)] for _ in range(8)])
    plan, order = planned(batch, 1, {"token_budget": 500}, 32)
    assert sorted(plan.assignment[0], key=len) == [(3,), (0, 1, 2, 4, 5, 6, 7)]
    assert sorted(computed(batch, order, micro) for micro in plan.assignment[0]) == [150, 450]
