"""Second pass: the keys of all rows say which are duplicates of others, and which are for validation."""

from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from .config import PrepareConfig
from .duplicates import keepers, ranks
from .minhash import Bands
from .spool import Spool
from .text import U64, mixed

Mask = NDArray[np.bool_]


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
