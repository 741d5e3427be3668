"""Zero mean and unit variance over the unmasked values of all ranks."""

import torch
from torch import Tensor

from .._tensors import require_same_shape, upcast

__all__ = ["masked_whiten"]


def masked_whiten(
    values: Tensor,
    mask: Tensor | None = None,
    *,
    group: "torch.distributed.ProcessGroup | None" = None,
    shift_mean: bool = True,
    eps: float = 1e-8,
) -> Tensor:
    """(values - mean) / (std + eps) where the mask is set, 0 elsewhere; any shape, in at least float32.

    Mean and std (n - 1 in the denominator) are over the unmasked values of every rank of `group`: exactly one
    all-reduce, of 3 float64 numbers a rank, also on a rank without values. None: this process alone, no communication.
    `shift_mean=False` divides by the std and leaves the mean in. A batch of fewer than two values, or of equal ones,
    has no spread: it gives 0 (its mean, with `shift_mean=False`).
    Source: Schulman et al. 2017, arXiv:1707.06347 (advantage normalisation over the batch); merging of partial
    variances: Chan, Golub and LeVeque 1979, which cancels nothing, unlike E[x^2] - E[x]^2.
    """
    if eps < 0.0:
        raise ValueError(f"eps={eps}: must be at least 0")
    if mask is None:
        mask = torch.ones_like(values, dtype=torch.bool)
    require_same_shape(values=values, mask=mask)
    mask = mask.bool()
    chosen = values.detach()[mask].double()
    count, mean, square_sum, low_equals_high = _moments(chosen, group)
    (result,) = upcast(values.detach())
    if low_equals_high:
        flat = torch.zeros_like(result) if shift_mean else torch.full_like(result, mean)
        return torch.where(mask, flat, 0.0)
    std = (square_sum / (count - 1.0)) ** 0.5
    centred = result - mean if shift_mean else result
    return torch.where(mask, centred / (std + eps), 0.0)


def _moments(chosen: Tensor, group: "torch.distributed.ProcessGroup | None") -> tuple[float, float, float, bool]:
    """Count, mean, sum of squared deviations over all ranks; and whether there is no spread at all."""
    mean = chosen.mean() if chosen.numel() else chosen.new_zeros(())
    if chosen.numel() and bool((chosen == chosen[0]).all()):
        mean = chosen[0]  # exact, so that equal values have exactly no spread
    local = torch.stack([chosen.new_tensor(float(chosen.numel())), mean, (chosen - mean).square().sum()])
    if group is None:
        rows = local[None]
    else:
        # every rank fills its own row and the sum gathers all rows: one all-reduce, merged in the same order everywhere
        rows = local.new_zeros((torch.distributed.get_world_size(group), 3))
        rows[torch.distributed.get_rank(group)] = local
        torch.distributed.all_reduce(rows, group=group)
    return _merged([(row[0], row[1], row[2]) for row in rows.tolist()])


def _merged(parts: list[tuple[float, float, float]]) -> tuple[float, float, float, bool]:
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
