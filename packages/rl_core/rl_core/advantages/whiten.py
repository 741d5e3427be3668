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
    shift_mean: bool = True,
    eps: float = 1e-8,
) -> Tensor:
    """(values - mean) / (std + eps) where the mask is set, 0 elsewhere; any shape, in at least float32.

    Mean and std (n - 1 in the denominator) are over the unmasked values of all ranks of `group`. That takes exactly one
    all-reduce, of 3 float64 numbers per rank, also on a rank without values. None: this process only, no communication.
    `shift_mean=False` divides by the std without subtracting the mean. Fewer than two values, or equal values, have no
    spread: the result is 0 (with `shift_mean=False`: the mean).
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
    count, mean, square_sum, no_spread = _moments(chosen, group)
    (result,) = upcast(values.detach())
    if no_spread:
        flat = torch.zeros_like(result) if shift_mean else torch.full_like(result, mean)
        return torch.where(mask, flat, 0.0)
    std = (square_sum / (count - 1.0)) ** 0.5
    centered = result - mean if shift_mean else result
    return torch.where(mask, centered / (std + eps), 0.0)


def _moments(chosen: Tensor, group: "torch.distributed.ProcessGroup | None") -> tuple[float, float, float, bool]:
    """Count, mean and sum of squared deviations over all ranks, and whether the values have no spread."""
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
    return _merged([(row[0], row[1], row[2]) for row in rows.tolist()])


def _merged(parts: list[tuple[float, float, float]]) -> tuple[float, float, float, bool]:
    """The moments of the union of several parts, see `_moments`."""
    count, mean, square_sum = 0.0, 0.0, 0.0
    for part_count, part_mean, part_square_sum in parts:
        if part_count == 0.0:
            continue
        total = count + part_count
        delta = part_mean - mean if count else 0.0
        mean = mean + delta * part_count / total if count else part_mean
        square_sum += part_square_sum + delta * delta * count * part_count / total
        count = total
    return count, mean, square_sum, count < 2.0 or square_sum == 0.0
