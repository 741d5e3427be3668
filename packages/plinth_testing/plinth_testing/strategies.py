"""Hypothesis strategies for batch math: seeds, shapes, batches of sequences, reward groups, packings, shardings.

They draw plain Python values, so the code under test may use any tensor library; `batches.pad` makes tensors of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st


@dataclass(frozen=True, kw_only=True)
class TokenSequence:
    """Token ids of a prompt and of its response, without padding."""

    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]

    @property
    def ids(self) -> tuple[int, ...]:
        """Prompt, then response."""
        return self.prompt_ids + self.response_ids


@dataclass(frozen=True, kw_only=True)
class ScoredGroups:
    """One reward per sample, and the prompt (group) that the sample belongs to."""

    scores: tuple[float, ...]
    group_ids: tuple[int, ...]


def seeds() -> st.SearchStrategy[int]:
    """Seeds of random generators."""
    return st.integers(0, 2**31)


def shapes(*, max_side: int = 5) -> st.SearchStrategy[tuple[int, ...]]:
    """Shapes of tensors of up to three dimensions."""
    return st.lists(st.integers(0, max_side), max_size=3).map(tuple)


def lengths(*, longest: int = 6, max_size: int = 8) -> st.SearchStrategy[list[int]]:
    """Numbers of tokens of one to `max_size` sequences, some of them empty."""
    return st.lists(st.integers(0, longest), min_size=1, max_size=max_size)


def sequences(
    *, vocab_size: int = 50, longest_prompt: int = 4, longest_response: int = 6
) -> st.SearchStrategy[TokenSequence]:
    """Prompts of at least one token with responses of at least none; ids in [0, vocab_size)."""

    def ids(shortest: int, longest: int) -> st.SearchStrategy[tuple[int, ...]]:
        return st.lists(st.integers(0, vocab_size - 1), min_size=shortest, max_size=longest).map(tuple)

    return st.builds(TokenSequence, prompt_ids=ids(1, longest_prompt), response_ids=ids(0, longest_response))


def batches(*, size: int | None = None, max_size: int = 6, **limits: int) -> st.SearchStrategy[list[TokenSequence]]:
    """Lists of one to `max_size` sequences, or of exactly `size`.

    Args:
        limits: arguments of `sequences`.
    """
    smallest, largest = (1, max_size) if size is None else (size, size)
    return st.lists(sequences(**limits), min_size=smallest, max_size=largest)


def groups(
    *, group_size: int | None = None, max_groups: int = 4, max_group_size: int = 4
) -> st.SearchStrategy[ScoredGroups]:
    """Rewards of the samples of one to `max_groups` prompts.

    Rewards are multiples of 1/4 in [-10, 10], so that the spread of a group is either 0 or at least 1/4.

    Args:
        group_size: samples per prompt, one prompt after the other. None: groups of 1 to `max_group_size`, interleaved.
    """

    def scored(ids: tuple[int, ...]) -> st.SearchStrategy[ScoredGroups]:
        quarters = st.lists(st.integers(-40, 40), min_size=len(ids), max_size=len(ids))
        scores = quarters.map(lambda values: tuple(value / 4 for value in values))
        return st.builds(ScoredGroups, scores=scores, group_ids=st.just(ids))

    if group_size is not None:
        counts = st.integers(1, max_groups)
        return counts.map(lambda count: tuple(i // group_size for i in range(count * group_size))).flatmap(scored)
    sizes = st.lists(st.integers(1, max_group_size), min_size=1, max_size=max_groups)
    ordered = sizes.map(lambda drawn: [group for group, size in enumerate(drawn) for _ in range(size)])
    return ordered.flatmap(st.permutations).map(tuple).flatmap(scored)


@st.composite
def packings(draw: st.DrawFn, lengths: list[int], *, token_budget: int | None = None) -> list[list[int]]:
    """Ways to split a batch into micro batches: each sequence is in exactly one, in any order, and none is empty.

    Args:
        lengths: tokens of each sequence.
        token_budget: most tokens of a micro batch; None: any number. A sequence beyond the budget is alone.
    """
    micro_batches: list[list[int]] = []
    for index in draw(st.permutations(range(len(lengths)))):
        used = sum(lengths[i] for i in micro_batches[-1]) if micro_batches else 0
        fits = token_budget is None or used + lengths[index] <= token_budget
        if micro_batches and fits and draw(st.booleans()):
            micro_batches[-1].append(index)
        else:
            micro_batches.append([index])
    return micro_batches


@st.composite
def shardings(draw: st.DrawFn, num_items: int, num_ranks: int) -> list[list[int]]:
    """Ways to give items to ranks: each item to exactly one rank; shares differ in size and may be empty."""
    ranks = draw(st.lists(st.integers(0, num_ranks - 1), min_size=num_items, max_size=num_items))
    return [[item for item, owner in enumerate(ranks) if owner == rank] for rank in range(num_ranks)]


def json_values(max_leaves: int = 8) -> st.SearchStrategy[Any]:
    """Whatever JSON holds, nested; integers beyond 64 bits too, but no NaN."""
    scalars = (
        st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | st.text(max_size=5)
    )
    return st.recursive(
        scalars,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
        max_leaves=max_leaves,
    )
