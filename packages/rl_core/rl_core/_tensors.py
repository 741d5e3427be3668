"""Dtype, shape and group helpers. float64 stays float64; everything narrower is computed in float32."""

import torch
from torch import Tensor

from .errors import ShapeError


def upcast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors in one floating dtype: the widest among them, at least float32."""
    dtype = torch.float32
    for tensor in tensors:
        if tensor.is_floating_point():
            dtype = torch.promote_types(dtype, tensor.dtype)
    return tuple(tensor.to(dtype) for tensor in tensors)


def require_same_shape(**tensors: Tensor) -> None:
    """Raise `ShapeError` naming every tensor unless all shapes are equal (no silent broadcasting)."""
    if len({tuple(tensor.shape) for tensor in tensors.values()}) > 1:
        shapes = ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in tensors.items())
        raise ShapeError(f"{shapes} differ", field=next(iter(tensors)), allowed="equal shapes")


def require_1d(**tensors: Tensor) -> None:
    """Raise `ShapeError` unless every tensor has exactly one dimension."""
    for name, tensor in tensors.items():
        if tensor.dim() != 1:
            raise ShapeError(field=name, value=tuple(tensor.shape), allowed="one dimension")


def require_lens(num_values: int, lens_S: Tensor) -> None:
    """Raise `ShapeError` unless the sequence lengths [S] sum to the number of values in a flat row."""
    require_1d(lens_S=lens_S)
    total = int(lens_S.sum())
    if total != num_values:
        raise ShapeError(f"there are {num_values} values", field="lens_S", value=total, allowed="lengths that add up")


def safe_exp(log_values: Tensor, limit: float = 20.0) -> Tensor:
    """exp of the values clamped to [-limit, limit]: exp(20) = 4.9e8, so no product with it overflows float32.

    Outside the limit the gradient is zero: such a token carries no usable information about a small policy change.
    """
    return log_values.clamp(-limit, limit).exp()


def group_range(scores_N: Tensor, index_N: Tensor, num_groups: int) -> tuple[Tensor, Tensor]:
    """Lowest and highest score of each group, [G] each; `index_N` is the group of each score, 0 to `num_groups` - 1."""
    low_G = scores_N.new_full((num_groups,), torch.inf).scatter_reduce_(0, index_N, scores_N, "amin")
    high_G = scores_N.new_full((num_groups,), -torch.inf).scatter_reduce_(0, index_N, scores_N, "amax")
    return low_G, high_G


def offsets(lens_S: Tensor) -> Tensor:
    """int64 [S + 1], 0 and the cumulative sums."""
    return torch.cat([lens_S.new_zeros(1), lens_S.cumsum(0)])


def ranges(starts_S: Tensor, lens_S: Tensor) -> Tensor:
    """The indices start, start + 1, … of each range, one range after another."""
    shift_S = starts_S - offsets(lens_S)[:-1]
    return shift_S.repeat_interleave(lens_S) + torch.arange(int(lens_S.sum()))
