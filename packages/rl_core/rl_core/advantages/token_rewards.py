"""Token rewards: a sequence's score at its last token, and the KL penalty at every one.

Shapes: K response tokens of all sequences one after another, S sequences.
"""

import torch
from torch import Tensor

from .._tensors import require_1d, require_same_shape, upcast
from ..errors import ShapeError

__all__ = ["token_rewards"]


def token_rewards(
    scores_S: Tensor,
    response_lens_S: Tensor,
    *,
    kl_K: Tensor | None = None,
    kl_coefficient: float = 0.0,
) -> Tensor:
    """Rewards per token, [K], detached, in at least float32.

        r_t = -kl_coefficient * kl_t + score * [t is the sequence's last token]

    `kl_K` is `kl_estimate(old_log_probs, ref_log_probs, …)`: KL in the reward instead of in the loss. A sequence
    without tokens has nowhere to put its score.
    Source: Stiennon et al. 2020, arXiv:2009.01325; Ouyang et al. 2022, arXiv:2203.02155, equation 2.
    """
    require_1d(scores_S=scores_S, response_lens_S=response_lens_S)
    require_same_shape(scores_S=scores_S, response_lens_S=response_lens_S)
    if kl_K is None and kl_coefficient != 0.0:
        raise ValueError(f"kl_coefficient={kl_coefficient} without kl_K")
    lens = response_lens_S.to(device=scores_S.device, dtype=torch.int64)
    num_tokens = int(lens.sum())
    (scores,) = upcast(scores_S.detach())
    rewards = scores.new_zeros(num_tokens)
    if kl_K is not None:
        if kl_K.shape != (num_tokens,):
            raise ShapeError(f"kl_K has shape {tuple(kl_K.shape)}; must be ({num_tokens},)")
        scores, kl = upcast(scores, kl_K.detach())
        rewards = -kl_coefficient * kl
    has_tokens_S = lens > 0
    rewards[lens.cumsum(0)[has_tokens_S] - 1] += scores[has_tokens_S]
    return rewards
