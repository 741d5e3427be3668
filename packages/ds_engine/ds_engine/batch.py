"""What goes into the engine and what comes out: tensors by name, no class of another package.

Shapes: T packed tokens, S sequences (S1 = S + 1 borders), K predicted tokens, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = ["Head", "LogProbFn", "LossFn", "LossOutput", "StepStats", "TokenBatch", "TokenOutputs", "ValueOutputs"]

Head = Literal["lm", "value"]
"""What a model answers with: log-probs of the targets, or a value of the state before each."""


class TokenBatch(Protocol):
    """One micro batch: sequences one after another in a single row, without padding.

    A batch without sequences (T = S = K = 0) is allowed: the engine runs the same collectives for it as for a full one.
    """

    @property
    def input_ids_T(self) -> Tensor:
        """int64 token ids."""

    @property
    def position_ids_T(self) -> Tensor:
        """int64 positions, restarting at 0 with each sequence."""

    @property
    def cu_seqlens_S1(self) -> Tensor:
        """int32 borders: sequence s is [cu_seqlens_S1[s], cu_seqlens_S1[s + 1])."""

    @property
    def max_seqlen(self) -> int:
        """Tokens of the longest sequence."""

    @property
    def target_index_K(self) -> Tensor:
        """int64 positions in T whose hidden state predicts each target."""

    @property
    def target_ids_K(self) -> Tensor:
        """int64 tokens predicted there."""

    @property
    def columns(self) -> Mapping[str, Tensor]:
        """Further [K] columns; the engine moves them to the device and hands them to the loss untouched."""

    def to(self, device: torch.device | str) -> Self:
        """The same batch on `device`."""


@dataclass(frozen=True, kw_only=True)
class TokenOutputs:
    """What the model says about the K targets; both fp32, differentiable inside a loss function."""

    log_probs_K: Tensor
    entropy_K: Tensor


@dataclass(frozen=True, kw_only=True)
class ValueOutputs:
    """What a model with a value head says: one number for the state before each of the K targets.

    A reward model is the same head read at the last token of each sequence (`target_index_K` names these, K = S).
    """

    values_K: Tensor
    """fp32, differentiable inside a loss function."""


@dataclass(frozen=True, kw_only=True)
class LossOutput:
    """What a loss function returns for one micro batch."""

    loss: Tensor
    """0-d: this micro batch's share of the mini-batch loss. Shares of all micro batches and ranks add up to it."""
    metrics: Mapping[str, Tensor] = field(default_factory=dict)
    """0-d shares, summed over micro batches and ranks."""


LogProbFn = Callable[..., "tuple[Tensor, Tensor]"]
"""(hidden_KH, weight_VH, targets_K, temperature) -> (log_probs_K, entropy_K), both fp32 and differentiable.

Log-probs and entropies of targets from hidden states and the LM head's weight, without keeping logits. The four
arguments are passed by position. For models whose head has a bias or caps its logits, `bias=` ([V]) and `soft_cap=`
(float) are passed as well; a function that does not take them serves all other models."""

LossFn = Callable[[Any, Any], LossOutput]
"""(TokenOutputs or, with a value head, ValueOutputs; the micro batch on the device) -> LossOutput.

Not called for micro batches without targets."""


@dataclass(frozen=True, kw_only=True)
class StepStats:
    """One optimizer step, identical on every rank."""

    loss: float
    """The mini-batch loss: the sum of all shares."""
    metrics: dict[str, float]
    """The sums of all metric shares."""
    grad_norm: float
    """Global L2 norm of the gradient before clipping, as DeepSpeed computed it inside the step.
    inf where it overflowed."""
    lr: float
    """Learning rate of this step."""
    num_micro_batches: int
    """Micro batches each rank ran."""
    num_empty_micro_batches: int
    """Of all replicas' micro batches, those without a target; they ran the same collectives."""
    num_skipped_micro_batches: int = 0
    """Micro batches whose collectives were left out. Always 0: leaving one out is what makes ranks hang."""
    step_applied: bool = True
    """False when a gradient of a bf16 or fp16 model was not finite: weights and optimizer states are as before. The
    step counts all the same, so the learning rate goes on by the run's plan."""
    loss_scale: float = 1.0
    """What this step's loss was multiplied by; other than 1 in fp16 only, where an overflow halves it for the next."""
    num_guarded_collectives: int = 0
    """Collectives of this step that the collective guard compared between ranks; 0 where it is off."""
