"""Sums and means over the sequences of a flat row.

Shapes: K values of all sequences one after another, S sequences, `lens_S` how many of the K belong to each (may be 0).
"""

import torch
from torch import Tensor

from .._tensors import require_1d
from ..errors import ShapeError

__all__ = ["broadcast_to_tokens", "returns_to_go", "segment_mean", "segment_sum"]


def _require_lens(num_values: int, lens_S: Tensor) -> None:
    require_1d(lens_S=lens_S)
    total = int(lens_S.sum())
    if total != num_values:
        raise ShapeError(f"lens_S sums to {total}, but there are {num_values} values")


def segment_sum(values_K: Tensor, lens_S: Tensor) -> Tensor:
    """Sum of each sequence's values, [S], in the dtype of `values_K`; 0 for an empty sequence. Differentiable."""
    require_1d(values_K=values_K)
    _require_lens(values_K.numel(), lens_S)
    if values_K.numel() == 0:
        # an empty micro batch still runs a backward pass, so its zeros need a graph
        return values_K.sum().expand(lens_S.numel())
    # segment_reduce, not index_add: no atomics, so CUDA gives the same bits every time
    lens = lens_S.to(device=values_K.device, dtype=torch.int64)
    return torch.segment_reduce(values_K, "sum", lengths=lens, initial=0.0)


def segment_mean(values_K: Tensor, lens_S: Tensor) -> Tensor:
    """Mean of each sequence's values, [S]; 0 for an empty sequence. Differentiable."""
    return segment_sum(values_K, lens_S) / lens_S.to(values_K.device).clamp(min=1)


def broadcast_to_tokens(values_S: Tensor, lens_S: Tensor) -> Tensor:
    """Each sequence's value repeated for its tokens: [S] -> [K], K = lens_S.sum()."""
    require_1d(values_S=values_S, lens_S=lens_S)
    if values_S.numel() != lens_S.numel():
        raise ShapeError(f"{values_S.numel()} values for {lens_S.numel()} sequences")
    return torch.repeat_interleave(values_S, lens_S.to(device=values_S.device, dtype=torch.int64))


def returns_to_go(rewards_K: Tensor, lens_S: Tensor, *, gamma: float = 1.0) -> Tensor:
    """Discounted return from each token to the end of its sequence, [K].

        G_t = r_t + gamma * G_{t+1},   G after the last token = 0

    Rewards are per token ([K], any float dtype; computed in at least float32). Source: Sutton & Barto, chapter 3.
    """
    require_1d(rewards_K=rewards_K)
    _require_lens(rewards_K.numel(), lens_S)
    rewards = rewards_K if rewards_K.dtype == torch.float64 else rewards_K.float()
    return reverse_scan(rewards, lens_S, gamma)


def reverse_scan(values_K: Tensor, lens_S: Tensor, decay: float) -> Tensor:
    """y_t = x_t + decay * y_{t+1} inside each sequence; one vector operation per time step over all sequences."""
    if values_K.numel() == 0:
        return values_K.clone()
    lens = lens_S.to(device=values_K.device, dtype=torch.int64)
    max_len = int(lens.max())
    time_L = torch.arange(max_len, device=values_K.device)
    # right-aligned, so that every sequence ends in the last column and the scan needs no mask
    mask_SL = time_L[None, :] >= (max_len - lens)[:, None]
    padded_SL = values_K.new_zeros(mask_SL.shape).masked_scatter(mask_SL, values_K)
    carry_S = values_K.new_zeros(lens.numel())
    columns = []
    for time in range(max_len - 1, -1, -1):
        carry_S = padded_SL[:, time] + decay * carry_S
        columns.append(carry_S)
    return torch.stack(columns[::-1], dim=1)[mask_SL]
