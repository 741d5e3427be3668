"""Aggregation of per-token losses into the mini-batch loss, independent of micro batches and ranks.

The mini-batch loss is  L = sum_i w_i * sum_t loss_it.  The weights w depend only on the lengths of the whole mini
batch, so each micro batch on each rank contributes the sum of w_i * loss_it over its own tokens, and the contributions
add up to L. Shapes: N sequences of the mini batch, K their tokens one after another.
"""

import torch
from torch import Tensor

from .._tensors import require_1d, require_same_shape, upcast
from ..batching.segments import broadcast_to_tokens
from ..errors import require
from ..options import LossAggregation, require_option


def token_weights(
    mode: LossAggregation,
    response_lens_N: Tensor,
    *,
    fixed_length: int | None = None,
    num_tokens: int | None = None,
    num_sequences: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Weight of every token of each sequence, [N] in `dtype`.

    With n_i tokens in sequence i, n = sum_i n_i, and M sequences that have a token:

    ===================  ==============  =========================================================================
    mode                 w_i             source
    ===================  ==============  =========================================================================
    token_mean           1 / n           DAPO, arXiv:2503.14476, equation 8
    seq_mean_token_sum   1 / M           the REINFORCE sum over a trajectory, averaged over samples
    seq_mean_token_mean  1 / (M n_i)     GRPO, arXiv:2402.03300, equation 3
    fixed_length         1 / (M L)       Dr. GRPO, arXiv:2503.20783, with L = `fixed_length` for all
    ===================  ==============  =========================================================================

    A sequence without tokens has weight 0 and is not counted, so padding sequences change nothing. `num_tokens` and
    `num_sequences` replace n and M where `response_lens_N` is only a part of the mini batch (see `global_totals`).
    Raises `ValueError` for an unknown mode, or `fixed_length` missing, unused or below 1.
    """
    require_option("mode", mode, LossAggregation)
    require_1d(response_lens_N=response_lens_N)
    if mode == "fixed_length":
        require(fixed_length is not None and fixed_length >= 1, "fixed_length", fixed_length, "1 or more")
    else:
        require(fixed_length is None, "fixed_length", fixed_length, f"None with mode {mode}")
    lens_N = response_lens_N.to(torch.float64)
    has_tokens_N = lens_N > 0
    tokens = lens_N.sum() if num_tokens is None else lens_N.new_tensor(float(num_tokens))
    sequences = has_tokens_N.sum().to(lens_N) if num_sequences is None else lens_N.new_tensor(float(num_sequences))
    tokens, sequences = tokens.clamp(min=1), sequences.clamp(min=1)
    if mode == "token_mean":
        weights_N = (1.0 / tokens).expand_as(lens_N)
    elif mode == "seq_mean_token_sum":
        weights_N = (1.0 / sequences).expand_as(lens_N)
    elif mode == "seq_mean_token_mean":
        weights_N = 1.0 / (sequences * lens_N.clamp(min=1))
    else:
        weights_N = (1.0 / (sequences * float(fixed_length or 1))).expand_as(lens_N)
    return torch.where(has_tokens_N, weights_N, 0.0).to(dtype)


def aggregate_loss(loss_K: Tensor, weights_N: Tensor, response_lens_N: Tensor) -> Tensor:
    """sum_i w_i sum_t loss_it, a 0-d tensor: the mini-batch loss, or the share of it that these sequences contribute.

    Differentiable in `loss_K`. `weights_N` and `response_lens_N` are the entries of the sequences in `loss_K`. Without
    sequences the result is 0 and still has a graph.
    """
    weights_K = broadcast_to_tokens(weights_N, response_lens_N)
    require_same_shape(loss_K=loss_K, weights_K=weights_K)
    loss, weights = upcast(loss_K, weights_K)
    return (loss * weights).sum()


def global_totals(response_lens_N: Tensor, group: "torch.distributed.ProcessGroup | None") -> tuple[int, int]:
    """(number of tokens, number of sequences that have one) over all ranks of the group: exactly one all-reduce.

    For trainers whose ranks each know only their own sequences. `response_lens_N` must be on the group's device. With
    `group` None only this process counts and nothing is communicated. Where gradients are averaged over R ranks,
    multiply the loss by R.
    """
    require_1d(response_lens_N=response_lens_N)
    totals = torch.stack([response_lens_N.sum(), (response_lens_N > 0).sum()]).to(torch.int64)
    if group is not None:
        torch.distributed.all_reduce(totals, group=group)
    return int(totals[0]), int(totals[1])
