"""DAPO's dynamic sampling: train on groups whose samples differ in score, and ask for more until there are enough.

Shapes: N samples; `group_ids_N` as in `rl_core.advantages.group`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from .._tensors import require_1d, require_same_shape

__all__ = ["DynamicSelection", "informative_groups", "select_groups"]


@dataclass(frozen=True, kw_only=True, eq=False)
class DynamicSelection:
    """Which samples to train on."""

    index: Tensor
    """int64, indices into the batch, in batch order; whole groups only."""
    num_groups: int
    """Groups selected."""
    num_missing: int
    """Groups still to be generated to reach the number asked for; 0 when the batch is full."""
    num_dropped: int
    """Groups left out because all their scores are equal."""
    num_surplus: int
    """Groups that would do but were not needed; keep them for the next step or forget them."""


def informative_groups(scores_N: Tensor, group_ids_N: Tensor, *, min_spread: float = 0.0) -> Tensor:
    """bool [N]: the sample's group has a spread (max - min score) above `min_spread`, so its advantages are not all 0.

    With scores 0 and 1 that is 0 < number correct < group size. Source: arXiv:2503.14476, equation 11.
    """
    require_1d(scores_N=scores_N, group_ids_N=group_ids_N)
    require_same_shape(scores_N=scores_N, group_ids_N=group_ids_N)
    if min_spread < 0.0:
        raise ValueError(f"min_spread={min_spread}: must be at least 0")
    _, index_N = torch.unique(group_ids_N.to(scores_N.device), return_inverse=True)
    num_groups = int(index_N.max()) + 1 if index_N.numel() else 0
    scores = scores_N.detach().double()
    low_G = scores.new_full((num_groups,), torch.inf).scatter_reduce_(0, index_N, scores, "amin")
    high_G = scores.new_full((num_groups,), -torch.inf).scatter_reduce_(0, index_N, scores, "amax")
    return (high_G - low_G > min_spread)[index_N]


def select_groups(
    scores_N: Tensor, group_ids_N: Tensor, num_groups: int, *, min_spread: float = 0.0
) -> DynamicSelection:
    """The first `num_groups` informative groups, in the order in which they first appear.

    Call it on everything generated so far for the step; while `num_missing` is above 0, generate more prompts, append
    and call again: the selection only grows at its end. Raises `ValueError` for `num_groups` below 1.
    """
    if num_groups < 1:
        raise ValueError(f"num_groups={num_groups}: must be at least 1")
    informative = informative_groups(scores_N, group_ids_N, min_spread=min_spread).tolist()
    ids = group_ids_N.tolist()
    all_groups = set(ids)
    candidates = list(dict.fromkeys(group for group, keep in zip(ids, informative, strict=True) if keep))
    chosen = set(candidates[:num_groups])
    return DynamicSelection(
        index=torch.tensor([place for place, group in enumerate(ids) if group in chosen], dtype=torch.int64),
        num_groups=len(chosen),
        num_missing=num_groups - len(chosen),
        num_dropped=len(all_groups) - len(candidates),
        num_surplus=len(candidates) - len(chosen),
    )
