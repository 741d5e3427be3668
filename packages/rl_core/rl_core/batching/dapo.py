"""Batch functions of DAPO: dynamic sampling of groups, and penalty and filter for overlong responses.

Shapes: N samples; `group_ids_N` are any integers, equal for samples of the same prompt.
Source: Yu et al. 2025, arXiv:2503.14476.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from .._tensors import group_range, require_1d, require_same_shape
from ..errors import require


@dataclass(frozen=True, kw_only=True, eq=False)
class DynamicSelection:
    """The samples to train on."""

    index: Tensor
    """int64, indices into the batch, in batch order; groups are complete."""
    num_groups: int
    """Number of selected groups."""
    num_missing: int
    """Informative groups still missing to reach the requested number; 0 when the batch is full."""
    num_dropped: int
    """Groups dropped because their scores are equal, or their spread is not above `min_spread`."""
    num_surplus: int
    """Informative groups beyond the requested number; keep them for the next step or drop them."""


def informative_groups(scores_N: Tensor, group_ids_N: Tensor, *, min_spread: float = 0.0) -> Tensor:
    """bool [N]: the spread (max - min score) of the sample's group is above `min_spread`, so advantages are not all 0.

    With scores 0 and 1 that is 0 < number correct < group size. Source: DAPO, equation 11.
    Raises `ValueError` for a negative `min_spread`, `ShapeError` for shapes.
    """
    require_1d(scores_N=scores_N, group_ids_N=group_ids_N)
    require_same_shape(scores_N=scores_N, group_ids_N=group_ids_N)
    require(min_spread >= 0.0, "min_spread", min_spread, "0 or more")
    _, index_N = torch.unique(group_ids_N.to(scores_N.device), return_inverse=True)
    num_groups = int(index_N.max()) + 1 if index_N.numel() else 0
    low_G, high_G = group_range(scores_N.detach().double(), index_N, num_groups)
    return (high_G - low_G > min_spread)[index_N]


def select_groups(
    scores_N: Tensor, group_ids_N: Tensor, num_groups: int, *, min_spread: float = 0.0
) -> DynamicSelection:
    """The first `num_groups` informative groups, in the order in which they first appear.

    Call it on all samples generated for the step. While `num_missing` is above 0, generate and append more groups and
    call it again; groups selected once stay selected. Raises `ValueError` for `num_groups` below 1.
    """
    require(num_groups >= 1, "num_groups", num_groups, "1 or more")
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


def overlong_penalty(
    response_lens_N: Tensor,
    *,
    max_length: int,
    buffer_length: int,
    penalty: float = 1.0,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """DAPO's soft overlong punishment, [N], to add to the scores; from 0 down to -penalty.

        0                                          n <= max_length - buffer_length
        penalty * (max_length - buffer - n) / buffer_length   inside the buffer
        -penalty                                   n > max_length

    Lengths are in tokens. Source: DAPO, equation 13 (L_max, L_cache, penalty 1).
    Raises `ValueError` unless 1 <= buffer_length <= max_length and penalty >= 0.
    """
    require(0 < buffer_length <= max_length, "buffer_length", buffer_length, f"1 to max_length, {max_length}")
    require(penalty >= 0.0, "penalty", penalty, "0 or more")
    over = response_lens_N.to(torch.float64) - (max_length - buffer_length)
    return (-penalty * (over / buffer_length).clamp(0.0, 1.0)).to(dtype)


def overlong_keep(truncated_N: Tensor) -> Tensor:
    """DAPO's overlong filtering: bool [N], False for samples truncated at the length limit, to remove from the loss.

    Their score reflects the missing answer instead of the quality of the text. Compute the advantages first, then set
    the response lengths (or weights) of these samples to 0. Source: DAPO, section 3.4.
    """
    return ~truncated_N.bool()
