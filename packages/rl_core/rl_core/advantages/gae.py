"""Token rewards (score and KL penalty) and generalized advantage estimation over flat token rows.

Shapes: K response tokens of all sequences one after another, S sequences.
"""

import torch
from torch import Tensor

from .._tensors import require_1d, require_lens, require_same_shape, upcast
from ..batching.segments import reverse_scan
from ..errors import ShapeError, require


def token_rewards(
    scores_S: Tensor,
    response_lens_S: Tensor,
    *,
    kl_K: Tensor | None = None,
    kl_coefficient: float = 0.0,
) -> Tensor:
    """Per-token rewards: the score at the last token, the KL penalty at every token. [K], detached, at least float32.

        r_t = -kl_coefficient * kl_t + score * [t is the sequence's last token]

    `kl_K` is `kl_estimate(old_log_probs, ref_log_probs, …)`: KL in the reward instead of in the loss. The score of a
    sequence without tokens is dropped.
    Source: Stiennon et al. 2020, arXiv:2009.01325; Ouyang et al. 2022, arXiv:2203.02155, equation 2.
    Raises `ValueError` for a coefficient without `kl_K`, `ShapeError` for shapes.
    """
    require_1d(scores_S=scores_S, response_lens_S=response_lens_S)
    require_same_shape(scores_S=scores_S, response_lens_S=response_lens_S)
    require(kl_K is not None or kl_coefficient == 0.0, "kl_coefficient", kl_coefficient, "0 without kl_K")
    lens = response_lens_S.to(device=scores_S.device, dtype=torch.int64)
    num_tokens = int(lens.sum())
    (scores,) = upcast(scores_S.detach())
    rewards = scores.new_zeros(num_tokens)
    if kl_K is not None:
        if kl_K.shape != (num_tokens,):
            raise ShapeError(field="kl_K", value=tuple(kl_K.shape), allowed=f"({num_tokens},)")
        scores, kl = upcast(scores, kl_K.detach())
        rewards = -kl_coefficient * kl
    has_tokens_S = lens > 0
    rewards[lens.cumsum(0)[has_tokens_S] - 1] += scores[has_tokens_S]
    return rewards


def gae(
    rewards_K: Tensor,
    values_K: Tensor,
    response_lens_S: Tensor,
    *,
    gamma: float = 1.0,
    lam: float = 0.95,
    bootstrap_values_S: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Generalized advantage estimation: (advantages_K, returns_K), detached, in at least float32.

        delta_t = r_t + gamma V_{t+1} - V_t
        A_t = delta_t + gamma lam A_{t+1}
        returns_t = A_t + V_t                       (target of the value function)

    After the last token A is 0, and V is 0 or `bootstrap_values_S` (for a truncated response: the value of the state
    after its last token; 0 for a finished one). Sequences are independent of each other.
    lam = 1 gives discounted returns minus values, lam = 0 the one-step error.
    Source: Schulman et al. 2015, arXiv:1506.02438, equation 16.
    For padded [B, L] rows call `flatten_padded` before and `pad_flat` after; masked tokens are then skipped.
    Raises `ValueError` for gamma or lam outside [0, 1], `ShapeError` for shapes.
    """
    for name, value in (("gamma", gamma), ("lam", lam)):
        require(0.0 <= value <= 1.0, name, value, "0 to 1")
    require_1d(rewards_K=rewards_K)
    require_same_shape(rewards_K=rewards_K, values_K=values_K)
    require_lens(rewards_K.numel(), response_lens_S)
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
