"""A trained or frozen model as the algorithm sees it: batches in, log-probs or an optimizer step out."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
from torch import Tensor

from ds_engine import EngineConfig, Head, LossFn, OptimConfig, StepStats
from rl_core import BatchConfig, MicroBatchPlan, PackedBatch, plan_micro_batches
from weight_sync import Endpoint, SyncConfig, SyncReport

from ..experience import ExperienceBatch, Float32Array
from .loss_spec import LossSpec
from .trainer_worker import ModelDescription, TrainerWorker
from .worker_group import WorkerGroup

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class TokenColumns:
    """Per-token results in the order of the batch: N arrays, one value a response token."""

    log_probs: tuple[Float32Array, ...]
    entropy: tuple[Float32Array, ...]


class ModelHandle:
    """The engine called `name` ("actor", "ref", "critic") on all ranks, with the batch math between."""

    def __init__(self, ranks: WorkerGroup, name: str, batch: BatchConfig, *, temperature: float = 1.0) -> None:
        self.ranks, self.name, self._batch, self._temperature = ranks, name, batch, temperature
        self._sp = 1

    def build(self, model_path: str, config: EngineConfig, *, total_steps: int, head: Head = "lm") -> None:
        """Makes the engine on every rank from a Hugging Face folder, with a fresh optimizer."""
        self._sp = config.sequence_parallel
        self.ranks.run(TrainerWorker.build, self.name, model_path, config, total_steps, head)

    def build_frozen(self, model_path: str, config: EngineConfig) -> None:
        """Makes an engine that is never trained (a reference model): no gradients, no optimizer states."""
        self._sp = config.sequence_parallel
        self.ranks.run(TrainerWorker.build, self.name, model_path, replace(config, optim=OptimConfig()), None)

    def log_probs(self, batch: ExperienceBatch) -> TokenColumns:
        """Log-probs of the response tokens at the rollout's temperature, and entropies, without gradients."""
        plan, packed = self._packed(batch)
        outputs = self.ranks.run_each(TrainerWorker.log_probs, packed, self.name, self._temperature)
        rows = self._in_order(batch, plan, [[(o.log_probs_K, o.entropy_K) for o in rank] for rank in outputs])
        log_probs, entropy = zip(*rows, strict=True)
        return TokenColumns(log_probs=log_probs, entropy=entropy)

    def values(self, batch: ExperienceBatch) -> tuple[Float32Array, ...]:
        """A critic's value of the state before each response token, without gradients: N arrays."""
        plan, packed = self._packed(batch)
        outputs = self.ranks.run_each(TrainerWorker.values, packed, self.name)
        return tuple(row[0] for row in self._in_order(batch, plan, [[(v_K,) for v_K in rank] for rank in outputs]))

    def update(self, batch: ExperienceBatch, loss_fn: LossFn) -> StepStats:
        """One optimizer step on a mini batch; `loss_fn` returns each micro batch's share of the loss."""
        _, packed = self._packed(batch)
        return self._train(packed, loss_fn)

    def update_packed(self, packed: Sequence[Sequence[PackedBatch]], loss_fn: LossFn) -> StepStats:
        """One optimizer step on micro batches already packed for every replica: sp consecutive ranks get the same."""
        return self._train([micros for micros in packed for _ in range(self._sp)], loss_fn)

    def _train(self, packed: Sequence[Sequence[PackedBatch]], loss_fn: LossFn) -> StepStats:
        spec = LossSpec.of(loss_fn)
        return self.ranks.run_each(TrainerWorker.train, packed, self.name, spec, self._temperature)[0]

    def export(self, folder: str, model_files_from: str) -> None:
        """Writes a Hugging Face folder with the current weights."""
        self.ranks.run(TrainerWorker.export, self.name, folder, model_files_from)

    def describe(self) -> ModelDescription:
        """Names, shapes and dtypes of the model's parameters, JSON-able."""
        return self.ranks.run(TrainerWorker.describe, self.name)[0]

    def load(self, folder: str) -> None:
        """Loads the engine's part of a checkpoint, whatever ranks, stage and offload wrote it."""
        self.ranks.run(TrainerWorker.load, self.name, folder)

    def connect_servers(self, endpoints: Sequence[Endpoint], config: SyncConfig, adapter: str | None = None) -> None:
        """Prepares pushing this model's weights, or its adapters alone under that name, to the rollout servers."""
        self.ranks.run(TrainerWorker.connect_servers, self.name, tuple(endpoints), config, adapter)

    def push_weights(self, version: int) -> SyncReport:
        """Sends the weights to every server; rank 0's report."""
        return self.ranks.run(TrainerWorker.push_weights, version)[0]

    def _packed(self, batch: ExperienceBatch) -> tuple[MicroBatchPlan, list[list[PackedBatch]]]:
        """The plan of the micro batches, and those of every rank: sp consecutive ranks get the same."""
        plan = self.plan([item.num_tokens for item in batch.items])
        return plan, [micros for micros in batch.packed(plan) for _ in range(self._sp)]

    def _in_order(
        self, batch: ExperienceBatch, plan: MicroBatchPlan, outputs: Sequence[Sequence[tuple[Tensor, ...]]]
    ) -> list[tuple[Float32Array, ...]]:
        """Per-token results of the ranks' micro batches, per sample in the order of the batch."""
        # [replica][micro batch][sample] -> columns, then back in the order of the batch
        split = [
            [_per_sample(batch, micro, columns) for micro, columns in zip(micros, replica, strict=True)]
            for micros, replica in zip(plan.assignment, outputs[:: self._sp], strict=True)
        ]
        return plan.restore(split)

    def plan(self, lengths: Sequence[int]) -> MicroBatchPlan:
        """Micro batches for sequences of these lengths (tokens), the same number on every replica.

        A replica of sp ranks computes sp times what one rank alone would: a rank then holds as many tokens.
        """
        size, budget = self._batch.micro_batch_size, self._batch.token_budget
        return plan_micro_batches(
            lengths,
            num_ranks=self.ranks.world_size // self._sp,
            token_budget=None if size else budget * self._sp,
            micro_batch_size=size * self._sp if size else None,
        )


def run_concurrently(
    phase: Callable[[str], AbstractContextManager[Any]], *calls: tuple[str, ModelHandle, Callable[[], T]]
) -> list[T]:
    """Each call under the phase named before it, in order; at the same time where no two roles share ranks.

    A phase's time is then what the loop waited for the call after the calls before it were done. Roles on the same
    ranks must take turns: their collectives would meet in a different order on every rank.

    Args:
        calls: (phase, the role whose ranks compute, what to call).
    """
    results: list[T] = []
    if len({id(role.ranks) for _, role, _ in calls}) < len(calls):
        for name, _, call in calls:
            with phase(name):
                results.append(call())
        return results
    with ThreadPoolExecutor(len(calls)) as pool:
        futures = [pool.submit(call) for _, _, call in calls]
        for (name, _, _), future in zip(calls, futures, strict=True):
            with phase(name):
                results.append(future.result())
    return results


def _per_sample(
    batch: ExperienceBatch, micro: Sequence[int], columns: tuple[Tensor, ...]
) -> list[tuple[Float32Array, ...]]:
    """The [K] columns of a micro batch cut at its samples' borders."""
    if not micro:
        return []
    borders = np.cumsum([batch.items[i].num_generated for i in micro])[:-1]
    return list(zip(*(np.split(column.numpy(), borders) for column in columns), strict=True))
