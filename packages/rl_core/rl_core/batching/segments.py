"""Flat rows: sums, means, broadcasts and scans over their sequences, and conversion from and to padded [B, L] rows.

Shapes: K values of all sequences one after another, S sequences, `lens_S` how many of the K belong to each (may be 0).
"""

import torch
from torch import Tensor

from .._tensors import require_1d, require_lens, require_same_shape, upcast
from ..errors import ShapeError


def segment_sum(values_K: Tensor, lens_S: Tensor) -> Tensor:
    """Sum of each sequence's values, [S], in the dtype of `values_K`; 0 for an empty sequence. Differentiable."""
    require_1d(values_K=values_K)
    require_lens(values_K.numel(), lens_S)
    if values_K.numel() == 0:
        # an empty micro batch runs a backward pass too, so its zeros need a graph
        return values_K.sum().expand(lens_S.numel())
    # segment_reduce instead of index_add: it uses no atomics, so it is deterministic on CUDA
    lens = lens_S.to(device=values_K.device, dtype=torch.int64)
    return torch.segment_reduce(values_K, "sum", lengths=lens, initial=0.0)


def segment_mean(values_K: Tensor, lens_S: Tensor) -> Tensor:
    """Mean of each sequence's values, [S]; 0 for an empty sequence. Differentiable."""
    return segment_sum(values_K, lens_S) / lens_S.to(values_K.device).clamp(min=1)


def broadcast_to_tokens(values_S: Tensor, lens_S: Tensor) -> Tensor:
    """Repeat each sequence's value for its tokens: [S] -> [K], K = lens_S.sum()."""
    require_1d(values_S=values_S, lens_S=lens_S)
    if values_S.numel() != lens_S.numel():
        raise ShapeError(field="values_S", value=values_S.numel(), allowed=f"{lens_S.numel()}, one per sequence")
    return torch.repeat_interleave(values_S, lens_S.to(device=values_S.device, dtype=torch.int64))


def returns_to_go(rewards_K: Tensor, lens_S: Tensor, *, gamma: float = 1.0) -> Tensor:
    """Discounted return from each token to the end of its sequence, [K].

        G_t = r_t + gamma * G_{t+1},   G after the last token = 0

    Rewards are per token ([K], any float dtype; computed in at least float32). Source: Sutton & Barto, chapter 3.
    """
    require_1d(rewards_K=rewards_K)
    require_lens(rewards_K.numel(), lens_S)
    (rewards,) = upcast(rewards_K)
    return reverse_scan(rewards, lens_S, gamma)


def reverse_scan(values_K: Tensor, lens_S: Tensor, decay: float) -> Tensor:
    """y_t = x_t + decay * y_{t+1} inside each sequence; one vector operation per time step over all sequences."""
    if values_K.numel() == 0:
        return values_K.clone()
    lens = lens_S.to(device=values_K.device, dtype=torch.int64)
    max_len = int(lens.max())
    time_L = torch.arange(max_len, device=values_K.device)
    # right-aligned: every sequence ends in the last column, so the scan needs no mask
    mask_SL = time_L[None, :] >= (max_len - lens)[:, None]
    padded_SL = values_K.new_zeros(mask_SL.shape).masked_scatter(mask_SL, values_K)
    carry_S = values_K.new_zeros(lens.numel())
    columns = []
    for time in range(max_len - 1, -1, -1):
        carry_S = padded_SL[:, time] + decay * carry_S
        columns.append(carry_S)
    return torch.stack(columns[::-1], dim=1)[mask_SL]


def flatten_padded(values_BL: Tensor, mask_BL: Tensor) -> tuple[Tensor, Tensor]:
    """Select the values where the mask is set, row by row: (values_K, lens_B). Differentiable.

    `lens_B` counts the selected values of each row. Rows may be padded on either side, and the mask may have holes (a
    tool's output inside a response).
    """
    require_same_shape(values_BL=values_BL, mask_BL=mask_BL)
    if mask_BL.dim() != 2:
        raise ShapeError(field="mask_BL", value=tuple(mask_BL.shape), allowed="two dimensions")
    mask = mask_BL.bool()
    return values_BL[mask], mask.sum(dim=1)


def pad_flat(values_K: Tensor, mask_BL: Tensor, *, fill: float = 0.0) -> Tensor:
    """Inverse of `flatten_padded`: the values where the mask is set, `fill` elsewhere, [B, L]. Differentiable."""
    mask = mask_BL.bool()
    if values_K.shape != (int(mask.sum()),):
        raise ShapeError(field="values_K", value=tuple(values_K.shape), allowed=f"({int(mask.sum())},), as the mask")
    padded = values_K.new_full(mask.shape, fill)
    return padded.masked_scatter(mask, values_K)
