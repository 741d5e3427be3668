"""REINFORCE++: token returns without a critic, whitened over the whole batch.

Shapes: K response tokens of all sequences one after another, N sequences (the samples of the batch).
"""

import torch
from torch import Tensor

from ..batching.segments import broadcast_to_tokens, returns_to_go
from .group import group_advantages
from .whiten import masked_whiten


def reinforce_pp_advantages(
    rewards_K: Tensor,
    response_lens_N: Tensor,
    *,
    gamma: float = 1.0,
    group: "torch.distributed.ProcessGroup | None" = None,
) -> Tensor:
    """REINFORCE++ without a baseline, [K].

        A_t = whiten(sum_{k >= t} gamma^(k - t) r_k)       over all tokens of the batch

    `rewards_K` are the results of `token_rewards`: the score at the last token, the KL penalty at every token.
    `group`: whiten over its ranks, with one all-reduce. Source: Hu 2025, arXiv:2501.03262.
    """
    return masked_whiten(returns_to_go(rewards_K.detach(), response_lens_N, gamma=gamma), group=group)


def reinforce_pp_baseline_advantages(
    scores_N: Tensor,
    group_ids_N: Tensor,
    response_lens_N: Tensor,
    *,
    group: "torch.distributed.ProcessGroup | None" = None,
) -> Tensor:
    """REINFORCE++ with the mean of the group as baseline, [K].

        A_it = whiten(s_i - mean(group of i))              over all tokens of the batch

    All samples of a prompt must be on one rank. `group`: whiten over its ranks, with one all-reduce.
    Source: Hu 2025, arXiv:2501.03262, the baseline variant (one std for the batch instead of one per prompt).
    """
    centered_N = group_advantages(scores_N, group_ids_N, normalize_by_std=False)
    return masked_whiten(broadcast_to_tokens(centered_N, response_lens_N), group=group)
