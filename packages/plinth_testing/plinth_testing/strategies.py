"""Hypothesis strategies that several packages' property tests share."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st


def seeds() -> st.SearchStrategy[int]:
    """Seeds of random generators."""
    return st.integers(0, 2**31)


def shapes(*, max_side: int = 5) -> st.SearchStrategy[tuple[int, ...]]:
    """Shapes of tensors of up to three dimensions."""
    return st.lists(st.integers(0, max_side), max_size=3).map(tuple)


def lengths(*, longest: int = 6, max_size: int = 8) -> st.SearchStrategy[list[int]]:
    """Numbers of tokens of one to `max_size` sequences, some of them empty."""
    return st.lists(st.integers(0, longest), min_size=1, max_size=max_size)


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
