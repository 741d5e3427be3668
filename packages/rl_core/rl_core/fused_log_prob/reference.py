"""Reference backend: the textbook computation with all logits in memory, in float32 or float64. For tests."""

import torch
from torch import Tensor

from .types import LogitInputs, LogitSpec


def reference_log_prob(inputs: LogitInputs) -> tuple[Tensor, Tensor]:
    """Log-probability of each target and entropy of each row, both ``[N]``, by autograd through the plain formula."""
    dtype = torch.float64 if inputs.hidden_NH.dtype == torch.float64 else torch.float32
    logits_NV = inputs.hidden_NH.to(dtype) @ inputs.weight_VH.to(dtype).T
    log_probs_NV = all_log_probs(logits_NV, inputs.bias_V, inputs.spec)
    log_prob_N = log_probs_NV.gather(1, inputs.targets_N[:, None])[:, 0]
    return log_prob_N, -(log_probs_NV.exp() * log_probs_NV).sum(-1)


def all_log_probs(logits_NV: Tensor, bias_V: Tensor | None, spec: LogitSpec) -> Tensor:
    """Log-probabilities of the whole vocabulary from the products of hidden states and weight; differentiable."""
    if bias_V is not None:
        logits_NV = logits_NV + bias_V.to(logits_NV.dtype)
    if spec.soft_cap is not None:
        logits_NV = spec.soft_cap * torch.tanh(logits_NV / spec.soft_cap)
    return torch.log_softmax(logits_NV / spec.temperature, dim=-1)
