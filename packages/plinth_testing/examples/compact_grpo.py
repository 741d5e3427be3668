"""A compact GRPO trainer as many projects have one: padded batches, gradient accumulation, data parallelism.

It imports nothing of Plinth. test_compact_grpo.py beside it tests its batch math.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn


def group_advantages(rewards_B: Tensor, group_size: int, eps: float = 1e-4) -> Tensor:
    """Rewards minus the mean of their group, over its standard deviation."""
    rewards_GN = rewards_B.view(-1, group_size)
    mean_G1 = rewards_GN.mean(dim=1, keepdim=True)
    std_G1 = rewards_GN.std(dim=1, keepdim=True)
    return ((rewards_GN - mean_G1) / (std_G1 + eps)).flatten()


def response_mask(prompt_lens_B: Tensor, total_lens_B: Tensor, length: int) -> Tensor:
    """True where token t + 1 belongs to the response, [B, L - 1]."""
    position = torch.arange(1, length)
    return (position >= prompt_lens_B[:, None]) & (position < total_lens_B[:, None])


def token_log_probs(model: nn.Module, input_ids_BL: Tensor) -> Tensor:
    """log-prob of token t + 1 given the tokens up to t, [B, L - 1]."""
    logits_BLV = model(input_ids_BL)[:, :-1]
    return logits_BLV.log_softmax(-1).gather(-1, input_ids_BL[:, 1:, None]).squeeze(-1)


def policy_loss(log_probs: Tensor, old_log_probs: Tensor | None, advantages_B: Tensor, clip: float = 0.2) -> Tensor:
    """PPO's clipped loss of each token; without old_log_probs, that of the first update."""
    old = log_probs.detach() if old_log_probs is None else old_log_probs
    ratio = torch.exp(log_probs - old)
    clipped = ratio.clamp(1 - clip, 1 + clip)
    return -torch.min(ratio * advantages_B[:, None], clipped * advantages_B[:, None])


def kl_penalty(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """The k3 estimate of KL(policy || reference), for each token."""
    difference = ref_log_probs - log_probs
    return difference.exp() - difference - 1


def sum_over_ranks(value: Tensor) -> None:
    """Add up in place what the ranks hold."""
    if dist.is_initialized():
        dist.all_reduce(value)


def accumulate_gradients(
    model: nn.Module,
    input_ids_BL: Tensor,
    mask_BL: Tensor,
    advantages_B: Tensor,
    micro_batches: list[list[int]],
    *,
    ref_log_probs_BL: Tensor | None = None,
    kl_coef: float = 0.1,
) -> None:
    """Adds the gradient of the mean loss over the response tokens of all micro batches and ranks."""
    num_tokens = mask_BL.sum()
    sum_over_ranks(num_tokens)
    for rows in micro_batches:
        log_probs = token_log_probs(model, input_ids_BL[rows])
        loss_BL = policy_loss(log_probs, None, advantages_B[rows])
        if ref_log_probs_BL is not None:
            loss_BL = loss_BL + kl_coef * kl_penalty(log_probs, ref_log_probs_BL[rows])
        loss = (loss_BL * mask_BL[rows]).sum() / num_tokens.clamp(min=1)
        loss.backward()
    for parameter in model.parameters():
        if parameter.grad is None:  # a rank without sequences takes part in every sum
            parameter.grad = torch.zeros_like(parameter)
        sum_over_ranks(parameter.grad)
