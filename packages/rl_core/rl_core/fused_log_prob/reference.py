"""Reference backend: the textbook computation with all logits in memory, in float32 or float64. For tests."""

import torch
from torch import Tensor

from .types import LogitSpec


def reference_log_prob(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    targets_N: Tensor,
    *,
    spec: LogitSpec,
    bias_V: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probability of each target and entropy of each row, both ``[N]``, by autograd through the plain formula.

    ``dtype`` is the dtype of the computation and of the results, by default float32 (float64 for float64 inputs).
    """
    if dtype is None:
        dtype = torch.float64 if hidden_NH.dtype == torch.float64 else torch.float32
    logits_NV = hidden_NH.to(dtype) @ weight_VH.to(dtype).T
    if bias_V is not None:
        logits_NV = logits_NV + bias_V.to(dtype)
    if spec.soft_cap is not None:
        logits_NV = spec.soft_cap * torch.tanh(logits_NV / spec.soft_cap)
    log_probs_NV = torch.log_softmax(logits_NV / spec.temperature, dim=-1)
    log_prob_N = log_probs_NV.gather(1, targets_N[:, None])[:, 0]
    entropy_N = -(log_probs_NV.exp() * log_probs_NV).sum(-1)
    return log_prob_N, entropy_N
