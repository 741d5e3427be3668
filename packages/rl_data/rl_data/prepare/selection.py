"""Second pass: the keys of all rows say which are duplicates of others, and which are for validation."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from .config import PrepareConfig
from .minhash import Bands
from .spool import Spool
from .text import U64, mixed

Mask = NDArray[np.bool_]
Column = Callable[[], U64]
"""Reads one key per row; called again in each pass, so that one column at a time is in memory."""


@dataclass(frozen=True, kw_only=True)
class Selection:
    """What becomes of each row; arrays [number of rows]."""

    is_exact: Mask
    """Dropped: another row has the same prompt."""
    is_near: Mask
    """Dropped: another row has a similar prompt."""
    is_conflict: Mask
    """The kept row with the same prompt has another ground truth; some of `is_exact`."""
    is_validation: Mask
    keeper: NDArray[np.int64]
    """The row that is kept of each row's group."""

    @property
    def is_kept(self) -> Mask:
        return ~(self.is_exact | self.is_near)


def select(spool: Spool, config: PrepareConfig, bands: Bands | None) -> Selection:
    """Drop duplicates, and split by the hash of the normalized prompt, so that equal prompts are on one side.

    System messages and tools distinguish duplicates, but not the sides of the split.
    """
    rank = ranks(spool.keys("content"))
    row_of_rank = np.empty(len(rank), np.int64)
    row_of_rank[rank] = np.arange(len(rank))
    prompt = partial(spool.keys, "prompt")
    same = keepers(rank, [] if config.duplicates == "keep" else [prompt])
    columns = [partial(spool.keys, f"band{number}") for number in range(bands.num_bands)] if bands else []
    lowest = keepers(same, columns) if columns else same
    ground_truth = spool.keys("ground_truth")
    is_exact = same != rank
    return Selection(
        is_exact=is_exact,
        is_near=(lowest != rank) & ~is_exact,
        is_conflict=is_exact & (ground_truth != ground_truth[row_of_rank[same]]),
        is_validation=is_validation(spool.keys("text"), config.seed, config.validation),
        keeper=row_of_rank[lowest],
    )


def is_validation(prompts: U64, seed: int, share: float) -> Mask:
    """Whether each prompt, given as a hash, is for validation; it depends on nothing but the prompt and the seed."""
    salt = mixed(np.array([seed % 2**64], np.uint64))
    below_one = (mixed(prompts ^ salt) >> np.uint64(11)).astype(np.float64) * 2.0**-53
    mask: Mask = below_one < share
    return mask


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
