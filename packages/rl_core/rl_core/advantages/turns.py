"""Advantages of turns: the return of each turn relative to comparable turns of the group.

Shapes: U turns of all samples in order; N samples; `turn_counts_N` turns of each sample, which may be 0.
With r_u the reward of turn u of a sample, and the sum over its later turns, the return is

    G_u = sum_{k >= u} gamma^(k - u) r_k

A turn that has nothing to compare with has the advantage 0. If every sample has one turn, `turn_grpo_advantages` and
`turn_rloo_advantages` are GRPO and RLOO.
"""

import torch
from torch import Tensor

from .._tensors import ranges, require_1d, require_lens, require_same_shape, upcast
from ..batching.segments import broadcast_to_tokens, returns_to_go, segment_sum
from ..errors import require
from .group import group_advantages, rloo_advantages


def turn_grpo_advantages(
    turn_rewards_U: Tensor, turn_counts_N: Tensor, group_ids_N: Tensor, *, gamma: float = 1.0, eps: float = 1e-6
) -> Tensor:
    """GRPO over turns: the return relative to the turns of the same number in the group, [U].

        A_u = (G_u - mean(G of the group's u-th turns)) / (std(...) + eps)        std with n - 1 in the denominator

    Source: Zeng et al. 2025, "Turn-Level Reward Design" (MT-GRPO), arXiv:2505.11821, whose two terms are the turn's own
    reward and the outcome, here one discounted return. Raises `ValueError` for a gamma out of range, `ShapeError` for
    shapes.
    """
    returns_U, ids_U = _compared(turn_rewards_U, turn_counts_N, group_ids_N, gamma)
    return group_advantages(returns_U, ids_U, eps=eps).to(upcast(turn_rewards_U)[0].dtype)


def turn_rloo_advantages(
    turn_rewards_U: Tensor, turn_counts_N: Tensor, group_ids_N: Tensor, *, gamma: float = 1.0
) -> Tensor:
    """RLOO over turns: the return minus the mean return of the group's other turns of the same number, [U].

        A_u = G_u - mean(G of the u-th turns of the other samples)

    Each turn is the action of Ahmadian et al. 2024, arXiv:2402.14740, with G_u as its reward. Raises as
    `turn_grpo_advantages` does.
    """
    returns_U, ids_U = _compared(turn_rewards_U, turn_counts_N, group_ids_N, gamma)
    return rloo_advantages(returns_U, ids_U).to(upcast(turn_rewards_U)[0].dtype)


def gigpo_advantages(
    turn_rewards_U: Tensor,
    turn_counts_N: Tensor,
    state_ids_U: Tensor,
    group_ids_N: Tensor,
    *,
    gamma: float = 1.0,
    turn_weight: float = 1.0,
    eps: float = 1e-6,
) -> Tensor:
    """GiGPO: GRPO over episodes, and over the turns of a group that answer the same state, [U].

        A_u = A_episode + turn_weight A_turn
        A_episode = (R - mean(R of the group)) / (std(...) + eps)                  R = sum of the episode's rewards
        A_turn = (G_u - mean(G of the group's turns in the same state)) / (std(...) + eps)

    `state_ids_U` are equal for turns in the same state, such as those that answer the same observation; equal states of
    other groups are not compared. Source: Feng et al. 2025, arXiv:2505.10978, which has turn_weight 1 and gamma 0.95.
    Raises as `turn_grpo_advantages` does.
    """
    require_same_shape(turn_rewards_U=turn_rewards_U, state_ids_U=state_ids_U)
    returns_U, ids_U = _compared(turn_rewards_U, turn_counts_N, group_ids_N, gamma, state_ids_U)
    totals_N = segment_sum(turn_rewards_U.detach().double(), turn_counts_N)
    of_episodes_U = broadcast_to_tokens(group_advantages(totals_N, group_ids_N, eps=eps), turn_counts_N)
    of_turns_U = group_advantages(returns_U, ids_U, eps=eps)
    return (of_episodes_U + turn_weight * of_turns_U).to(upcast(turn_rewards_U)[0].dtype)


def _compared(
    turn_rewards_U: Tensor, turn_counts_N: Tensor, group_ids_N: Tensor, gamma: float, state_ids_U: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Returns in float64 [U], and numbers [U] that are equal for turns that are compared: those of one group with the
    same state, or with the same number in their samples."""
    require(0.0 <= gamma <= 1.0, "gamma", gamma, "0 to 1")
    require_1d(turn_rewards_U=turn_rewards_U)
    require_same_shape(turn_counts_N=turn_counts_N, group_ids_N=group_ids_N)
    require_lens(turn_rewards_U.numel(), turn_counts_N)
    counts_N = turn_counts_N.cpu().long()
    if state_ids_U is None:
        state_ids_U = ranges(torch.zeros_like(counts_N), counts_N)
    pairs_U2 = torch.stack([group_ids_N.cpu().repeat_interleave(counts_N), state_ids_U.cpu()], dim=1)
    ids_U = torch.unique(pairs_U2, dim=0, return_inverse=True)[1]
    return returns_to_go(turn_rewards_U.detach().double(), counts_N, gamma=gamma), ids_U
