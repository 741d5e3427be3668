"""Turns a Hugging Face model into one that answers about given targets instead of with logits of every token.

The model stays the same module with the same parameter names; only a second way to call it is added:
`model(packed=PackedInputs(...), temperature=...)` runs the backbone, picks the hidden states that predict a target and
calls the head, whose own forward answers with one row per output: an LM head runs the injected log-prob function and
gives [2, K], log-probs and entropies; a value head gives [1, K]. The head's weight is used inside the head's forward
because that is where ZeRO-3 has it gathered, tied to the embedding or not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .attention import Packing
from .errors import BatchError, ModelError

if TYPE_CHECKING:
    from .batch import LogProbFn, TokenBatch

__all__ = ["VALUE_HEAD", "PackedInputs", "install_packed_forward", "packed_inputs"]

VALUE_HEAD = "score"
"""Attribute of a model with a value head that holds it; what transformers calls it in all families."""


@dataclass(frozen=True, kw_only=True)
class PackedInputs:
    """One micro batch on the device, as the model's packed forward takes it. Never empty: see `packed_inputs`."""

    input_ids_1T: Tensor
    position_ids_1T: Tensor
    packing: Packing
    target_index_K: Tensor
    target_ids_K: Tensor


def packed_inputs(batch: TokenBatch, *, device: torch.device, kernel: str) -> tuple[PackedInputs, int]:
    """The model's inputs for `batch` and its number of targets.

    A batch without targets becomes one token predicting one token: that is the cheapest forward that passes through
    every module, so it takes part in every collective. Its output is to be multiplied by zero.
    """
    num_targets = batch.target_ids_K.numel()
    if num_targets == 0:
        zero = torch.zeros(1, dtype=torch.int64, device=device)
        borders = torch.tensor([0, 1], dtype=torch.int32, device=device)
        packing = Packing(cu_seqlens_S1=borders, lengths=(1,), max_seqlen=1, kernel=kernel)
        row = zero.unsqueeze(0)
        return PackedInputs(
            input_ids_1T=row, position_ids_1T=row, packing=packing, target_index_K=zero, target_ids_K=zero
        ), 0
    borders = batch.cu_seqlens_S1
    lengths = tuple(int(n) for n in borders.diff().tolist())
    if sum(lengths) != batch.input_ids_T.numel() or any(n < 1 for n in lengths):
        raise BatchError(
            f"cu_seqlens_S1 describes sequences of {list(lengths)[:8]} tokens, "
            f"but input_ids_T has {batch.input_ids_T.numel()}; lengths must be positive and add up"
        )
    packing = Packing(
        cu_seqlens_S1=borders.to(device=device, dtype=torch.int32),
        lengths=lengths,
        max_seqlen=max(lengths),
        kernel=kernel,
    )
    return PackedInputs(
        input_ids_1T=batch.input_ids_T.to(device).unsqueeze(0),
        position_ids_1T=batch.position_ids_T.to(device).unsqueeze(0),
        packing=packing,
        target_index_K=batch.target_index_K.to(device),
        target_ids_K=batch.target_ids_K.to(device),
    ), num_targets


def install_packed_forward(model: Any, log_prob_fn: LogProbFn | None) -> None:
    """Add the packed way of calling to `model`. Ordinary calls keep working.

    Args:
        model: a transformers causal LM; without `log_prob_fn`, one with a value head (`VALUE_HEAD`).

    Raises:
        ModelError: the model has no backbone or head to be found.
    """
    if log_prob_fn is None:
        head = getattr(model, VALUE_HEAD, None)
    else:
        head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    backbone = getattr(model, getattr(model, "base_model_prefix", "") or "model", None)
    if not isinstance(head, nn.Module) or not isinstance(backbone, nn.Module) or backbone is model:
        kind = "value model with a backbone and a value head" if log_prob_fn is None else "causal language model"
        raise ModelError(f"{type(model).__name__} is not a {kind} whose parts can be called one by one")
    hidden_scale = 1.0
    if log_prob_fn is None:
        _install_value_forward(head)
    else:
        hidden_scale = _hidden_scale(model)
        _install_lm_forward(head, log_prob_fn, _head_options(model, head))
    original: Callable[..., Any] = model.forward

    def forward(*args: Any, packed: PackedInputs | None = None, temperature: float = 1.0, **kwargs: Any) -> Any:
        if packed is None:
            return original(*args, **kwargs)
        hidden_TH = backbone(
            input_ids=packed.input_ids_1T,
            position_ids=packed.position_ids_1T,
            use_cache=False,
            packing=packed.packing,
        )[0][0]
        hidden_KH = hidden_TH.index_select(0, packed.target_index_K)
        if hidden_scale != 1.0:
            hidden_KH = hidden_KH * hidden_scale
        return head(hidden_KH, targets_K=packed.target_ids_K, temperature=temperature)

    model.forward = forward


def _install_lm_forward(head: Any, log_prob_fn: LogProbFn, options: dict[str, Any]) -> None:
    original: Callable[..., Any] = head.forward
    has_bias = getattr(head, "bias", None) is not None

    def forward(hidden: Tensor, *, targets_K: Tensor | None = None, temperature: float = 1.0) -> Any:
        if targets_K is None:
            return original(hidden)
        extra = dict(options, bias=head.bias) if has_bias else options
        log_probs_K, entropy_K = log_prob_fn(hidden, head.weight, targets_K, temperature, **extra)
        # One tensor, not two: ZeRO-3 hooks each output of a module, and a loss that uses the entropy on one rank only
        # would leave the ranks with different traces of the backward pass, which then gather in different orders.
        return torch.stack((log_probs_K, entropy_K))

    head.forward = forward


def _install_value_forward(head: Any) -> None:
    original: Callable[..., Any] = head.forward

    def forward(hidden: Tensor, *, targets_K: Tensor | None = None, temperature: float = 1.0) -> Any:
        if targets_K is None:
            return original(hidden)
        # A value in bf16 has three digits; returns differ in the fourth.
        return nn.functional.linear(hidden.float(), head.weight.float()).T

    head.forward = forward


def _head_options(model: Any, head: nn.Module) -> dict[str, Any]:
    if type(head) is not nn.Linear:
        raise ModelError(f"{type(model).__name__}'s LM head is {type(head).__name__}, not a plain linear layer")
    soft_cap = getattr(model.config, "final_logit_softcapping", None)
    return {} if soft_cap is None else {"soft_cap": float(soft_cap)}


def _hidden_scale(model: Any) -> float:
    """Some families scale their logits; the head being linear, scaling its input does the same."""
    config: Any = model.config
    if getattr(config, "logit_scale", None) is not None:  # Cohere multiplies
        return float(config.logit_scale)
    if getattr(config, "logits_scaling", None) is not None:  # Granite divides
        return 1.0 / float(config.logits_scaling)
    return 1.0
