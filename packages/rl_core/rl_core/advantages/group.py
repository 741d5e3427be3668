"""Advantages relative to the group of samples of the same prompt (GRPO, Dr. GRPO, RLOO), and ReMax; one per sample.

Shapes: N samples; `group_ids_N` any integers, equal for samples of the same prompt; groups may differ in size.
Sums are in float64; the result has the dtype of the scores (float32 for narrower or integer scores).
The advantages of a group with one sample, or with equal scores, are exactly 0. Scores beyond the largest number whose
sums and squares are finite (1e150 in float64, 4e37 in float32) count as that number.
"""

import torch
from torch import Tensor

from .._tensors import group_range, require_1d, require_same_shape, upcast
from ..errors import require


def group_advantages(
    scores_N: Tensor,
    group_ids_N: Tensor,
    *,
    normalize_by_std: bool = True,
    eps: float = 1e-6,
) -> Tensor:
    """GRPO: the score relative to its group, in standard deviations of the group. [N] -> [N].

        A_i = (s_i - mean(group)) / (std(group) + eps)        std with n - 1 in the denominator

    `normalize_by_std=False` omits the division (Dr. GRPO). The advantages of a group sum to zero; with the division and
    eps = 0 they are invariant to scaling and shifting the scores of a group.
    Source: Shao et al. 2024, arXiv:2402.03300, section 4.1.2.
    Raises `ValueError` for a negative eps, `ShapeError` for shapes.
    """
    require(eps >= 0.0, "eps", eps, "0 or more")
    scores, index_N, counts_G = _grouped(scores_N, group_ids_N)
    centered = _centered(scores, index_N, counts_G)
    if normalize_by_std:
        variance_G = _group_sum(centered.square(), index_N, counts_G) / (counts_G - 1.0).clamp(min=1.0)
        scale_N = (variance_G.sqrt() + eps)[index_N]
        # equal scores are centered to exact zeros; with eps = 0 the division would be 0 / 0
        centered = torch.where(centered == 0.0, 0.0, centered / torch.where(scale_N == 0.0, 1.0, scale_N))
    return centered.to(upcast(scores_N)[0].dtype)


def dr_grpo_advantages(scores_N: Tensor, group_ids_N: Tensor) -> Tensor:
    """Dr. GRPO: A_i = s_i - mean(group), without the division by the std. [N] -> [N].

    Use it with `token_weights("fixed_length", …)`. Source: Liu et al. 2025, arXiv:2503.20783, section 3.
    """
    return group_advantages(scores_N, group_ids_N, normalize_by_std=False)


def rloo_advantages(scores_N: Tensor, group_ids_N: Tensor) -> Tensor:
    """RLOO: the score minus the mean of the group's other samples (leave-one-out baseline). [N] -> [N].

        A_i = s_i - (sum(group) - s_i) / (n - 1) = n / (n - 1) * (s_i - mean(group))

    Source: Ahmadian et al. 2024, arXiv:2402.14740; Kool et al. 2019.
    """
    scores, index_N, counts_G = _grouped(scores_N, group_ids_N)
    factor_G = counts_G / (counts_G - 1.0).clamp(min=1.0)
    return (_centered(scores, index_N, counts_G) * factor_G[index_N]).to(upcast(scores_N)[0].dtype)


def remax_advantages(scores_N: Tensor, baseline_scores_N: Tensor) -> Tensor:
    """ReMax: A_i = s_i minus the score of the greedy response to the same prompt. [N], [N] -> [N].

    Source: Li et al. 2023, arXiv:2310.10505.
    """
    require_same_shape(scores_N=scores_N, baseline_scores_N=baseline_scores_N)
    scores, baseline_scores = upcast(scores_N.detach(), baseline_scores_N.detach())
    return scores - baseline_scores


def _grouped(scores_N: Tensor, group_ids_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    require_1d(scores_N=scores_N, group_ids_N=group_ids_N)
    require_same_shape(scores_N=scores_N, group_ids_N=group_ids_N)
    _, index_N, counts_G = torch.unique(group_ids_N.to(scores_N.device), return_inverse=True, return_counts=True)
    limit = min(1e150, torch.finfo(upcast(scores_N)[0].dtype).max / 8)
    return scores_N.detach().double().clamp(-limit, limit), index_N, counts_G.double()


def _group_sum(values: Tensor, index_N: Tensor, counts_G: Tensor) -> Tensor:
    return torch.zeros_like(counts_G).index_add_(0, index_N, values)


def _centered(scores: Tensor, index_N: Tensor, counts_G: Tensor) -> Tensor:
    """Scores minus the mean of their group; exactly zero if all scores of the group are equal."""
    low_G, high_G = group_range(scores, index_N, counts_G.numel())
    mean_G = _group_sum(scores, index_N, counts_G) / counts_G
    # a rounded mean could leave 1e-17 instead of 0, and dividing by a std of 1e-17 would amplify it
    return torch.where((low_G == high_G)[index_N], 0.0, scores - mean_G[index_N])
