"""The policy loss on the trainer ranks: a loss by name or of the user, with KL and entropy terms, and its weights.

Shapes: K generated tokens of a micro batch, S sequences; N samples of a train batch.
"""

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

import rl_core
from ds_engine import LossOutput, TokenOutputs

from ..errors import InputError
from ..rollout.user_functions import load_function
from ..samples import sample_numbers
from .off_policy import correction_weights
from .policy import PolicyConfig


def loss_weights(
    batch: rl_core.Batch, config: PolicyConfig, *, max_tokens: int, mini_batches: Sequence[Sequence[int]] | None = None
) -> dict[str, Tensor]:
    """The columns that turn token losses into the mini-batch loss: `weights`, and `mean_weights` for metrics.

    An episode that branches counts as one sequence of all its tokens.
    With `overlong_filter`, truncated responses have weight 0 and are not counted in the means.

    Args:
        max_tokens: `sampling.max_tokens`, the divisor of `fixed_length`.
        mini_batches: sequences of each mini batch; None: the batch is one mini batch.
    """
    mode = config.loss_aggregation
    fixed_length = max_tokens if mode == "fixed_length" else None
    lens_S, numbers_S = batch.response_lens_S, sample_numbers(batch)
    if config.overlong_filter:
        lens_S = lens_S * rl_core.overlong_keep(batch.per_sequence["is_truncated"])
    weights_S, mean_S = torch.zeros(len(lens_S), dtype=torch.float64), torch.zeros(len(lens_S), dtype=torch.float64)
    for indices in mini_batches or [range(len(lens_S))]:
        chosen = torch.tensor(indices)
        numbers_N, place = numbers_S[chosen].unique(return_inverse=True)
        lens_N = torch.zeros(len(numbers_N), dtype=lens_S.dtype).index_add(0, place, lens_S[chosen])
        weights_S[chosen] = rl_core.token_weights(mode, lens_N, fixed_length=fixed_length).double()[place]
        mean_S[chosen] = rl_core.token_weights("token_mean", lens_N).double()[place]
    per_token = rl_core.broadcast_to_tokens
    lens_S = batch.response_lens_S
    return {"weights": per_token(weights_S, lens_S), "mean_weights": per_token(mean_S, lens_S)}


def policy_loss(outputs: TokenOutputs, batch: rl_core.Batch, *, config: PolicyConfig, kl_coef: float) -> LossOutput:
    """This micro batch's share of the loss: sum_k w_k (policy loss + kl_coef KL - entropy_coef H)_k.

    Columns: `old_log_probs`, `advantages`, `weights`, `mean_weights`, `ref_log_probs` for a KL term in the loss, and
    `rollout_log_probs` with a rollout correction, whose weights multiply all terms: E_rollout[w l] = E_policy[l].
    Sequences must be whole, for GSPO; with sequence parallelism too, every rank gets the outputs of whole sequences.
    """
    columns, log_probs_K = batch.columns, outputs.log_probs_K
    weights_K, mean_K = columns["weights"], columns["mean_weights"]
    weights_K = weights_K * correction_weights(batch, config.rollout_correction)
    loss_K, stats = _token_loss(log_probs_K, batch, config)
    metrics = {
        "pg_loss": (weights_K * loss_K).sum().detach(),
        "entropy": (mean_K * outputs.entropy_K).sum().detach(),
        **rl_core.policy_metric_shares(stats, mean_K),
    }
    if kl_coef and config.kl_in == "loss":
        kl_K = rl_core.kl_loss(
            log_probs_K, columns["ref_log_probs"], kind=config.kl_kind, old_log_probs_K=columns["old_log_probs"]
        )
        loss_K = loss_K + kl_coef * kl_K
        metrics["kl"] = (mean_K * kl_K).sum().detach()
    if config.entropy_coef:
        loss_K = loss_K - config.entropy_coef * outputs.entropy_K
    return LossOutput(loss=(weights_K * loss_K).sum(), metrics=metrics)


def check_loss(config: PolicyConfig) -> None:
    """Tries the loss with its options on two made-up sequences, in this process.

    Raises:
        InputError: a loss function of the user cannot be imported or called, or the loss does not return one
            differentiable value per token.
    """
    if config.has_own_loss:
        _load_loss(config.loss, tuple(config.loss_options))
    columns = {name: torch.full((5,), -0.5) for name in ("old_log_probs", "ref_log_probs", "rollout_log_probs")}
    columns |= {
        "staleness": torch.zeros(5, dtype=torch.int32),
        "advantages": torch.tensor([1.0, 1.0, -1.0, -1.0, -1.0]),
    }
    batch = rl_core.pack([[0], [0]], [[1] * 2, [1] * 3], columns=columns)
    log_probs_K = torch.tensor([-0.4, -0.6, -0.5, -0.7, -0.3], requires_grad=True)
    try:
        loss_K, _ = _token_loss(log_probs_K, batch, config)
        if not (loss_K.requires_grad and loss_K.isfinite().all()):
            raise InputError(f"{loss_K} is not finite, or has no gradient with respect to log_probs_K")
    except Exception as error:
        problem = str(error) if isinstance(error, InputError) else f"{type(error).__name__}: {error}"
        raise InputError(f"fails on a trial batch: {problem}", field="algorithm.loss", value=config.loss) from error


def _token_loss(
    log_probs_K: Tensor, batch: rl_core.Batch, config: PolicyConfig
) -> tuple[Tensor, rl_core.PolicyLossStats]:
    """The loss `config.loss` of each token, [K], and its ratios and clip flags."""
    if not config.has_own_loss:
        return rl_core.POLICY_LOSSES[config.loss](log_probs_K, batch, **config.loss_settings)
    # Without bounds nothing is clipped: the ratios of a loss that has its own way to bound them.
    _, stats = rl_core.POLICY_LOSSES["ppo_clip"](log_probs_K, batch, clip_low=1.0, clip_high=math.inf)
    return _own_loss(log_probs_K, batch, config), stats


def _own_loss(log_probs_K: Tensor, batch: rl_core.Batch, config: PolicyConfig) -> Tensor:
    loss_K = _load_loss(config.loss, tuple(config.loss_options))(log_probs_K, batch, **config.loss_options)
    if not isinstance(loss_K, Tensor) or loss_K.shape != log_probs_K.shape:
        raise InputError(
            "the function returned something else than one loss per token",
            field="algorithm.loss",
            value=tuple(loss_K.shape) if isinstance(loss_K, Tensor) else type(loss_K).__name__,
            allowed=f"a tensor of shape {tuple(log_probs_K.shape)}",
        )
    return loss_K


@cache
def _load_loss(name: str, options: tuple[str, ...]) -> Callable[..., Any]:
    return load_function(name, key="algorithm.loss", arguments=("log_probs_K", "batch"), keywords=options)
