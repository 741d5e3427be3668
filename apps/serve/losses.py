"""Losses of the SDK by name, and the batch that they are computed on.

Shapes: K tokens of all sequences in order; each is also a target. p are the log-probs of the targets, q those of
`logprobs`, A the advantages, w the weights; r = exp(p - q). Losses are sums over all tokens, as the SDK defines them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from apps.serve.wire import Datum
from ds_engine import LossOutput, TokenBatch, TokenOutputs
from rl_core import Batch, cispo_loss, ppo_clip_loss
from rl_runtime import InputError
from rl_runtime.rules import check_value

OWN = "own_log_probs"
"""The column in which a loss gets the log-probs of its own pass."""


@dataclass(frozen=True, kw_only=True)
class Loss:
    """Inputs and settings of a loss."""

    inputs: tuple[str, ...]
    """Values of each token."""
    options: Mapping[str, float] = field(default_factory=dict)
    """Its settings with their defaults."""


_RATIO = ("logprobs", "advantages")
_CLIP = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
LOSSES: Mapping[str, Loss] = {
    "cross_entropy": Loss(inputs=("weights",)),
    "importance_sampling": Loss(inputs=_RATIO),
    "ppo": Loss(inputs=_RATIO, options=_CLIP),
    "cispo": Loss(inputs=_RATIO, options=_CLIP),
    "dro": Loss(inputs=_RATIO, options={"beta": 0.05}),
}
"""Name -> loss."""


def token_losses(name: str, log_probs_K: Tensor, columns: Mapping[str, Tensor], options: Mapping[str, float]) -> Tensor:
    """The loss of each token, [K].

    cross_entropy: -w p; importance_sampling: -r A; ppo: -min(r A, clip(r) A); cispo: -sg(clip(r)) A p;
    dro: -(A p - beta / 2 (p - q)^2).
    """
    if name == "cross_entropy":
        return -columns["weights"] * log_probs_K
    q_K, advantages_K = columns["logprobs"], columns["advantages"]
    if name == "importance_sampling":
        return -torch.exp(log_probs_K - q_K) * advantages_K
    if name == "dro":
        return -(advantages_K * log_probs_K - options["beta"] / 2 * (log_probs_K - q_K).square())
    low, high = 1.0 - options["clip_low_threshold"], options["clip_high_threshold"] - 1.0
    function = ppo_clip_loss if name == "ppo" else cispo_loss
    return function(log_probs_K, q_K, advantages_K, clip_low=low, clip_high=high)[0]


def summed_loss(outputs: TokenOutputs, batch: TokenBatch, *, name: str, options: Mapping[str, float]) -> LossOutput:
    """The loss of a micro batch, on a rank."""
    return LossOutput(loss=token_losses(name, outputs.log_probs_K, batch.columns, options).sum())


def check_loss(name: str, config: Mapping[str, float | str]) -> dict[str, float]:
    """The settings of a loss. Raises InputError for a loss or a setting that is not supported."""
    if name not in LOSSES:
        raise InputError("this server does not compute it", field="loss_fn", value=name, allowed=", ".join(LOSSES))
    options = dict(LOSSES[name].options)
    for key, value in config.items():
        if key not in options or not isinstance(value, float):
            allowed = ", ".join(options) or "no settings"
            raise InputError(field=f"loss_fn_config.{key}", value=value, allowed=f"{allowed} of {name}")
        options[key] = value
    if "clip_low_threshold" in options:
        low, high = options["clip_low_threshold"], options["clip_high_threshold"]
        check_value(options, "clip_low_threshold", 0 <= low <= 1, "0 to 1")
        check_value(options, "clip_high_threshold", 1 <= high < 1e6, "1 or more")
    return options


def batch_of(data: Sequence[Datum], name: str, *, vocab_size: int, max_tokens: int) -> Batch:
    """The batch of a request, on which every token predicts its target.

    Raises InputError for inputs that the loss does not have, or of another length, and for tokens out of range.
    """
    inputs = LOSSES[name].inputs
    if not data:
        raise InputError(field="data", value=[], allowed="one or more")
    columns: dict[str, list[np.ndarray[Any, Any]]] = {key: [] for key in ("target_tokens", *inputs)}
    for index, datum in enumerate(data):
        where, length = f"data[{index}]", len(datum.tokens)
        if not 1 <= length <= max_tokens:
            raise InputError(field=f"{where}.model_input", value=length, allowed=f"1 to {max_tokens} tokens")
        if datum.inputs.keys() != columns.keys():
            given, wanted = ", ".join(sorted(datum.inputs)), ", ".join(sorted(columns))
            raise InputError(field=f"{where}.loss_fn_inputs", value=given, allowed=f"{wanted} for {name}")
        for key, values in datum.inputs.items():
            if len(values) != length:
                raise InputError(field=f"{where}.{key}", value=len(values), allowed=f"{length}, one for each token")
            columns[key].append(values)
        for key, tokens in (("model_input", datum.tokens), ("target_tokens", datum.inputs["target_tokens"])):
            if tokens.min() < 0 or tokens.max() >= vocab_size:
                raise InputError(field=f"{where}.{key}", allowed=f"tokens from 0 to {vocab_size - 1}")
    lens = np.array([len(datum.tokens) for datum in data], np.int64)
    borders = np.concatenate([[0], lens.cumsum()])
    joined = {key: torch.from_numpy(np.concatenate(values)) for key, values in columns.items()}
    if bad := [key for key in inputs if not joined[key].isfinite().all()]:
        raise InputError("a value is inf or NaN", field=f"data.{bad[0]}")
    return Batch(
        input_ids_T=torch.from_numpy(np.concatenate([datum.tokens for datum in data]).astype(np.int64)),
        position_ids_T=torch.from_numpy(np.arange(borders[-1]) - np.repeat(borders[:-1], lens)),
        cu_seqlens_S1=torch.from_numpy(borders.astype(np.int32)),
        target_index_K=torch.arange(int(borders[-1])),
        target_ids_K=joined.pop("target_tokens").long(),
        response_lens_S=torch.from_numpy(lens),
        columns={key: values.float() for key, values in joined.items()},
    )
