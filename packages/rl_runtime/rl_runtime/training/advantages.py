"""Advantages by name: the scores of a train batch become per-token columns for the losses.

Shapes: N samples; K generated tokens of all samples in order.
"""

from collections.abc import Callable

import torch
from torch import Tensor

import rl_core

from ..experience import ExperienceBatch
from .policy import TOKEN_LEVEL, PolicyConfig

_GROUP_RELATIVE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "grpo": rl_core.group_advantages,
    "dr_grpo": rl_core.dr_grpo_advantages,
    "rloo": rl_core.rloo_advantages,
}


def advantages(
    batch: ExperienceBatch,
    config: PolicyConfig,
    *,
    max_tokens: int,
    kl_coef: float = 0.0,
    lam: float = 1.0,
    whiten: bool = False,
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Estimates the advantages `config.advantage` of a whole train batch, without gradients.

    Columns that it reads: `old_log_probs` and `ref_log_probs` where there is a reference, `values` with gae.

    With `kl_in=reward`, kl_t = `kl_kind` of (old_log_probs, ref_log_probs) lowers the rewards:

        gae, reinforce_pp:  r_t = (turn rewards and the score at the last token)_t - kl_coef kl_t
        the others:         s_i = score_i - kl_coef sum_t kl_it           (RLOO, arXiv:2402.14740, equation 2)

    With `overlong_penalty`, DAPO's punishment of long responses (arXiv:2503.14476, equation 13) is added to the score
    first. The greedy score that ReMax subtracts has neither term: it does not depend on the sample, so the gradient
    stays unbiased.

    Args:
        max_tokens: `sampling.max_tokens`, the length at which responses are cut.
        kl_coef: current coefficient of the KL term.
        lam: lambda of gae (arXiv:1506.02438).
        whiten: normalize gae's advantages to zero mean and unit variance; `returns` keep their scale.

    Returns:
        columns [K]: `advantages`, and `returns` (targets of the critic) with gae; metrics by name.

    Raises:
        ValueError: a sample has no `baseline_score` (ReMax).
    """
    lens_N = batch.response_lens_N
    scores_N, metrics = _training_scores(batch, config, max_tokens)
    penalty_K, of_kl = _kl_penalty(batch, config, kl_coef)
    metrics |= of_kl
    if config.advantage in TOKEN_LEVEL:
        # Turn rewards at their tokens, and what the score has beyond them at the last token.
        turn_rewards_K = batch.turn_rewards_K
        rest_N = scores_N - rl_core.segment_sum(turn_rewards_K.double(), lens_N)
        rewards_K = rl_core.token_rewards(rest_N.float(), lens_N) + turn_rewards_K
        columns, of_estimator = _token_level(batch, config, rewards_K - penalty_K, lam, whiten)
        return columns, metrics | of_estimator
    scores_N = scores_N - rl_core.segment_sum(penalty_K, lens_N)
    if config.advantage == "reinforce_pp_baseline":
        advantages_K = rl_core.reinforce_pp_baseline_advantages(scores_N, batch.group_ids_N, lens_N)
        return {"advantages": advantages_K}, metrics | _spread(advantages_K)
    if config.advantage == "remax":
        baselines = [item.baseline_score for item in batch.items]
        if None in baselines:
            raise ValueError("advantage=remax needs the baseline_score of every sample: the score of a greedy response")
        advantages_N = rl_core.remax_advantages(scores_N, torch.tensor(baselines, dtype=torch.float64))
    else:
        advantages_N = _GROUP_RELATIVE[config.advantage](scores_N, batch.group_ids_N)
    return {"advantages": rl_core.broadcast_to_tokens(advantages_N, lens_N)}, metrics | _spread(advantages_N)


def _training_scores(batch: ExperienceBatch, config: PolicyConfig, max_tokens: int) -> tuple[Tensor, dict[str, float]]:
    """Scores with the penalty of long responses, float64 [N], and metrics of the length shaping."""
    scores_N, metrics = batch.scores_N, {}
    if config.overlong_penalty:
        penalty_N = rl_core.overlong_penalty(
            batch.total_lens_N,
            max_length=max_tokens,
            buffer_length=config.overlong_buffer or max(1, max_tokens // 5),
            penalty=config.overlong_penalty,
            dtype=torch.float64,
        )
        scores_N = scores_N + penalty_N
        metrics["overlong/num_penalized"] = float((penalty_N < 0).sum())
        metrics["overlong/penalty_mean"] = float(penalty_N.mean())
    if config.overlong_filter:
        metrics["overlong/num_filtered"] = float((~rl_core.overlong_keep(batch.truncated_N)).sum())
    return scores_N, metrics


def _kl_penalty(batch: ExperienceBatch, config: PolicyConfig, kl_coef: float) -> tuple[Tensor, dict[str, float]]:
    """What the KL term takes from the reward of each token, float32 [K], and the mean KL per token."""
    none_K = torch.zeros(int(batch.response_lens_N.sum()))
    if "ref_log_probs" not in batch.columns:
        return none_K, {}
    kl_K = rl_core.kl_estimate(batch.flat("old_log_probs"), batch.flat("ref_log_probs"), kind=config.kl_kind)
    return kl_coef * kl_K if config.kl_in == "reward" else none_K, {"actor/ref_kl": float(kl_K.mean())}


def _token_level(
    batch: ExperienceBatch, config: PolicyConfig, rewards_K: Tensor, lam: float, whiten: bool
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """REINFORCE++ or GAE of token rewards: columns and metrics."""
    lens_N = batch.response_lens_N
    if config.advantage == "reinforce_pp":
        advantages_K = rl_core.reinforce_pp_advantages(rewards_K, lens_N, gamma=config.gamma)
        return {"advantages": advantages_K}, _spread(advantages_K)
    values_K = batch.flat("values")
    advantages_K, returns_K = rl_core.gae(rewards_K, values_K, lens_N, gamma=config.gamma, lam=lam)
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
