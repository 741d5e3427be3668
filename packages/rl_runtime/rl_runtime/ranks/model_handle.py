"""A trained or frozen model as the algorithm sees it: batches in, log-probs or an optimizer step out."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np

from ds_engine import EngineConfig, Head, LossFn, OptimConfig, StepStats
from rl_core import BatchConfig, MicroBatchPlan, PackedBatch, plan_micro_batches

from ..experience import ExperienceBatch, Float32Array
from .worker_group import RankGroup

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class TokenColumns:
    """Per-token results in the order of the batch: N arrays, one value a response token."""

    log_probs: tuple[Float32Array, ...]
    entropy: tuple[Float32Array, ...]


class Role:
    """The engine called `name` ("actor", "ref", "critic") on all ranks, with the batch math between."""

    def __init__(self, ranks: RankGroup, name: str, batch: BatchConfig, *, temperature: float = 1.0) -> None:
        self.ranks, self.name, self._batch, self._temperature = ranks, name, batch, temperature
        self._sp = 1

    def build(self, model_path: str, config: EngineConfig, *, total_steps: int, head: Head = "lm") -> None:
        """Makes the engine on every rank from a Hugging Face folder, with a fresh optimizer."""
        self._sp = config.sequence_parallel
        self.ranks.call("build", self.name, model_path, config, total_steps, head)

    def build_frozen(self, model_path: str, config: EngineConfig) -> None:
        """Makes an engine that is never trained (a reference model): no gradients, no optimizer states."""
        self._sp = config.sequence_parallel
        self.ranks.call("build", self.name, model_path, replace(config, optim=OptimConfig()), None)

    def log_probs(self, batch: ExperienceBatch) -> TokenColumns:
        """Log-probs of the response tokens at the rollout's temperature, and entropies, without gradients."""
        rows = self._per_token(
            batch, "log_probs", self._temperature, columns=lambda out: (out.log_probs_K.numpy(), out.entropy_K.numpy())
        )
        log_probs, entropy = zip(*rows, strict=True)
        return TokenColumns(log_probs=log_probs, entropy=entropy)

    def values(self, batch: ExperienceBatch) -> tuple[Float32Array, ...]:
        """A critic's value of the state before each response token, without gradients: N arrays."""
        return tuple(row[0] for row in self._per_token(batch, "values", columns=lambda out_K: (out_K.numpy(),)))

    def update(self, batch: ExperienceBatch, loss_fn: LossFn) -> StepStats:
        """One optimizer step on a mini batch; `loss_fn` returns each micro batch's share of the loss."""
        return self.update_packed(batch.packed(self.plan([item.num_tokens for item in batch.items])), loss_fn)

    def update_packed(self, packed: Sequence[Sequence[PackedBatch]], loss_fn: LossFn) -> StepStats:
        """One optimizer step on micro batches already packed for every replica: sp consecutive ranks get the same."""
        stats = self.ranks.call_each(
            "train", lambda rank: (self.name, packed[rank // self._sp], loss_fn, self._temperature)
        )
        result: StepStats = stats[0]
        return result

    def export(self, folder: str, model_files_from: str) -> None:
        """Writes a Hugging Face folder with the current weights."""
        self.ranks.call("export", self.name, folder, model_files_from)

    def describe(self) -> dict[str, Any]:
        """Names, shapes and dtypes of the model's parameters, JSON-able."""
        described: dict[str, Any] = self.ranks.call("describe", self.name)[0]
        return described

    def load(self, folder: str) -> None:
        """Reads the engine's part of a checkpoint, whatever ranks, stage and offload wrote it."""
        self.ranks.call("load", self.name, folder)

    def connect_servers(self, endpoints: Sequence[Any], config: Any, adapter: str | None = None) -> None:
        """Prepares pushing this role's weights, or its adapters alone under that name, into the rollout servers."""
        self.ranks.call("connect_servers", self.name, tuple(endpoints), config, adapter)

    def push_weights(self, version: int) -> Any:
        """Sends the weights to every server; rank 0's report."""
        return self.ranks.call("push_weights", version)[0]

    def _per_token(
        self, batch: ExperienceBatch, method: str, *args: Any, columns: Callable[[Any], tuple[Float32Array, ...]]
    ) -> list[tuple[Float32Array, ...]]:
        """Per-token results of the ranks' `method` in the order of the batch; `columns` reads a micro batch's."""
        plan = self.plan([item.num_tokens for item in batch.items])
        packed = batch.packed(plan)
        outputs = self.ranks.call_each(method, lambda rank: (self.name, packed[rank // self._sp], *args))
        # [replica][micro batch][sample] -> columns, then back in the order of the batch
        split = [
            [_per_sample(batch, micro, columns(output)) for micro, output in zip(micros, replica, strict=True)]
            for micros, replica in zip(plan.assignment, outputs[:: self._sp], strict=True)
        ]
        return list(plan.restore(split))

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


def together(phase: Callable[[str], AbstractContextManager[Any]], *calls: tuple[str, Role, Callable[[], T]]) -> list[T]:
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
    batch: ExperienceBatch, micro: Sequence[int], columns: tuple[Float32Array, ...]
) -> list[tuple[Float32Array, ...]]:
    """The [K] columns of a micro batch cut at its samples' borders."""
    if not micro:
        return []
    borders = np.cumsum([batch.items[i].num_generated for i in micro])[:-1]
    return list(zip(*(np.split(column, borders) for column in columns), strict=True))
