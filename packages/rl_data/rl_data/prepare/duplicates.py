"""Which row of each group of duplicates is kept."""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from .text import U64

Column = Callable[[], U64]
"""Reads one key per row; called again in each pass, so that one column at a time is in memory."""


def ranks(digests: U64) -> NDArray[np.uint32]:
    """The position of each row in the order of the digests of its content; equal rows stay in their order."""
    order = np.argsort(digests, kind="stable")
    found = np.empty(len(order), np.uint32)
    found[order] = np.arange(len(order), dtype=np.uint32)
    return found


def keepers(rank: NDArray[np.uint32], columns: Sequence[Column]) -> NDArray[np.uint32]:
    """For each row the lowest rank in its group; the row that has this rank is the one to keep.

    Rows are in one group if they have the same key in one column, or through a chain of such rows. The kept rows share
    no key, so another pass over them drops nothing; and they do not depend on the order of the rows, because ranks
    depend on their content.
    """
    lowest = rank.copy()
    while True:
        before = lowest.copy()
        for column in columns:
            _lower(lowest, column())
        if np.array_equal(before, lowest):
            return lowest


def _lower(lowest: NDArray[np.uint32], keys: U64) -> None:
    """Set each row to the lowest value among the rows with its key."""
    order = np.argsort(keys, kind="stable")
    keys = keys[order]
    starts = np.flatnonzero(np.concatenate(([True], keys[1:] != keys[:-1])))
    values = np.minimum.reduceat(lowest[order], starts)
    lowest[order] = np.repeat(values, np.diff(starts, append=len(keys)))
