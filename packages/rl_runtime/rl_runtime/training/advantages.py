"""Advantages by name: the scores of a train batch become per-token columns for the losses.

An episode that branches is several sequences of one sample: it is compared with others, and counted, once.

Shapes: N samples; S sequences; K generated tokens of all samples in order.
"""

from typing import Any

import torch
from torch import Tensor

import rl_core

from ..samples import sample_numbers
from .policy import PolicyConfig


def advantages(
    batch: rl_core.Batch,
    config: PolicyConfig,
    *,
    max_tokens: int,
    kl_coef: float = 0.0,
    lam: float = 1.0,
    whiten: bool = False,
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Estimates the advantages `config.advantage` of a whole train batch, without gradients.

    Columns that it reads: `old_log_probs` and `ref_log_probs` where there is a reference, `values` with a critic.

    With `kl_in=reward`, kl_t = `kl_kind` of (old_log_probs, ref_log_probs) lowers the rewards:

        discounting: r_t = (turn rewards and the score at the last token)_t - kl_coef kl_t, summed over a turn per turn
        the others:  s_i = score_i - kl_coef sum_t kl_it           (RLOO, arXiv:2402.14740, equation 2)

    With `overlong_penalty`, DAPO's punishment of long responses (arXiv:2503.14476, equation 13) is added to the score
    first. The score of an extra rollout (ReMax) has neither term: it does not depend on the sample, so the gradient
    stays unbiased.

    Args:
        max_tokens: `sampling.max_tokens`, the length at which responses are cut.
        kl_coef: current coefficient of the KL term.
        lam: lambda of gae (arXiv:1506.02438).
        whiten: normalize the advantages of an estimator with a critic to zero mean and unit variance; `returns` keep
            their scale.

    Returns:
        columns [K]: `advantages`, and `returns` (targets of the critic) with a critic; metrics by name.

    Raises:
        KeyError: the batch lacks what the estimator reads, such as the scores of an extra rollout.
    """
    lens_S, numbers_S = batch.response_lens_S, sample_numbers(batch)
    lens_N = torch.bincount(numbers_S, lens_S.double()).long()
    first_N = torch.searchsorted(numbers_S, torch.arange(len(lens_N)))
    scores_S, metrics = _training_scores(batch, config, max_tokens)
    penalty_K, kl_metrics = _kl_penalty(batch, config, kl_coef)
    inputs: dict[str, Any] = {"response_lens_N": lens_N, "response_lens_S": lens_S}
    inputs |= {"group_ids_N": batch.per_sequence["group_ids"][first_N], "gamma": config.gamma, "lam": lam}
    if "baseline_scores" in batch.per_sequence:
        inputs["baseline_scores_N"] = batch.per_sequence["baseline_scores"][first_N]
    if "values" in batch.columns:
        inputs["values_K"] = batch.columns["values"]
    estimator = rl_core.ADVANTAGES[config.advantage]
    if estimator.discounts:
        inputs["rewards_K"] = _token_rewards(batch, scores_S) - penalty_K
        # the return of a token, or of a turn, is that of its path
        inputs |= {"response_lens_N": lens_S, "group_ids_N": batch.per_sequence["group_ids"]}
    else:
        inputs["scores_N"] = scores_S[first_N] - rl_core.segment_sum(penalty_K, lens_N)
    if estimator.per_turn:
        inputs["group_ids_N"] = batch.per_sequence["group_ids"][first_N]
        estimate = _turn_advantages(batch, estimator, inputs, scores_S[first_N], penalty_K)
        return {"advantages": estimate}, metrics | kl_metrics | _spread(estimate)
    estimate = estimator.estimate(inputs)
    if estimator.needs_critic:
        advantages_K, returns_K = estimate
        columns, critic_metrics = _with_returns(advantages_K, returns_K, inputs["values_K"], whiten=whiten)
        return columns, metrics | kl_metrics | critic_metrics
    metrics |= kl_metrics | _spread(estimate)
    advantages_K = estimate if estimator.per_token else rl_core.broadcast_to_tokens(estimate, lens_N)
    return {"advantages": advantages_K}, metrics


def _training_scores(batch: rl_core.Batch, config: PolicyConfig, max_tokens: int) -> tuple[Tensor, dict[str, float]]:
    """Scores with the penalty of long responses, float64 [S], and metrics of the length shaping."""
    scores_S, metrics = batch.per_sequence["scores"], {}
    if config.overlong_penalty:
        penalty_S = rl_core.overlong_penalty(
            batch.per_sequence["total_lens"],
            max_length=max_tokens,
            buffer_length=config.overlong_buffer or max(1, max_tokens // 5),
            penalty=config.overlong_penalty,
            dtype=torch.float64,
        )
        scores_S = scores_S + penalty_S
        metrics["overlong/num_penalized"] = float((penalty_S < 0).sum())
        metrics["overlong/penalty_mean"] = float(penalty_S.mean())
    if config.overlong_filter:
        metrics["overlong/num_filtered"] = float(batch.per_sequence["is_truncated"].sum())
    return scores_S, metrics


def _kl_penalty(batch: rl_core.Batch, config: PolicyConfig, kl_coef: float) -> tuple[Tensor, dict[str, float]]:
    """The reward that the KL term takes from each token, float32 [K], and the mean KL per token."""
    none_K = torch.zeros(batch.num_targets)
    if "ref_log_probs" not in batch.columns:
        return none_K, {}
    kl_K = rl_core.kl_estimate(batch.columns["old_log_probs"], batch.columns["ref_log_probs"], kind=config.kl_kind)
    return kl_coef * kl_K if config.kl_in == "reward" else none_K, {"actor/ref_kl": float(kl_K.mean())}


def _token_rewards(batch: rl_core.Batch, scores_S: Tensor) -> Tensor:
    """Turn rewards at their tokens, and the part of the score beyond them at the last token: float32 [K].

    Each path of an episode that branches has that part at its own last token.
    """
    lens_S, numbers_S = batch.response_lens_S, sample_numbers(batch)
    turn_rewards_K = batch.columns.get("turn_rewards", torch.zeros(batch.num_targets))
    sums_S = rl_core.segment_sum(turn_rewards_K.double(), lens_S)
    rest_S = scores_S - torch.zeros_like(sums_S).index_add(0, numbers_S, sums_S)[numbers_S]
    return rl_core.token_rewards(rest_S.float(), lens_S) + turn_rewards_K


def _turn_advantages(
    batch: rl_core.Batch, estimator: rl_core.Advantage, inputs: dict[str, Any], scores_N: Tensor, penalty_K: Tensor
) -> Tensor:
    """Advantages of an estimator of turns, [K].

    The turns of an episode that branches are those of all its paths; the path of the latest turn, which is the first in
    the batch, comes last. Its last turn has the part of the score beyond the turn rewards.
    """
    turns, numbers_S = rl_core.find_turns(batch), sample_numbers(batch)
    is_latest_S = torch.ones_like(numbers_S).index_fill(0, numbers_S.diff().eq(0).nonzero().flatten() + 1, 0)
    sequence_U = torch.arange(len(numbers_S)).repeat_interleave(turns.counts_S)
    order_U = torch.argsort(2 * numbers_S[sequence_U] + is_latest_S[sequence_U], stable=True)
    counts_N = torch.bincount(numbers_S[sequence_U], minlength=len(scores_N))
    turn_rewards_K = batch.columns.get("turn_rewards", torch.zeros(batch.num_targets)).double()
    given_U, taken_U = (rl_core.segment_sum(x, turns.lens_U)[order_U] for x in (turn_rewards_K, penalty_K.double()))
    rest_N = scores_N - rl_core.segment_sum(given_U, counts_N)
    inputs = inputs | {"turn_rewards_U": rl_core.token_rewards(rest_N, counts_N) + given_U - taken_U}
    inputs |= {"turn_counts_N": counts_N, "state_ids_U": turns.state_ids_U[order_U]}
    advantages_U = torch.zeros(len(order_U), dtype=torch.float64)
    advantages_U[order_U] = estimator.estimate(inputs)
    return rl_core.broadcast_to_tokens(advantages_U, turns.lens_U)


def _with_returns(
    advantages_K: Tensor, returns_K: Tensor, values_K: Tensor, *, whiten: bool
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Columns of an estimator with a critic, and metrics of the critic."""
    spread = float(returns_K.var(correction=0))
    # Equal returns have no variance to explain, except for rounding.
    explained = 1 - float((returns_K - values_K).var(correction=0)) / spread if spread > 1e-12 else 0.0
    metrics = _spread(advantages_K) | {
        "critic/values/mean": float(values_K.mean()),
        "critic/returns/mean": float(returns_K.mean()),
        "critic/explained_variance": explained,
    }
    if whiten:
        advantages_K = rl_core.masked_whiten(advantages_K)
    return {"advantages": advantages_K, "returns": returns_K}, metrics


def _spread(advantages: Tensor) -> dict[str, float]:
    return {"actor/advantage_std": float(advantages.std(correction=0))}
