"""Forward and backward passes of an engine's micro batches; gradients are summed over micro batches and ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from .batch import TokenOutputs, ValueOutputs
from .errors import BatchError, EngineError
from .guard.collective_guard import mark
from .model.packed_model import HIDDEN, EntropyUse, PackedInputs, packed_inputs
from .model.router_replay import ROUTES, RouterReplay, routes_of_tokens
from .model.vision import Vision
from .zero.grad_accumulation import set_num_micro_batches

if TYPE_CHECKING:
    from .batch import Head, HeadTerm, LossFn, TokenBatch
    from .model.sequence_parallel import SequenceGroup


ROUTES_DIFFER, ROUTES_COMPARED = "routes_differ", "routes_compared"
"""Metrics of an update with router replay, summed over ranks."""

DeviceBatch = tuple[tuple[PackedInputs, int], "TokenBatch"]
"""The model's inputs with the number of targets, and the batch for the loss function; all on the device."""


@dataclass(kw_only=True)
class MicroBatches:
    """Runs the micro batches of one engine."""

    deepspeed: Any
    head: Head
    device: torch.device
    kernel: str
    sp_group: SequenceGroup | None
    step_each_micro: bool
    shares_prefixes: bool = False
    keeps_paths: bool = False
    """`EngineConfig.keeps_paths`."""
    replay: RouterReplay | None = None
    """Set with `EngineConfig.router_replay`: updates replay the batches' routes."""
    vision: Vision | None = None
    """Reads the batches' images; None for a model that sees none."""
    has_partial_gradient: bool = False
    num_waiting: int = 0
    """Calls of `train` whose gradients wait for `step`."""
    num_backward: int = 0
    """Backward passes of this rank so far."""
    _before_forward: Any = None
    """Event of the GPU, before the forward pass that was started last."""

    def train(
        self,
        micro_batches: Sequence[TokenBatch],
        loss_fn: LossFn,
        temperature: float,
        *,
        label: str,
        head_term: HeadTerm | None = None,
        steps: bool = True,
    ) -> tuple[list[Tensor], dict[str, list[Tensor]]]:
        """Run forward, backward and the optimizer's step; returns detached (losses, metrics) of this rank.

        Args:
            label: name of this mini batch in reports of the collective guard.
            steps: False leaves the gradient, which later calls add to, for `step`.

        Raises:
            EngineError: an earlier call failed between its first backward pass and its step.
        """
        if self.has_partial_gradient:
            raise EngineError(
                "an earlier mini batch failed before its optimizer step; its gradients would be added to this one's",
                remedy="build a new engine",
            )
        losses: list[Tensor] = []
        metrics: dict[str, list[Tensor]] = {}
        if self.step_each_micro:
            set_num_micro_batches(self.deepspeed, len(micro_batches))
        prepare = partial(self.to_device, with_columns=head_term is not None)
        on_device = [prepare(batch) for batch in micro_batches[:1]]
        for index in range(len(micro_batches)):
            mark(f"{label}, micro batch {index} of {len(micro_batches)}")
            is_last = steps and index == len(micro_batches) - 1
            self.mark_boundary(is_last)
            inputs, batch = on_device[index]
            outputs = self._forward(inputs, temperature, head_term)
            if index == 0:  # before a backward pass: a batch that is refused leaves no gradient
                with self._beside():
                    on_device += [prepare(other) for other in micro_batches[1:]]
            losses.append(self.backward(outputs, batch, loss_fn, metrics, inputs[0].entropy))
            if self.step_each_micro or is_last:
                self.deepspeed.step()
        if self.replay is not None:
            different, compared = self.replay.take_counts()
            metrics |= {ROUTES_DIFFER: [different], ROUTES_COMPARED: [compared]}
        self.has_partial_gradient = False
        self.num_waiting += not steps
        mark(f"after {label}")
        return losses, metrics

    def step(self) -> None:
        """Take the optimizer's step on the gradients that wait for it."""
        self.mark_boundary(True)
        self.deepspeed.optimizer.finalize_gradient_accumulation_boundary()
        self.deepspeed.step()
        self.num_waiting = 0

    def infer(
        self,
        micro_batches: Sequence[TokenBatch],
        temperature: float = 1.0,
        head_term: str | None = None,
        *,
        replays: bool = False,
        recorded: list[Tensor | None] | None = None,
    ) -> list[Tensor]:
        """The head's output [R, K] for the targets of each micro batch, without loss, on the CPU.

        Args:
            replays: with the batches' routes, not with those of the routers.
            recorded: gets the routes of each micro batch, [T, L, k] on the CPU; None for one without targets.
        """
        rows = []
        upcoming = [self._inputs(batch, replays=replays) for batch in micro_batches[:1]]
        for index in range(len(micro_batches)):
            inputs = upcoming.pop()
            rows.append(self._forward(inputs, temperature, head_term, records=recorded is not None)[0])
            with self._beside():
                upcoming = [self._inputs(batch, replays=replays) for batch in micro_batches[index + 1 : index + 2]]
            if recorded is not None and self.replay is not None:
                routes_PLk = self.replay.take_recorded().cpu()
                recorded.append(routes_of_tokens(routes_PLk, inputs[0].rows_T) if inputs[1] else None)
        if self.replay is not None:
            self.replay.take_counts()  # those of updates are reported
        return [rows_RK.cpu() for rows_RK in rows]

    def rehearse(self, batch: TokenBatch, weight: torch.nn.Parameter) -> None:
        """Run forward and backward without any effect; `weight` is in the first layer or before it, so that the
        backward pass goes through all layers. Not at stage 3."""
        packed, _ = self._inputs(batch)
        rows_RK = self.deepspeed.module(packed=packed, temperature=1.0)
        if self.head == "lm":
            packed.entropy.watch(rows_RK[1])  # and most losses do not use them
        # Gradients are captured, not accumulated, so that none of DeepSpeed's hooks run.
        torch.autograd.grad(rows_RK[0].sum(), [weight])

    def to_device(self, batch: TokenBatch, *, with_columns: bool = False) -> DeviceBatch:
        """The model's inputs for an update, with columns for a head term, and `batch` itself on the device."""
        inputs = self._inputs(batch, with_columns=with_columns, replays=self.replay is not None)
        return inputs, batch.to(self.device)

    @contextmanager
    def _beside(self) -> Iterator[None]:
        """Prepare micro batches while the GPU computes the forward pass that was started last.

        On a stream of its own, because a copy from the host waits for its stream. It waits for the passes before that
        one: memory of batches that were freed since is used again.
        """
        if self._stream is None:
            yield
            return
        self._stream.wait_event(self._before_forward)
        with torch.cuda.stream(self._stream):
            yield
        torch.cuda.current_stream(self.device).wait_stream(self._stream)

    @cached_property
    def _stream(self) -> torch.cuda.Stream | None:
        return torch.cuda.Stream(self.device) if self.device.type == "cuda" else None

    def _inputs(
        self, batch: TokenBatch, *, with_columns: bool = False, replays: bool = False
    ) -> tuple[PackedInputs, int]:
        return packed_inputs(
            batch,
            device=self.device,
            kernel=self.kernel,
            sp_group=self.sp_group,
            prefixes=getattr(batch, "prefixes", None) if self.shares_prefixes else None,
            keeps_paths=self.keeps_paths,
            with_columns=with_columns,
            routes_TLk=self._routes(batch) if replays and batch.target_ids_K.numel() else None,
            vision=self.vision,
        )

    def _routes(self, batch: TokenBatch) -> Tensor:
        """The batch's routes, [T, L, k]."""
        assert self.replay is not None
        routes_TLk: Tensor | None = getattr(batch, "per_token", {}).get(ROUTES)
        expected = (batch.input_ids_T.numel(), *self.replay.shape)
        if routes_TLk is None or routes_TLk.shape != expected:
            given = None if routes_TLk is None else tuple(routes_TLk.shape)
            raise BatchError(
                "router replay needs them", field=f"per_token.{ROUTES}", value=given, allowed=f"{expected}"
            )
        return routes_TLk

    def _forward(
        self,
        inputs: tuple[PackedInputs, int],
        temperature: float,
        head_term: HeadTerm | str | None = None,
        *,
        records: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """The head's output [R, K] for the targets, and a zero whose gradient reaches every parameter of the pass."""
        packed, num_targets = inputs
        term = {} if head_term is None or (num_targets == 0 and head_term != HIDDEN) else {"head_term": head_term}
        if self.replay is not None:
            self.replay.begin(packed.routes_PLk, record=records)
        if self._stream is not None:
            self._before_forward = torch.cuda.current_stream(self.device).record_event()
        rows_RK = self.deepspeed(packed=packed, temperature=temperature, **term)
        return rows_RK[:, :num_targets], rows_RK.sum() * 0.0

    def backward(
        self,
        outputs: tuple[Tensor, Tensor],
        batch: TokenBatch,
        loss_fn: LossFn,
        metrics: dict[str, list[Tensor]],
        entropy: EntropyUse,
    ) -> Tensor:
        """Run the loss and backward of one micro batch whose forward pass gave `outputs`; returns its detached loss and
        appends its metrics."""
        rows_RK, anchor = outputs
        loss = anchor
        if rows_RK.numel() > 0:
            result = loss_fn(self._outputs(rows_RK, entropy), batch)
            if result.loss.dim() != 0:
                raise BatchError(field="loss", value=tuple(result.loss.shape), allowed="a 0-d tensor")
            # A loss that does not depend on the model (for example, all advantages masked) must still run backward
            # through every parameter: otherwise this rank would skip gradient collectives, and its peers would hang.
            loss = result.loss if result.loss.requires_grad else result.loss + anchor
            for name, value in result.metrics.items():
                metrics.setdefault(name, []).append(value.detach())
        # DeepSpeed averages gradients over ranks, but losses are summed. The gradients of sp ranks that share a micro
        # batch, each from its own tokens, are summed as well.
        self.has_partial_gradient = True
        self.deepspeed.backward(loss * dist.get_world_size(), scale_wrt_gas=False)
        self.num_backward += 1
        return loss.detach()

    def mark_boundary(self, is_last: bool) -> None:
        """Tell DeepSpeed whether the next backward pass is the last of its mini batch.

        Without it, and without the count of `set_num_micro_batches`, stages 1 and 2 drop all but the last micro batch.
        """
        if not self.step_each_micro:
            self.deepspeed.set_gradient_accumulation_boundary(is_last)

    def _outputs(self, rows_RK: Tensor, entropy: EntropyUse) -> TokenOutputs | ValueOutputs:
        if self.head == "value":
            return ValueOutputs(values_K=rows_RK[0])
        term_K = rows_RK[2] if len(rows_RK) > 2 else None
        return TokenOutputs(log_probs_K=rows_RK[0], entropy_K=entropy.watch(rows_RK[1]), term_K=term_K)
