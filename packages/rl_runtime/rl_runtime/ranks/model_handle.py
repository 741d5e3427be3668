"""A trained or frozen model as the algorithm sees it: batches in, log-probs or an optimizer step out."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from torch import Tensor

from ds_engine import EngineConfig, Head, LossFn, OptimConfig, StepStats
from rl_core import BatchConfig
from weight_sync import Endpoint, SyncConfig, SyncReport

from ..experience import ExperienceBatch, Float32Array
from .loss_spec import LossSpec
from .train_batch import MiniBatch, TrainBatch
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

    def log_probs(self, batch: TrainBatch | ExperienceBatch, *, column: str | None = None) -> TokenColumns:
        """Log-probs of the generated tokens at the rollout's temperature, and entropies, without gradients.

        Args:
            batch: an `ExperienceBatch` is sent for this call alone.
            column: the name under which the train batch keeps the log-probs, for the updates.
        """
        if isinstance(batch, ExperienceBatch):
            with TrainBatch.of(batch) as only:
                return self.log_probs(only)
        outputs = self.ranks.run_each(
            TrainerWorker.log_probs,
            batch.deliveries(*self._layout, with_columns=False),
            self.name,
            self._temperature,
            column,
        )
        log_probs_K = batch.collect(*self._layout, [output.log_probs_K for output in outputs], column=column)
        entropy_K = batch.collect(*self._layout, [output.entropy_K for output in outputs])
        return TokenColumns(log_probs=_arrays(batch.split(log_probs_K)), entropy=_arrays(batch.split(entropy_K)))

    def values(self, batch: TrainBatch | ExperienceBatch, *, column: str | None = None) -> tuple[Float32Array, ...]:
        """A critic's value of the state before each generated token, without gradients: N arrays.

        Args: as of `log_probs`.
        """
        if isinstance(batch, ExperienceBatch):
            with TrainBatch.of(batch) as only:
                return self.values(only)
        deliveries = batch.deliveries(*self._layout, with_columns=False)
        outputs = self.ranks.run_each(TrainerWorker.values, deliveries, self.name, column)
        return _arrays(batch.split(batch.collect(*self._layout, outputs, column=column)))

    def update(self, mini_batch: MiniBatch | ExperienceBatch, loss_fn: LossFn) -> StepStats:
        """One optimizer step; `loss_fn` returns each micro batch's share of the loss.

        Args:
            mini_batch: an `ExperienceBatch` is sent for this call alone.
            loss_fn: a function of a module, or a `functools.partial` of one; the ranks import it.

        Raises:
            InputError: the ranks cannot import `loss_fn`.
        """
        if isinstance(mini_batch, ExperienceBatch):
            with TrainBatch.of(mini_batch) as only:
                return self.update(only.mini_batches[0], loss_fn)
        loss = LossSpec.of(loss_fn)
        deliveries = mini_batch.batch.deliveries(*self._layout, with_columns=True)
        index = mini_batch.index
        return self.ranks.run_each(TrainerWorker.train, deliveries, self.name, index, loss, self._temperature)[0]

    @property
    def _layout(self) -> tuple[WorkerGroup, int, BatchConfig]:
        """What decides how a train batch lies on the ranks; models with the same layout share the ranks' copy."""
        return self.ranks, self._sp, self._batch

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


def _arrays(values: Sequence[Tensor]) -> tuple[Float32Array, ...]:
    return tuple(value.numpy() for value in values)
