"""Micro batches through the model, forward and backward: gradients of all of them and of all ranks add up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from .batch import TokenOutputs, ValueOutputs
from .errors import BatchError, EngineError
from .guard.collective_guard import mark
from .model.packed_model import PackedInputs, packed_inputs

if TYPE_CHECKING:
    from .batch import Head, LossFn, TokenBatch
    from .model.sequence_parallel import SequenceGroup

__all__ = ["MicroBatches"]

Ready = tuple[tuple[PackedInputs, int], "TokenBatch"]
"""The model's inputs with the number of targets, and the batch as the loss function sees it; all on the device."""


class MicroBatches:
    """How one engine runs its micro batches."""

    def __init__(
        self,
        deepspeed_engine: Any,
        *,
        head: Head,
        device: torch.device,
        kernel: str,
        sequence: SequenceGroup | None,
        step_each_micro: bool,
    ) -> None:
        self._deepspeed = deepspeed_engine
        self._head = head
        self._device = device
        self._kernel = kernel
        self._sequence = sequence
        self._step_each_micro = step_each_micro
        self._unfinished = False

    def train(
        self, micro_batches: Sequence[TokenBatch], loss_fn: LossFn, temperature: float, *, label: str
    ) -> tuple[list[Tensor], dict[str, list[Tensor]]]:
        """Forward, backward and the optimizer's step; (losses, metrics) of this rank's micro batches, detached.

        Raises:
            EngineError: an earlier call failed between its first backward pass and its step.
        """
        if self._unfinished:
            raise EngineError(
                "an earlier mini batch failed half-way, and its gradients would be added to this one's: "
                "build a new engine"
            )
        losses: list[Tensor] = []
        metrics: dict[str, list[Tensor]] = {}
        self._begin(len(micro_batches))
        # All before the first: a copy in between would wait for the device, which then waits for the host in turn.
        for index, ready in enumerate([self.ready(batch) for batch in micro_batches]):
            mark(f"{label}, micro batch {index} of {len(micro_batches)}")
            is_last = index == len(micro_batches) - 1
            self.mark_border(is_last)
            losses.append(self.backward(ready, loss_fn, temperature, metrics))
            if self._step_each_micro or is_last:
                self._deepspeed.step()
        self._unfinished = False
        mark(f"after {label}")
        return losses, metrics

    def answer(self, micro_batches: Sequence[TokenBatch], temperature: float = 1.0) -> list[Tensor]:
        """The head's rows [R, K] for the targets of each, on the CPU."""
        rows = [self._forward(self._inputs(batch), temperature)[0] for batch in micro_batches]
        return [rows_RK.cpu() for rows_RK in rows]

    def ready(self, batch: TokenBatch) -> Ready:
        """`batch` on the device, with what the model takes of it."""
        return self._inputs(batch), batch.to(self._device)

    def _inputs(self, batch: TokenBatch) -> tuple[PackedInputs, int]:
        return packed_inputs(batch, device=self._device, kernel=self._kernel, sequence=self._sequence)

    def _forward(self, inputs: tuple[PackedInputs, int], temperature: float) -> tuple[Tensor, Tensor]:
        """The head's rows for the targets, and a zero that depends on every parameter the pass used."""
        packed, num_targets = inputs
        rows_RK = self._deepspeed(packed=packed, temperature=temperature)
        return rows_RK[:, :num_targets], rows_RK.sum() * 0.0

    def backward(self, ready: Ready, loss_fn: LossFn, temperature: float, metrics: dict[str, list[Tensor]]) -> Tensor:
        """Forward and backward of one micro batch; returns its detached loss share."""
        inputs, batch = ready
        rows_RK, anchor = self._forward(inputs, temperature)
        loss = anchor
        if rows_RK.numel() > 0:
            result = loss_fn(self._outputs(rows_RK), batch)
            if result.loss.dim() != 0:
                raise BatchError(f"the loss must be a 0-d tensor, got shape {tuple(result.loss.shape)}")
            # A loss that does not depend on the model (all advantages masked, say) still has to pass backward
            # through every parameter, or this rank would leave out the gradient collectives its peers wait in.
            loss = result.loss if result.loss.requires_grad else result.loss + anchor
            for name, value in result.metrics.items():
                metrics.setdefault(name, []).append(value.detach())
        # DeepSpeed averages over ranks; shares are to be summed. Of a loss that sp ranks compute together each has the
        # gradient that came through its tokens: they, too, are to be summed.
        self._unfinished = True
        self._deepspeed.backward(loss * dist.get_world_size(), scale_wrt_gas=False)
        return loss.detach()

    def mark_border(self, is_last: bool) -> None:
        """Say whether the next backward pass is the last of its mini batch."""
        if not self._step_each_micro:
            self._deepspeed.set_gradient_accumulation_boundary(is_last)

    def _begin(self, num_micro_batches: int) -> None:
        """Stage 1 and 2 forget all but the last micro batch unless told how many there are.

        Either DeepSpeed counts (its accumulation steps become this mini batch's number) or the last is marked by hand.
        """
        if self._step_each_micro:
            self._deepspeed._config.gradient_accumulation_steps = num_micro_batches
            self._deepspeed.micro_steps = 0

    def _outputs(self, rows_RK: Tensor) -> TokenOutputs | ValueOutputs:
        if self._head == "value":
            return ValueOutputs(values_K=rows_RK[0])
        return TokenOutputs(log_probs_K=rows_RK[0], entropy_K=rows_RK[1])
