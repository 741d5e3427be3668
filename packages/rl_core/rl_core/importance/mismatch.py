"""Metrics of the mismatch between rollout and trainer log-probs of the same tokens under the same weights.

Shapes: K response tokens, S sequences.
"""

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from .._tensors import require_same_shape
from ..batching.segments import segment_mean, segment_sum


def effective_sample_size(weights: Tensor) -> float:
    """Kish's effective sample size as a fraction of the samples: (sum w)^2 / (n sum w^2), in (0, 1].

    1 if all weights are equal, 1/n if only one is not zero. 1 without samples.
    Source: Kish 1965, "Survey Sampling"; used for importance weights in Kong 1992.
    """
    weights = weights.detach().double().flatten()
    square_sum = float(weights.square().sum())
    if weights.numel() == 0 or square_sum == 0.0:
        return 1.0
    return float(weights.sum()) ** 2 / (weights.numel() * square_sum)


def mismatch_metrics(
    log_probs_K: Tensor,
    rollout_log_probs_K: Tensor,
    *,
    response_lens_S: Tensor | None = None,
    percentiles: Sequence[float] = (1, 5, 50, 95, 99),
) -> dict[str, float]:
    """Mismatch metrics over all tokens, in float64. The tokens must be samples of the rollout engine.

    With d = log_probs - rollout_log_probs and the ratio r = e^d:
    `num_tokens`; `abs_mean`, `abs_max` of |d|; `prob_abs_mean`, `prob_abs_max` of |e^log_probs - e^rollout_log_probs|;
    `kl_k1` = mean(-d) and `kl_k3` = mean(r - 1 - d), both estimates of KL(rollout || trainer); `ratio_mean`,
    `ratio_min`, `ratio_max`, `ratio_p<q>` for each percentile q (linear interpolation); `ess`, the effective sample
    size of r as a fraction of the tokens. With `response_lens_S` also, over sequences that have tokens:
    `seq_ratio_mean`, `seq_ratio_max`, `seq_ess` of the product of a sequence's ratios, and `seq_geo_ratio_min`,
    `seq_geo_ratio_max` of its geometric mean. Without tokens the result is that of no mismatch (0 for differences, 1
    for ratios). Raises `ShapeError` for shapes that differ.
    """
    require_same_shape(log_probs_K=log_probs_K, rollout_log_probs_K=rollout_log_probs_K)
    log_probs = log_probs_K.detach().double().flatten()
    rollout_log_probs = rollout_log_probs_K.detach().double().flatten()
    difference = log_probs - rollout_log_probs
    if difference.numel() == 0:
        # one token without mismatch, so that every key has its neutral value
        log_probs = rollout_log_probs = difference = difference.new_zeros(1)
    ratio = difference.exp()
    prob_gap = (log_probs.exp() - rollout_log_probs.exp()).abs()
    metrics = {
        "num_tokens": float(log_probs_K.numel()),
        "abs_mean": float(difference.abs().mean()),
        "abs_max": float(difference.abs().max()),
        "prob_abs_mean": float(prob_gap.mean()),
        "prob_abs_max": float(prob_gap.max()),
        "kl_k1": float(-difference.mean()),
        "kl_k3": float((difference.expm1() - difference).mean()),
        "ratio_mean": float(ratio.mean()),
        "ratio_min": float(ratio.min()),
        "ratio_max": float(ratio.max()),
        "ess": effective_sample_size(ratio),
    }
    values = np.percentile(ratio.cpu().numpy(), percentiles)  # torch.quantile is limited to 16 million values
    metrics |= {f"ratio_p{percentile:g}": float(v) for percentile, v in zip(percentiles, values, strict=True)}
    if response_lens_S is not None:
        metrics |= _sequence_metrics((log_probs_K - rollout_log_probs_K).detach().double(), response_lens_S)
    return metrics


def _sequence_metrics(difference_K: Tensor, response_lens_S: Tensor) -> dict[str, float]:
    has_tokens_S = (response_lens_S > 0).to(difference_K.device)
    log_ratio = segment_sum(difference_K, response_lens_S)[has_tokens_S]
    log_geo = segment_mean(difference_K, response_lens_S)[has_tokens_S]
    if log_ratio.numel() == 0:
        log_ratio = log_geo = difference_K.new_zeros(1)
    ratio = log_ratio.clamp(max=700.0).exp()  # exp(710) overflows float64
    return {
        "seq_ratio_mean": float(ratio.mean()),
        "seq_ratio_max": float(ratio.max()),
        # invariant to scaling the weights, so divide by the largest to avoid overflow
        "seq_ess": effective_sample_size((log_ratio - log_ratio.max()).exp()),
        "seq_geo_ratio_min": float(log_geo.min().exp()),
        "seq_geo_ratio_max": float(log_geo.max().exp()),
    }
