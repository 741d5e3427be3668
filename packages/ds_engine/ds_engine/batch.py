"""Inputs and outputs of the engine: structural protocols and dataclasses, independent of other packages.

Shapes: T packed tokens, S sequences (S1 = S + 1 boundaries), K predicted tokens, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self

if TYPE_CHECKING:
    import torch
    from torch import Tensor


Head = Literal["lm", "value"]
"""Output of the model: log-probs of the targets (lm), or a value of the state before each target (value)."""


class TokenBatch(Protocol):
    """One micro batch: sequences packed into a single row without padding.

    A batch without sequences (T = S = K = 0) is allowed; the engine runs the same collectives for it.

    It may have an attribute `prefixes` (`Prefixes` or None): tokens of prefixes that sequences
    share are then computed once, by an engine that can (`ZeroEngine.shares_prefixes`). Everything else stays as it is.
    It may have an attribute `per_token`, a mapping whose "routes" are the experts of each token in each layer, integers
    [T, L, k], for `EngineConfig.router_replay`.
    It may have an attribute `images`: per sequence None or the images of its prompt, as the model's image processor
    returns them (a mapping of tensors) or as the path of a safetensors file with them. Token ids have one placeholder
    for each feature. "num_placeholders" in the mapping is how many of them the images have; targets and
    later ones are text.
    """

    @property
    def input_ids_T(self) -> Tensor:
        """int64 token ids."""

    @property
    def position_ids_T(self) -> Tensor:
        """int64 positions, starting at 0 in each sequence."""

    @property
    def cu_seqlens_S1(self) -> Tensor:
        """int32 cumulative sequence lengths: sequence s is [cu_seqlens_S1[s], cu_seqlens_S1[s + 1])."""

    @property
    def target_index_K(self) -> Tensor:
        """int64 indices into T of the hidden states that predict the targets."""

    @property
    def target_ids_K(self) -> Tensor:
        """int64 token ids of the targets."""

    @property
    def columns(self) -> Mapping[str, Tensor]:
        """Additional columns for the loss, [K] or [K, ...]; the engine only moves them to the device."""

    def to(self, device: torch.device | str) -> Self:
        """The same batch on `device`."""


class Prefixes(Protocol):
    """Shared prefixes of a batch of T tokens. Parents come before their children, level by level."""

    @property
    def computed_U(self) -> Tensor:
        """int64 places among the T tokens of those that are computed, node after node."""

    @property
    def place_T(self) -> Tensor:
        """int64 place among the U computed tokens of each of the T tokens."""

    @property
    def cu_seqlens_N1(self) -> Tensor:
        """int32 borders of the nodes among the U tokens."""

    @property
    def parents_N(self) -> Sequence[int]:
        """The parent of each node; -1 for a root."""


@dataclass(frozen=True, kw_only=True)
class TokenOutputs:
    """Log-probs and entropies [K] of the targets; fp32, differentiable inside a loss function."""

    log_probs_K: Tensor
    entropy_K: Tensor
    term_K: Tensor | None = None
    """Result of the mini batch's `HeadTerm`; None without one."""
    routes_TLk: Tensor | None = None
    """With `EngineConfig.router_replay` R2 the experts that `log_probs` used, int16; -1 in layers without experts and
    for tokens of other ranks. None for a batch without targets."""


@dataclass(frozen=True, kw_only=True)
class ValueOutputs:
    """Output of a value head: the value of the state before each target.

    A reward model uses the same head at the last token of each sequence (`target_index_K` selects these, K = S).
    """

    values_K: Tensor
    """[K] fp32, differentiable inside a loss function."""


@dataclass(frozen=True, kw_only=True)
class LmHead:
    """Parts of an engine's logits: `soft_cap(hidden @ weight.T + bias)`."""

    weight_VH: Tensor
    bias_V: Tensor | None = None
    soft_cap: float | None = None


@dataclass(frozen=True, kw_only=True)
class LossOutput:
    """Return value of a loss function for one micro batch."""

    loss: Tensor
    """0-d: this micro batch's term of the mini-batch loss, which is the sum over all micro batches and ranks."""
    metrics: Mapping[str, Tensor] = field(default_factory=dict)
    """0-d terms, summed over micro batches and ranks."""


LogProbFn = Callable[..., "tuple[Tensor, Tensor]"]
"""(hidden_KH, weight_VH, targets_K, temperature) -> (log_probs_K, entropy_K), both fp32 and differentiable.

Computes log-probs and entropies of the targets from hidden states and the LM head's weight. The four arguments are
positional. If the model's head has a bias or caps its logits, `bias=` ([V]) and `soft_cap=` (float) are passed as well;
a function without these parameters works for all other models. With `EngineConfig.keep_probabilities` it gets
`keep_bytes=` (int), the bytes of probabilities that it may keep until the backward pass."""

HeadTerm = Callable[..., "Tensor"]
"""(hidden_KH, weight_VH, columns, temperature) -> [K] fp32, differentiable in hidden states and weight.

A term of the loss that needs more of each distribution than the target's log-prob, such as a divergence to a teacher.
It runs where the LM head's weight is whole; `columns` are those of the batch. The keywords are those of `LogProbFn`.
The loss function finds its result in `TokenOutputs.term_K`."""

LossFn = Callable[[Any, Any], LossOutput]
"""(TokenOutputs or, with a value head, ValueOutputs; the micro batch on the device) -> LossOutput.

It is not called for micro batches without targets."""


@dataclass(frozen=True, kw_only=True)
class StepStats:
    """Statistics of one optimizer step, identical on every rank."""

    loss: float
    """Mini-batch loss, summed over micro batches and ranks."""
    metrics: dict[str, float]
    """Metrics, summed over micro batches and ranks."""
    grad_norm: float
    """Global L2 norm of the gradient before clipping; inf after an overflow."""
    lr: float
    """Learning rate of this step."""
    num_micro_batches: int
    """Number of micro batches of each rank."""
    num_empty_micro_batches: int
    """Number of micro batches without targets, over all replicas."""
    num_skipped_empty_micro_batches: int = 0
    """Number of micro batches without a backward pass, over all replicas. The engine skips none, also without targets:
    ranks whose peers skip one can hang. Counted from the passes that ran."""
    step_applied: bool = True
    """False if a gradient of a bf16 or fp16 model was not finite: weights and optimizer states are unchanged. The
    learning-rate schedule counts the step anyway."""
    loss_scale: float = 1.0
    """Loss scale of this step; always 1 except in fp16, where an overflow halves it for the next step."""
    num_guarded_collectives: int = 0
    """Number of collectives of this step that the collective guard compared between ranks; 0 if it is off."""
