"""A model on its ranks: log-probs, values and optimizer steps of a train batch."""

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from ds_engine import EngineConfig, Head, HeadTerm, LossFn, OptimConfig, StepStats, TokenOutputs
from rl_core import BatchConfig
from weight_sync import Endpoint, SyncConfig, SyncReport

from ..errors import DivergedError
from ..experience import ExperienceBatch, Float32Array, Phase
from .loss_spec import LossSpec
from .train_batch import MiniBatch, TrainBatch
from .trainer_worker import ModelDescription, TrainerWorker
from .worker_group import WorkerGroup

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class TokenColumns:
    """Per-token results in the order of the batch: N float32 arrays, one value per generated token."""

    log_probs: tuple[Float32Array, ...]
    entropy: tuple[Float32Array, ...]


def is_skipped(stats: StepStats) -> bool:
    """Whether an optimizer step changed nothing, because a gradient was not finite."""
    return not (stats.step_applied and math.isfinite(stats.grad_norm))


class SkippedUpdates:
    """Counts the updates of a model that are skipped because a gradient is not finite, and ends the run at `limit`.

    fp16 skips updates until it has found its loss scale, so only updates at a scale of 1 count.
    """

    def __init__(self, model: str, limit: int, report: Callable[[str], None]) -> None:
        """`limit`: number in a row that ends the run; 0: no limit. `report` gets one line at the first."""
        self._model, self._limit, self._report = model, limit, report
        self._reported: set[bool] = set()
        self.in_a_row = 0

    def count(self, stats: StepStats) -> None:
        """Raises DivergedError at the limit."""
        if not is_skipped(stats):
            self.in_a_row = 0
            return
        scaled = stats.loss_scale > 1
        if scaled not in self._reported:
            self._reported.add(scaled)
            why = f"loss {stats.loss:.4g}, gradient norm {stats.grad_norm:.4g}"
            what = f"fp16 lowers its loss scale, {stats.loss_scale:g}, which is normal at the start" if scaled else why
            self._report(f"warning: skipped an update of the {self._model}, because its gradient is not finite: {what}")
        self.in_a_row += not scaled
        if self._limit and self.in_a_row >= self._limit:
            raise self.error(f"allowed: fewer than trainer.max_skipped_updates ({self._limit}) in a row")

    def check(self) -> None:
        """Raises DivergedError if the last update was skipped."""
        if self.in_a_row and self._limit:
            raise self.error("nothing was exported")

    def error(self, consequence: str) -> DivergedError:
        return DivergedError(
            f"the {self._model} has diverged: the gradients of its last {self.in_a_row} updates are not finite; "
            f"{consequence}. Lower its learning rate, or look for the step in which its loss exploded"
        )


class ModelHandle:
    """The engine of the role `name` ("actor", "ref", "critic", "reward") on all ranks of a group."""

    def __init__(
        self,
        ranks: WorkerGroup,
        name: str,
        batch: BatchConfig,
        *,
        temperature: float = 1.0,
        max_skipped_updates: int = 0,
        report: Callable[[str], None] = print,
    ) -> None:
        """`max_skipped_updates` and `report` are those of `SkippedUpdates`."""
        self.ranks, self.name, self._batch, self._temperature = ranks, name, batch, temperature
        self.skipped = SkippedUpdates(name, max_skipped_updates, report)
        self._sp = 1

    def build(self, model_path: str, config: EngineConfig, *, total_steps: int, head: Head = "lm") -> None:
        """Builds the engine on every rank from a Hugging Face folder, with a new optimizer."""
        self._sp = config.sequence_parallel
        self.ranks.run(TrainerWorker.build, self.name, model_path, config, total_steps, head)

    def build_frozen(self, model_path: str, config: EngineConfig, *, head: Head = "lm") -> None:
        """Builds a frozen engine (a reference or reward model), without gradients and optimizer states."""
        self._sp = config.sequence_parallel
        self.ranks.run(TrainerWorker.build, self.name, model_path, replace(config, optim=OptimConfig()), None, head)

    def log_probs(
        self,
        batch: TrainBatch | ExperienceBatch,
        *,
        column: str | None = None,
        adapters: bool = True,
        leave_first: bool = False,
    ) -> TokenColumns:
        """Log-probs of the generated tokens at the rollout's temperature, and entropies, without gradients.

        Args:
            batch: the ranks keep a `TrainBatch` for later calls, and an `ExperienceBatch` for this call only.
            column: adds the log-probs to the train batch under this name, for the updates.
            adapters: False computes without the LoRA adapters: the base model, as a reference.
            leave_first: the first mini batch of a `TrainBatch` is left to its update, `update(own_log_probs=column)`,
                whose forward pass computes the same before it changes the weights; NaN here. A batch with one mini
                batch costs nothing then.

        Raises:
            RankError: `adapters=False`, but the engine has none.
            ValueError: `leave_first` without a column, or without a `TrainBatch` that an update could complete.
        """
        if leave_first and (column is None or isinstance(batch, ExperienceBatch)):
            raise ValueError(
                "leave_first is True; allowed: false without a column of a TrainBatch for an update to fill"
            )
        if isinstance(batch, ExperienceBatch):
            with TrainBatch.of(batch) as only:
                return self.log_probs(only, adapters=adapters)
        first, num = int(leave_first), len(batch.mini_batches)
        outputs: list[TokenOutputs] = []
        if first < num:
            outputs = self._on_ranks(TrainerWorker.log_probs, batch, self._temperature, column, adapters, first)
        collect = partial(batch.collect, *self._layout, mini_batches=range(first, num))
        log_probs_K = collect([output.log_probs_K for output in outputs], column=column)
        entropy_K = collect([output.entropy_K for output in outputs])
        return TokenColumns(log_probs=batch.split(log_probs_K), entropy=batch.split(entropy_K))

    def values(self, batch: TrainBatch | ExperienceBatch, *, column: str | None = None) -> tuple[Float32Array, ...]:
        """A critic's value of the state before each generated token, without gradients; arguments as in `log_probs`."""
        if isinstance(batch, ExperienceBatch):
            with TrainBatch.of(batch) as only:
                return self.values(only)
        outputs = self._on_ranks(TrainerWorker.values, batch, column)
        return batch.split(batch.collect(*self._layout, outputs, column=column))

    def next_tokens(self, batch: TrainBatch) -> list[int]:
        """The most likely token in the place of each target, in the batch's order; see `ZeroEngine.next_tokens`."""
        outputs = self._on_ranks(TrainerWorker.next_tokens, batch)
        # float32 holds every token id exactly.
        return [int(token) for token in batch.collect(*self._layout, [output.float() for output in outputs])]

    def keep_hidden_states(self, batch: TrainBatch, *, column: str) -> None:
        """Leaves the hidden states that predict the targets on the ranks, as `column` [K_r, H] of the train batch."""
        self._on_ranks(TrainerWorker.keep_hidden_states, batch, column)

    def update(
        self,
        mini_batch: MiniBatch | ExperienceBatch,
        loss_fn: LossFn,
        *,
        head_term: HeadTerm | None = None,
        teacher: "ModelHandle | None" = None,
        own_log_probs: str | None = None,
    ) -> StepStats:
        """One optimizer step; `loss_fn` returns each micro batch's share of the loss.

        Args:
            mini_batch: a mini batch of a `TrainBatch`, or an `ExperienceBatch` that the ranks keep for this call only.
            loss_fn: a function of a module, or a `functools.partial` of one; the ranks import it.
            head_term: the same for a term that needs the LM head's weight; see `ds_engine.HeadTerm`.
            teacher: a frozen model of the same ranks, whose LM head the term gets as `teacher_head`.
            own_log_probs: a column that `log_probs(leave_first=True)` left out of the first mini batch. Its loss gets
                the log-probs of its own forward pass there, detached, and the train batch keeps them.

        Raises:
            InputError: the ranks cannot import `loss_fn`.
            ValueError: another mini batch lacks `own_log_probs` and has to be updated first: later its log-probs are
                those of changed weights.
            DivergedError: `max_skipped_updates` updates in a row had a gradient that is not finite.
        """
        if isinstance(mini_batch, ExperienceBatch):
            with TrainBatch.of(mini_batch) as only:
                return self.update(only.mini_batches[0], loss_fn, head_term=head_term, teacher=teacher)
        index = mini_batch.index
        lacking = mini_batch.batch.lacking(own_log_probs) if own_log_probs else frozenset()
        if lacking and index not in lacking:
            raise ValueError(f"mini batch {index} is updated before {min(lacking)}, which lacks {own_log_probs!r}")
        own = own_log_probs if lacking else None
        loss, term = LossSpec.of(loss_fn), None if head_term is None else LossSpec.of(head_term)
        deliveries = mini_batch.batch.deliveries(*self._layout, with_columns=True)
        of_teacher = None if teacher is None else teacher.name
        results = self.ranks.run_each(
            TrainerWorker.train, deliveries, self.name, index, loss, self._temperature, term, of_teacher, own
        )
        if own is not None:
            kept = [log_probs_Kr for _, log_probs_Kr in results if log_probs_Kr is not None]
            mini_batch.batch.collect(*self._layout, kept, column=own, mini_batches=[index])
        stats = results[0][0]
        self.skipped.count(stats)
        return stats

    def _on_ranks(self, method: Callable[..., T], batch: TrainBatch, *args: object) -> list[T]:
        """Calls `method` on every rank with its part of the batch, without the columns that updates alone need."""
        return self.ranks.run_each(method, batch.deliveries(*self._layout, with_columns=False), self.name, *args)

    @property
    def _layout(self) -> tuple[WorkerGroup, int, BatchConfig]:
        """Models with equal layouts share the ranks' copy of a train batch."""
        return self.ranks, self._sp, self._batch

    def export(self, folder: str, model_files_from: str, *, overwrite: bool = False) -> None:
        """Writes a Hugging Face folder with the current weights.

        Args:
            overwrite: replace a folder that has files.

        Raises:
            DivergedError: the gradient of the last update was not finite.
        """
        self.skipped.check()
        self.ranks.run(TrainerWorker.export, self.name, folder, model_files_from, overwrite=overwrite)

    def describe(self) -> ModelDescription:
        """Names, shapes and dtypes of the model's parameters, JSON-able."""
        return self.ranks.run(TrainerWorker.describe, self.name)[0]

    def load(self, folder: str) -> None:
        """Loads this engine from a checkpoint written by any number of ranks, ZeRO stage and offload."""
        self.ranks.run(TrainerWorker.load, self.name, folder)

    def connect_servers(
        self,
        endpoints: Sequence[Endpoint],
        config: SyncConfig,
        adapter: str | None = None,
        version: int = 0,
        *,
        base: bool = True,
    ) -> None:
        """Prepares to push the weights to the servers; with `adapter`, the LoRA adapters alone under that name.

        `base`: then the frozen base is pushed once, now; False: the servers have one of their own.
        """
        self.ranks.run(TrainerWorker.connect_servers, self.name, tuple(endpoints), config, adapter, version, base)

    def push_weights(self, version: int) -> SyncReport:
        """Sends the weights to every server as policy `version`; returns the report of rank 0."""
        return self.ranks.run(TrainerWorker.push_weights, version)[0]


@dataclass(frozen=True)
class WithoutAdapters:
    """The base model below the LoRA adapters of `model`, computed by the same engine: a reference without a copy."""

    model: ModelHandle

    def log_probs(self, batch: TrainBatch | ExperienceBatch, *, column: str | None = None) -> TokenColumns:
        """See `ModelHandle.log_probs`."""
        return self.model.log_probs(batch, column=column, adapters=False)


Reference = ModelHandle | WithoutAdapters
"""The reference model of a KL term: a frozen model, or an actor without its adapters."""


def run_concurrently(phase: Phase, *calls: tuple[str, ModelHandle, Callable[[], T]]) -> list[T]:
    """Runs calls on several models concurrently if no two of them share ranks, else one after the other.

    Concurrent calls on the same ranks could run their collectives in a different order on each rank. When calls run
    concurrently, a phase measures the time from the end of the previous call in the list to the end of its own.

    Args:
        phase: times each call.
        calls: (phase name, the model whose ranks compute, function).

    Returns:
        The results in the order of `calls`.
    """
    results: list[T] = []
    if len({id(model.ranks) for _, model, _ in calls}) < len(calls):
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
