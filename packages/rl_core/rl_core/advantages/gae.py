"""Generalised advantage estimation over flat token rows.

Shapes: K response tokens of all sequences one after another, S sequences.
"""

import torch
from torch import Tensor

from .._tensors import require_1d, require_same_shape, upcast
from ..batching.segments import reverse_scan
from ..errors import ShapeError

__all__ = ["gae"]


def gae(
    rewards_K: Tensor,
    values_K: Tensor,
    response_lens_S: Tensor,
    *,
    gamma: float = 1.0,
    lam: float = 0.95,
    bootstrap_values_S: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(advantages_K, returns_K) of PPO, detached, in at least float32.

        delta_t = r_t + gamma V_{t+1} - V_t
        A_t = delta_t + gamma lam A_{t+1}
        returns_t = A_t + V_t                       (the value function's target)

    V and A after the last token are 0, or V is `bootstrap_values_S` where a response was cut off (its value of the
    state after the last token; 0 where it ended by itself). Nothing flows from one sequence into another.
    lam = 1 gives discounted returns minus values, lam = 0 the one-step error.
    Source: Schulman et al. 2015, arXiv:1506.02438, equation 16.
    Padded [B, L] rows: `flatten_padded` first, `pad_flat` after; masked tokens are then stepped over.
    """
    for name, value in (("gamma", gamma), ("lam", lam)):
        if not 0.0 <= value <= 1.0:
            raise ValueError(f"{name}={value}: must be between 0 and 1")
    require_1d(rewards_K=rewards_K, response_lens_S=response_lens_S)
    require_same_shape(rewards_K=rewards_K, values_K=values_K)
    if int(response_lens_S.sum()) != rewards_K.numel():
        raise ShapeError(f"response_lens_S sums to {int(response_lens_S.sum())} for {rewards_K.numel()} tokens")
    rewards, values = upcast(rewards_K.detach(), values_K.detach())
    lens = response_lens_S.to(device=values.device, dtype=torch.int64)
    has_tokens_S = lens > 0
    last_S = lens.cumsum(0)[has_tokens_S] - 1
    next_values = torch.cat([values[1:], values.new_zeros(1)])[: values.numel()]
    next_values[last_S] = 0.0
    if bootstrap_values_S is not None:
        require_same_shape(response_lens_S=response_lens_S, bootstrap_values_S=bootstrap_values_S)
        next_values[last_S] = bootstrap_values_S.detach().to(values)[has_tokens_S]
    deltas = rewards + gamma * next_values - values
    advantages = reverse_scan(deltas, lens, gamma * lam)
    return advantages, advantages + values
