"""A train batch on the trainer ranks: planned and sent to a rank group once per step; each rank packs its own part.

Later calls refer to it by its number. An update brings the columns that its mini batch lacks on the ranks; the plan of
the micro batches is made per mini batch, and log-probs, values and updates all use it.

Shapes: `K` targets of all sequences in order; `K_r` those of one rank in the order in which it computes them (mini
batch, micro batch, sequence).
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from types import TracebackType
from typing import TypeVar

import torch
from torch import Tensor

from rl_core import ArgumentError, Batch, BatchConfig, PrefixOrder, plan_micro_batches

from .trainer_worker import RankPart, TrainerWorker
from .worker_group import WorkerGroup

Layout = tuple[WorkerGroup, int, BatchConfig]
"""The ranks of a model, how many of them share a sequence (sp), and the limits of a micro batch."""
Assignment = list[list[list[int]]]
"""[replica][micro batch] -> sequences of a mini batch."""

MIN_SHARED_SHARE = 0.05
"""A batch of which shared prefixes save a smaller share of the tokens is computed without them: a tree costs attention
more calls. Chosen, not measured."""

COPIED_TOKENS = 4
"""Most tokens of sequences in a micro batch, per token of its budget, if attention copies a prefix for each sequence:
each adds a key and a value to every layer, a computed token several times as much. A bound by that arithmetic."""

T = TypeVar("T")
_numbers = itertools.count(1)


class TrainBatch:
    """The mini batches of a `Batch`, and its copies on the ranks.

    A context manager: leaving it frees the copies.

    ```
    with TrainBatch(batch, mini_batches=mini_batches) as train_batch:
        batch.add_columns(old_log_probs=actor.log_probs(train_batch))
        batch.add_columns(advantages=advantages_K)
        for mini_batch in train_batch.mini_batches:
            actor.update(mini_batch, loss_fn)
    ```
    """

    def __init__(
        self, batch: Batch, *, mini_batches: Sequence[Sequence[int]] | None = None, group_size: int = 1
    ) -> None:
        """Sends nothing; the first call of a model sends the batch to its ranks.

        Args:
            batch: its columns may be added later, up to the first update of a mini batch that needs them.
            mini_batches: the sequences of each mini batch, each once; None for a single mini batch.
            group_size: so many consecutive sequences of a mini batch (a chosen and a rejected response) are in one
                micro batch, side by side and in order; a limit of sequences per micro batch then counts groups.

        Raises:
            ValueError: a mini batch is not made of whole groups.
        """
        self.batch, self._group_size = batch, group_size
        self._minis = list(mini_batches) if mini_batches else [range(batch.num_sequences)]
        if broken := [len(mini) for mini in self._minis if len(mini) % group_size]:
            allowed = "a divisor of every mini batch's sequences"
            raise ArgumentError(f"one has {broken[0]}", field="group_size", value=group_size, allowed=allowed)
        self._assignments: dict[Layout, list[Assignment]] = {}
        """Assignment of each mini batch, for every layout that holds the batch."""
        self._sent: dict[Layout, set[tuple[int, str]]] = {}
        """(mini batch, column) pairs that the ranks have."""
        self._numbers: dict[Layout, int] = {}
        """The name of each copy on its ranks."""
        self._computed: dict[Layout, list[int]] = {}
        """Tokens that the ranks compute of each mini batch."""

    @property
    def mini_batches(self) -> tuple["MiniBatch", ...]:
        """The mini batches in order, for `ModelHandle.update`."""
        return tuple(MiniBatch(train_batch=self, index=index) for index in range(len(self._minis)))

    def send(self, layout: Layout) -> int:
        """Plans the micro batches and sends each rank its own, unless the ranks have them; the number of the copy."""
        if layout in self._numbers:
            return self._numbers[layout]
        ranks, sp, config = layout
        dp = ranks.world_size // sp
        lens = self.batch.seq_lens_S.tolist()
        share = config.share_prefixes and all(ranks.run(TrainerWorker.shares_prefixes))
        order = self._prefixes if share else None
        # Of each sequence what the budget limits beside computed tokens: its targets, and copies of keys and values.
        loads = self.batch.response_lens_S.tolist()
        if order is not None and any(ranks.run(TrainerWorker.copies_prefixes)):
            loads = [max(load, length // COPIED_TOKENS) for load, length in zip(loads, lens, strict=True)]
        plans = [
            assignment(lens, loads, mini, dp, config, sp, group_size=self._group_size, prefixes=order)
            for mini in self._minis
        ]
        number, bare = next(_numbers), self.batch.without_columns()
        parts = [RankPart.of(bare, [plan[replica] for plan in plans], order) for replica in range(dp)]
        computed = ranks.run_each(TrainerWorker.hold_batch, _for_each_rank(parts, sp), number)[::sp]
        self._computed[layout] = [sum(mini) for mini in zip(*computed, strict=True)]
        self._assignments[layout], self._sent[layout], self._numbers[layout] = plans, set(), number
        return number

    @cached_property
    def _prefixes(self) -> PrefixOrder | None:
        """The prefixes that the sequences share; None if these are few tokens, or if sequences have images."""
        if self.batch.images:  # equal placeholders are no equal prefixes
            return None
        order = self.batch.order_prefixes()
        return order if order.shared_S.sum() >= MIN_SHARED_SHARE * self.batch.num_tokens else None

    def token_counts(self, layout: Layout, mini_batch: int) -> dict[str, float]:
        """Metrics of an update: tokens of the sequences of a mini batch, and those that the ranks compute."""
        num_tokens = int(self.batch.seq_lens_S[list(self._minis[mini_batch])].sum())
        computed = self._computed[layout][mini_batch]
        return {"tokens_per_update": float(num_tokens), "computed_tokens_per_update": float(computed)}

    def missing_columns(self, layout: Layout, mini_batch: int) -> list[dict[str, Tensor]]:
        """Columns that each rank's part of a mini batch lacks, [K_r] each; an update sends them too."""
        # A copy first: models on other ranks may add columns meanwhile (`run_concurrently`).
        columns, sent = dict(self.batch.columns), self._sent[layout]
        names = [name for name in columns if (mini_batch, name) not in sent]
        sent |= {(mini_batch, name) for name in names}
        places = [self._places(layout, replica, [mini_batch]) for replica in range(len(self._assignments[layout][0]))]
        parts = [{name: columns[name][places_Kr] for name in names} for places_Kr in places]
        return _for_each_rank(parts, layout[1])

    def gather(self, layout: Layout, outputs: Sequence[Tensor], mini_batches: Sequence[int]) -> Tensor:
        """The ranks' results of some mini batches, [K_r] each, in the order of the batch: [K], NaN for the others."""
        values_K = torch.full((self.batch.num_targets,), math.nan)
        for replica, output_Kr in enumerate(outputs[:: layout[1]]):
            values_K[self._places(layout, replica, mini_batches)] = output_Kr
        return values_K

    def _places(self, layout: Layout, replica: int, mini_batches: Sequence[int]) -> Tensor:
        """Places among the K of what a replica computes for these mini batches, in its order."""
        plans = self._assignments[layout]
        return self.batch.target_places([i for mini in mini_batches for micro in plans[mini][replica] for i in micro])

    def close(self) -> None:
        """Frees the ranks' copies."""
        for (ranks, _, _), number in self._numbers.items():
            ranks.run(TrainerWorker.drop_batch, number)
        self._numbers = {}

    def __enter__(self) -> "TrainBatch":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:  # after an error the ranks may not answer, and the run ends
            self.close()


@dataclass(frozen=True, kw_only=True)
class MiniBatch:
    """One mini batch of a train batch."""

    train_batch: TrainBatch
    index: int


def assignment(
    lens: Sequence[int],
    loads: Sequence[int],
    mini_batch: Sequence[int],
    num_replicas: int,
    config: BatchConfig,
    sp: int,
    *,
    group_size: int = 1,
    prefixes: PrefixOrder | None = None,
) -> Assignment:
    """The sequences of a mini batch by replica and micro batch, the same number of micro batches on every replica.

    The limits per micro batch are multiplied by sp, because each of the sp ranks holds 1/sp of the tokens. Groups of
    `group_size` consecutive sequences stay together, in order.

    Args:
        lens: tokens of every sequence of the train batch.
        loads: with `prefixes`, what the budget limits beside computed tokens, such as targets.
        prefixes: of the train batch, if its shared prefixes are computed once.
    """
    size, budget = config.micro_batch_size, config.max_packed_tokens
    groups = [mini_batch[start : start + group_size] for start in range(0, len(mini_batch), group_size)]
    sizes = [sum(lens[i] for i in group) for group in groups]
    group_loads = [sum(loads[i] for i in group) for group in groups]
    if prefixes is not None:  # a group shares with others at least what its first sequence does
        saved = [int(prefixes.select(group).shared_S.sum()) if len(group) > 1 else 0 for group in groups]
        sizes = [max(size - n, k) for size, n, k in zip(sizes, saved, group_loads, strict=True)]
        prefixes = prefixes.select([group[0] for group in groups])
    plan = plan_micro_batches(
        sizes,
        num_ranks=num_replicas,
        token_budget=None if size else budget * sp,
        micro_batch_size=size * sp if size else None,
        prefixes=prefixes,
        loads=group_loads,
    )
    return [[[i for group in micro for i in groups[group]] for micro in replica] for replica in plan.assignment]


def _for_each_rank(parts: Sequence[T], sp: int) -> list[T]:
    """The part of every replica, once for each of its sp ranks."""
    return [part for part in parts for _ in range(sp)]
