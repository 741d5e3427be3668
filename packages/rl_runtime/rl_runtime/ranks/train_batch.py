"""A train batch on the trainer ranks: planned, packed and sent to a rank group once per step.

Every later call refers to the batch by its number and brings only the per-token columns that the ranks lack. The plan
of the micro batches is made per mini batch, and log-probs, values and updates all use it.

Shapes: `N` samples, `K` generated tokens of all samples in order; `K_r` generated tokens of one rank in the order in
which it computes them (mini batch, micro batch, sample).
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType

import torch
from torch import Tensor

from rl_core import BatchConfig, PackedBatch, SequenceData, pack, plan_micro_batches

from ..experience import ExperienceBatch, Float32Array
from .trainer_worker import Delivery, TrainerWorker
from .worker_group import WorkerGroup

_numbers = itertools.count(1)


class TrainBatch:
    """The sequences of one step with their columns, divided into mini batches.

    A context manager: leaving it frees the copies on the ranks.

    ```
    with TrainBatch.of(samples, mini_batches=samples.mini_batch_indices(32)) as batch:
        old = actor.log_probs(batch, column="old_log_probs")
        batch.add_columns({"advantages": advantages_K})
        for mini_batch in batch.mini_batches:
            actor.update(mini_batch, loss_fn)
    ```
    """

    def __init__(
        self,
        sequences: Sequence[SequenceData],
        *,
        mini_batches: Sequence[Sequence[int]] | None = None,
        columns: Mapping[str, Tensor] | None = None,
        group_size: int = 1,
    ) -> None:
        """Sends nothing; the first call of a model sends the batch to its ranks.

        Args:
            sequences: token ids and masks of the N samples; their own columns are not used.
            mini_batches: sample indices of each mini batch, each sample once; None for a single mini batch.
            columns: float32 [K] by name.
            group_size: so many consecutive samples of a mini batch (a chosen and a rejected response) are in one micro
                batch, side by side and in order; a limit of samples per micro batch then counts groups.

        Raises:
            ValueError: a mini batch is not made of whole groups.
        """
        self._sequences, self._group_size = sequences, group_size
        self._lens = [_num_targets(sequence) for sequence in sequences]
        self._minis = [list(mini) for mini in mini_batches] if mini_batches else [list(range(len(sequences)))]
        if broken := [len(mini) for mini in self._minis if len(mini) % group_size]:
            raise ValueError(f"a mini batch has {broken[0]} samples; allowed: multiples of group_size={group_size}")
        self._columns: dict[str, Tensor] = {}
        self._lacking: dict[str, set[int]] = {}
        self._on_ranks: dict[tuple[int, int, BatchConfig], _BatchOnRanks] = {}
        self._number = next(_numbers)
        self.add_columns(columns or {})

    @classmethod
    def of(cls, samples: ExperienceBatch, *, mini_batches: Sequence[Sequence[int]] | None = None) -> "TrainBatch":
        """The samples with their columns; `mini_batches` as in the constructor."""
        return cls(
            [samples.sequence(index) for index in range(len(samples.items))],
            mini_batches=mini_batches,
            columns={name: samples.flat(name) for name in samples.columns},
        )

    @property
    def mini_batches(self) -> tuple["MiniBatch", ...]:
        """The mini batches in order, for `ModelHandle.update`."""
        return tuple(MiniBatch(batch=self, index=index) for index in range(len(self._minis)))

    def add_columns(self, columns: Mapping[str, Tensor]) -> None:
        """Adds per-token columns, [K] or [K, ...]; the next update sends them to its ranks, int64 as it is and other
        values as float32.

        Raises:
            ValueError: a column exists already or has another length.
        """
        for name, column_K in columns.items():
            if name in self._columns:
                raise ValueError(f"column {name!r} exists already")
            if column_K.shape[:1] != (sum(self._lens),):
                raise ValueError(
                    f"column {name!r} has shape {tuple(column_K.shape)}; allowed: ({sum(self._lens)},), one value "
                    "per generated token"
                )
            self._columns[name] = column_K if column_K.dtype == torch.int64 else column_K.to(torch.float32)

    def deliveries(self, ranks: WorkerGroup, sp: int, config: BatchConfig, *, with_columns: bool) -> list[Delivery]:
        """One delivery per rank of `ranks`: the batch in the first call, missing columns in later calls.

        A column that a mini batch lacks is not sent to other ranks than those that compute it.
        """
        # A copy first: models on other ranks may add columns meanwhile (`run_concurrently`).
        columns = dict(self._columns) if with_columns else {}
        whole = {name: column_K for name, column_K in columns.items() if not self._lacking.get(name)}
        return self._placed(ranks, sp, config).deliveries(self._number, whole)

    def collect(
        self,
        ranks: WorkerGroup,
        sp: int,
        config: BatchConfig,
        outputs: Sequence[Tensor],
        *,
        column: str | None = None,
        mini_batches: Sequence[int] | None = None,
    ) -> Tensor:
        """The ranks' results of some mini batches (None: all), [K_r] each, as [K], NaN for the others.

        Args:
            column: the name under which the ranks kept them. The batch keeps them too; the other mini batches lack it.
        """
        placed, everything = self._placed(ranks, sp, config), range(len(self._minis))
        chosen = everything if mini_batches is None else mini_batches
        values_K = placed.in_order(outputs, sum(self._lens), chosen)
        if column is None:
            return values_K
        if self._lacking.get(column):
            placed.in_order(outputs, sum(self._lens), chosen, into=self._columns[column])
            self._lacking[column] -= set(chosen)
        else:
            self.add_columns({column: values_K.clone()})
            placed.columns.add(column)
            self._lacking[column] = set(everything) - set(chosen)
        return values_K

    def column(self, name: str) -> Tensor:
        """A column, [K], in the order of the samples.

        Raises:
            ValueError: there is no such column, or a mini batch lacks it (`ModelHandle.log_probs(leave_first=True)`).
        """
        if name not in self._columns or self._lacking.get(name):
            raise ValueError(f"column {name!r} does not exist, or mini batches {sorted(self.lacking(name))} lack it")
        return self._columns[name]

    def lacking(self, name: str) -> frozenset[int]:
        """The mini batches that lack a column which others have."""
        return frozenset(self._lacking.get(name, ()))

    def _placed(self, ranks: WorkerGroup, sp: int, config: BatchConfig) -> "_BatchOnRanks":
        key = (id(ranks), sp, config)
        if key not in self._on_ranks:
            self._on_ranks[key] = _BatchOnRanks(self, ranks, sp, config)
        return self._on_ranks[key]

    def split(self, values_K: Tensor) -> tuple[Float32Array, ...]:
        """A float32 [K] tensor as one array per sample."""
        return tuple(part.numpy() for part in values_K.split(self._lens))

    def close(self) -> None:
        """Frees the ranks' copies."""
        for placed in self._on_ranks.values():
            placed.ranks.run(TrainerWorker.drop_batch, self._number)
        self._on_ranks = {}

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

    batch: TrainBatch
    index: int


class _BatchOnRanks:
    """A train batch on one rank group; sp consecutive ranks hold the same part."""

    def __init__(self, batch: TrainBatch, ranks: WorkerGroup, sp: int, config: BatchConfig) -> None:
        self.ranks, self._sp = ranks, sp
        self.columns: set[str] = set()
        sequences, dp, size = batch._sequences, ranks.world_size // sp, batch._group_size
        plans = [assignment(sequences, mini, dp, config, sp, group_size=size) for mini in batch._minis]
        replicas = [[plan[replica] for plan in plans] for replica in range(dp)]
        positions = torch.arange(sum(batch._lens)).split(batch._lens)
        nothing = torch.zeros(0, dtype=torch.int64)
        # [replica][mini batch]: places of the tokens among the K.
        self._order = [
            [torch.cat([nothing, *(positions[index] for micro in mini for index in micro)]) for mini in replica]
            for replica in replicas
        ]
        # None once sent.
        self._packed: list[list[list[PackedBatch]]] | None = [
            [[pack([sequences[i] for i in micro], column_names=()) for micro in mini] for mini in replica]
            for replica in replicas
        ]

    def deliveries(self, number: int, columns: Mapping[str, Tensor]) -> list[Delivery]:
        missing = {name: column_K for name, column_K in columns.items() if name not in self.columns}
        packed, self._packed = self._packed, None
        self.columns |= set(missing)
        per_replica = [
            Delivery(
                batch=number,
                mini_batches=None if packed is None else packed[replica],
                columns={name: column_K[torch.cat(order)] for name, column_K in missing.items()},
            )
            for replica, order in enumerate(self._order)
        ]
        return [delivery for delivery in per_replica for _ in range(self._sp)]

    def in_order(
        self, outputs: Sequence[Tensor], num_tokens: int, mini_batches: Sequence[int], *, into: Tensor | None = None
    ) -> Tensor:
        """Results of all ranks for these mini batches, [K_r] each, in the order of the samples: [K], else NaN.

        `into`: writes them there.
        """
        values_K = torch.full((num_tokens,), math.nan) if into is None else into
        if mini_batches:
            for order, output_Kr in zip(self._order, outputs[:: self._sp], strict=True):
                values_K[torch.cat([order[mini] for mini in mini_batches])] = output_Kr
        return values_K


def assignment(
    sequences: Sequence[SequenceData],
    mini_batch: Sequence[int],
    num_replicas: int,
    config: BatchConfig,
    sp: int,
    *,
    group_size: int = 1,
) -> list[list[list[int]]]:
    """[replica][micro batch] -> samples of a mini batch, the same number of micro batches on every replica.

    The limits per micro batch are multiplied by sp, because each of the sp ranks holds 1/sp of the tokens. Groups of
    `group_size` consecutive samples stay together, in order.
    """
    size, budget = config.micro_batch_size, config.max_packed_tokens
    groups = [mini_batch[start : start + group_size] for start in range(0, len(mini_batch), group_size)]
    plan = plan_micro_batches(
        [sum(len(sequences[i].prompt_ids) + len(sequences[i].response_ids) for i in group) for group in groups],
        num_ranks=num_replicas,
        token_budget=None if size else budget * sp,
        micro_batch_size=size * sp if size else None,
    )
    return [[[i for group in micro for i in groups[group]] for micro in replica] for replica in plan.assignment]


def _num_targets(sequence: SequenceData) -> int:
    """Generated tokens of the response."""
    mask = sequence.response_mask
    return len(sequence.response_ids) if mask is None else int(torch.as_tensor(mask).sum())
