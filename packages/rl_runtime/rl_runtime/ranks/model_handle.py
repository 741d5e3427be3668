"""A model on its ranks: log-probs, values and optimizer steps of a train batch."""

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from ds_engine import EngineConfig, Head, HeadTerm, LossFn, OptimConfig, StepSettings, StepStats, ZeroEngine
from rl_core import Batch, BatchConfig
from rl_data import ImageFiles
from weight_sync import Endpoint, SyncConfig, SyncReport

from ..errors import DivergedError
from ..samples import Phase
from .train_batch import Layout, MiniBatch, TrainBatch
from .trainer_worker import Compute, ModelDescription, TrainerWorker
from .worker_group import WorkerGroup

T = TypeVar("T")


def log_probs(
    engine: ZeroEngine, micro_batches: Sequence[Batch], *, temperature: float, adapters: bool
) -> list[Tensor]:
    """Log-prob of each target, on a rank; with `router_replay` R2 the routes stay in the micro batches."""
    outputs = engine.log_probs(micro_batches, temperature=temperature, adapters=adapters)
    for micro, output in zip(micro_batches, outputs, strict=True):
        if output.routes_TLk is not None:  # updates replay them
            micro.per_token["routes"] = output.routes_TLk
    return [output.log_probs_K for output in outputs]


def values(engine: ZeroEngine, micro_batches: Sequence[Batch]) -> list[Tensor]:
    """Value of the state before each target, on a rank."""
    return engine.values(micro_batches)


def next_tokens(engine: ZeroEngine, micro_batches: Sequence[Batch]) -> list[Tensor]:
    """The most likely token in the place of each target, on a rank; float32 holds every token id exactly."""
    return [tokens_K.float() for tokens_K in engine.next_tokens(micro_batches)]


def hidden_states(engine: ZeroEngine, micro_batches: Sequence[Batch]) -> list[Tensor]:
    """The hidden states that predict the targets, on a rank."""
    return engine.hidden_states(micro_batches)


def is_skipped(stats: StepStats) -> bool:
    """True if an optimizer step changed nothing, because a gradient was not finite."""
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
            if scaled:
                why = f"fp16 lowers its loss scale, {stats.loss_scale:g}, which is normal at the start"
            self._report(f"warning: skipped an update of the {self._model}, because its gradient is not finite: {why}")
        self.in_a_row += not scaled
        if self._limit and self.in_a_row >= self._limit:
            raise self._error()

    def check(self) -> None:
        """Raises DivergedError if the last update was skipped."""
        if self.in_a_row and self._limit:
            raise self._error()

    def _error(self) -> DivergedError:
        return DivergedError(
            f"the {self._model} has diverged: the gradients of its last {self.in_a_row} updates are not finite",
            field="trainer.max_skipped_updates",
            value=self._limit,
            remedy="lower its learning rate, or look for the step in which its loss exploded",
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
        images: ImageFiles | None = None,
    ) -> None:
        """`max_skipped_updates` and `report` are those of `SkippedUpdates`; `images`: the files of examples' images."""
        self.images = images
        self.ranks, self.name, self._batch, self._temperature = ranks, name, batch, temperature
        self._report, self.skipped = report, SkippedUpdates(name, max_skipped_updates, report)
        self._sp = 1

    def build(
        self,
        model_path: str,
        config: EngineConfig,
        *,
        total_steps: int,
        head: Head = "lm",
        shares_base: bool = False,
    ) -> None:
        """Builds the engine on every rank from a Hugging Face folder, with a new optimizer.

        `shares_base`: adapters over frozen weights that the ranks hold once for all models built so.
        """
        self._sp = config.sequence_parallel
        tokens = 0 if self._batch.micro_batch_size else self._batch.max_packed_tokens
        settings = model_path, config, total_steps, head, shares_base, tokens
        seconds = self.ranks.run(TrainerWorker.build, self.name, *settings)
        if config.compile:
            built_s, compiled_s = map(max, zip(*seconds, strict=True))
            self._report(f"{self.name}: built in {built_s:.1f} s, its layers compiled in {compiled_s:.1f} s")

    def build_frozen(self, model_path: str, config: EngineConfig, *, head: Head = "lm") -> None:
        """Builds a frozen engine (a reference or reward model), without gradients and optimizer states."""
        self._sp = config.sequence_parallel
        self.ranks.run(TrainerWorker.build, self.name, model_path, _frozen(config), None, head)

    def compute(self, batch: TrainBatch, function: Compute, *, mini_batches: Sequence[int] | None = None) -> Tensor:
        """One value per target, [K], computed by every rank for its micro batches, without gradients.

        Args:
            function: Ray sends it; a function of a module that the ranks can import travels by its name.
            mini_batches: those to compute, NaN for the others; None: all.
        """
        chosen = range(len(batch.mini_batches)) if mini_batches is None else mini_batches
        number = batch.send(self._layout)
        outputs = self.ranks.run(TrainerWorker.compute, number, self.name, function, chosen)
        return batch.gather(self._layout, outputs, chosen)

    def log_probs(
        self, batch: TrainBatch, *, mini_batches: Sequence[int] | None = None, adapters: bool = True
    ) -> Tensor:
        """Log-probs of the targets at the rollout's temperature, float32 [K]; see `compute`.

        Args:
            adapters: False computes without the LoRA adapters: the base model, as a reference.

        Raises:
            RankError: `adapters=False`, but the engine has none.
        """
        function = partial(log_probs, temperature=self._temperature, adapters=adapters)
        return self.compute(batch, function, mini_batches=mini_batches)

    def values(self, batch: TrainBatch) -> Tensor:
        """A critic's value of the state before each target, float32 [K]; see `compute`."""
        return self.compute(batch, values)

    def next_tokens(self, batch: TrainBatch) -> list[int]:
        """The most likely token in the place of each target, in the batch's order; see `ZeroEngine.next_tokens`."""
        return [int(token) for token in self.compute(batch, next_tokens)]

    def keep_hidden_states(self, batch: TrainBatch, *, column: str) -> None:
        """Leaves the hidden states that predict the targets on the ranks, as `column` [K_r, H] of the train batch."""
        number, everything = batch.send(self._layout), range(len(batch.mini_batches))
        self.ranks.run(TrainerWorker.compute, number, self.name, hidden_states, everything, column)

    def update(
        self,
        mini_batch: MiniBatch,
        loss_fn: LossFn,
        *,
        head_term: HeadTerm | None = None,
        teacher: "ModelHandle | None" = None,
    ) -> StepStats:
        """One optimizer step; `loss_fn` returns each micro batch's share of the loss.

        Args:
            mini_batch: a mini batch of a `TrainBatch`, with the columns that the batch has now.
            loss_fn: sent by Ray, as the function of `compute`.
            head_term: the same for a term that needs the LM head's weight; see `ds_engine.HeadTerm`.
            teacher: a frozen model of the same ranks, whose LM head the term gets as `teacher_head`.

        Raises:
            DivergedError: `max_skipped_updates` updates in a row had a gradient that is not finite.
        """
        name = None if teacher is None else teacher.name
        return self._update(mini_batch, loss_fn, head_term=head_term, teacher=name)[0]

    def update_with_own_log_probs(
        self, mini_batch: MiniBatch, loss_fn: LossFn, *, column: str
    ) -> tuple[StepStats, Tensor]:
        """`update` whose loss gets the log-probs of its own forward pass as `column`; with these, [K], else NaN."""
        return self._update(mini_batch, loss_fn, own_log_probs=column)

    def accumulate(self, batch: TrainBatch, loss_fn: LossFn, *, column: str) -> tuple[float, dict[str, float], Tensor]:
        """Adds the gradient of a batch of one mini batch to those that wait for `step`.

        Args:
            loss_fn: as in `update`; it gets the log-probs of its own forward pass, detached, as `column`.

        Returns:
            The loss and the metrics, summed, and these log-probs, [K].
        """
        (loss, metrics), own_K = self._train(batch, 0, loss_fn, own_log_probs=column, steps=False)
        return loss, metrics, own_K

    def step(self, settings: StepSettings) -> tuple[float, bool]:
        """One optimizer step on the gradients that wait: the norm before clipping, and False if it was not finite."""
        return self.ranks.run(TrainerWorker.step, self.name, settings)[0]

    def forget_optimizer(self) -> None:
        """Sets the optimizer's states to those of a new one; the weights stay."""
        self.ranks.run(TrainerWorker.forget_optimizer, self.name)

    def _update(self, mini_batch: MiniBatch, loss_fn: LossFn, **options: Any) -> tuple[StepStats, Tensor]:
        batch, index = mini_batch.train_batch, mini_batch.index
        stats, own_K = self._train(batch, index, loss_fn, **options)
        stats = replace(stats, metrics=stats.metrics | batch.token_counts(self._layout, index))
        self.skipped.count(stats)
        return stats, own_K

    def _train(self, batch: TrainBatch, index: int, loss_fn: LossFn, **options: Any) -> tuple[Any, Tensor]:
        """`TrainerWorker.train` on every rank: the result of rank 0, and the own log-probs, [K], NaN without them."""
        number = batch.send(self._layout)
        columns = batch.missing_columns(self._layout, index)
        results = self.ranks.run_each(
            TrainerWorker.train, columns, number, self.name, index, loss_fn, self._temperature, **options
        )
        chosen = [index] if options.get("own_log_probs") else []
        return results[0][0], batch.gather(self._layout, [own_Kr for _, own_Kr in results], chosen)

    @property
    def _layout(self) -> Layout:
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

    def export_adapter(self, folder: str) -> None:
        """Writes a PEFT folder with the current LoRA adapters, in place of one that is there."""
        self.ranks.run(TrainerWorker.export_adapter, self.name, folder)

    def describe(self) -> ModelDescription:
        """Names, shapes and dtypes of the model's parameters, JSON-able."""
        return self.ranks.run(TrainerWorker.describe, self.name)[0]

    def load(self, folder: str) -> None:
        """Loads this engine from a checkpoint written by any number of ranks, ZeRO stage and offload.

        The folder has the name under which `RunCheckpoints` saved the engine.
        """
        self.ranks.run(TrainerWorker.load, self.name, folder, Path(folder).name)

    def start_from(self, folder: str) -> None:
        """Gives this engine the weights and optimizer states of a DeepSpeed checkpoint that any program wrote."""
        self.ranks.run(TrainerWorker.start_from, self.name, folder)

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

    def disconnect_servers(self) -> None:
        """Ends the connection, so that others can push to the servers."""
        self.ranks.run(TrainerWorker.disconnect_servers)

    def push_weights(self, version: int) -> SyncReport:
        """Sends the weights to every server as policy `version`; returns the report of rank 0."""
        return self.ranks.run(TrainerWorker.push_weights, version)[0]


def _frozen(config: EngineConfig) -> EngineConfig:
    """The engine of a model that is not trained: its own routers choose, whatever the policy's did."""
    return replace(config, optim=OptimConfig(), router_replay="off")


@dataclass(frozen=True)
class WithoutAdapters:
    """The base model below the LoRA adapters of `model`, computed by the same engine: a reference without a copy."""

    model: ModelHandle

    def log_probs(self, batch: TrainBatch) -> Tensor:
        """See `ModelHandle.log_probs`."""
        return self.model.log_probs(batch, adapters=False)


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
