"""Whitening: zero mean and unit variance over the unmasked values of all ranks."""

import torch
from torch import Tensor

from .._tensors import require_same_shape, upcast
from ..errors import require


def masked_whiten(
    values: Tensor,
    mask: Tensor | None = None,
    *,
    group: "torch.distributed.ProcessGroup | None" = None,
    eps: float = 1e-8,
) -> Tensor:
    """(values - mean) / (std + eps) where the mask is set, 0 elsewhere; any shape, in at least float32.

    Mean and std (n - 1 in the denominator) are over the unmasked values of all ranks of `group`. That takes exactly one
    all-reduce, of 3 float64 numbers per rank, also on a rank without values. None: this process only, no communication.
    Fewer than two values, or equal values, have no spread: the result is 0.
    Source: Schulman et al. 2017, arXiv:1707.06347 (advantage normalization over the batch). Partial variances are
    merged after Chan, Golub and LeVeque 1979, which avoids the cancellation of E[x^2] - E[x]^2.
    Raises `ValueError` for a negative eps, `ShapeError` for shapes that differ.
    """
    require(eps >= 0.0, "eps", eps, "0 or more")
    if mask is None:
        mask = torch.ones_like(values, dtype=torch.bool)
    require_same_shape(values=values, mask=mask)
    mask = mask.bool()
    chosen = values.detach()[mask].double()
    count, mean, square_sum = _moments(chosen, group)
    (result,) = upcast(values.detach())
    if count < 2.0 or square_sum == 0.0:
        return torch.zeros_like(result)
    std = (square_sum / (count - 1.0)) ** 0.5
    return torch.where(mask, (result - mean) / (std + eps), 0.0)


def _moments(chosen: Tensor, group: "torch.distributed.ProcessGroup | None") -> tuple[float, float, float]:
    """Count, mean and sum of squared deviations over all ranks."""
    mean = chosen.mean() if chosen.numel() else chosen.new_zeros(())
    if chosen.numel() and bool((chosen == chosen[0]).all()):
        mean = chosen[0]  # exact, so equal values have a spread of exactly 0
    local = torch.stack([chosen.new_tensor(float(chosen.numel())), mean, (chosen - mean).square().sum()])
    if group is None:
        rows = local[None]
    else:
        # each rank fills its own row, so the sum gathers all rows; every rank merges them in the same order
        rows = local.new_zeros((torch.distributed.get_world_size(group), 3))
        rows[torch.distributed.get_rank(group)] = local
        torch.distributed.all_reduce(rows, group=group)
    return _merged(rows)


def _merged(rows: Tensor) -> tuple[float, float, float]:
    """The moments of the union of parts, one a row; of parts with equal values exactly."""
    counts, means, square_sums = rows.unbind(1)
    count = counts.sum()
    origin = means[counts.argmax()]
    mean = origin + (counts * (means - origin)).sum() / count.clamp(min=1.0)
    square_sum = (square_sums + counts * (means - mean).square()).sum()
    return float(count), float(mean), float(square_sum)
