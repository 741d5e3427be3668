"""Order of ZeRO-3 gathers and gradient reductions, as a pure function of the order in which submodules run.

In the first micro batch DeepSpeed records which submodules run forward and backward (the trace, the same for every
batch). From then on it prefetches: before a submodule runs, it gathers the submodule's missing parameters, then the
next ones in the trace up to a bucket. This module implements the rules of PartitionedParameterCoordinator in DeepSpeed
0.19. Gradients fill buckets in the order in which they arrive.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

__all__ = ["Transfer", "Visit", "planned_transfers"]

_NEVER = -(10**10)
_NUM_TRACING = 1
"""Micro batches that DeepSpeed traces, without prefetching."""


@dataclass(frozen=True, kw_only=True)
class Visit:
    """A hook call of DeepSpeed: before ("fetch") or after ("release") a submodule runs, or for a gradient."""

    kind: Literal["fetch", "release", "gradient"]
    parameters: tuple[int, ...]
    """Indices, in the model's order, of the submodule's own parameters, or of the parameter of the gradient."""
    submodule: int = -1


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """One collective that gathers parameters or reduce-scatters their gradients, in order."""

    kind: Literal["gather", "reduce"]
    parameters: tuple[int, ...]


class _Run:
    """DeepSpeed's state between hooks, for one training run."""

    def __init__(
        self, visits: Sequence[Visit], sizes: Sequence[int], *, persistent: frozenset[int], bucket: int, reach: int
    ) -> None:
        self._fetches = [visit for visit in visits if visit.kind == "fetch"]
        self._visits, self._sizes, self._persistent = visits, sizes, persistent
        self._bucket, self._reach = bucket, reach
        self._active: dict[int, set[int]] = {index: set() for index in range(len(sizes))}
        self._there: set[int] = set()
        self._is_tracing = True
        self._num_micro_batches = 0
        # Computed at the first visit and then cached, as in DeepSpeed.
        self._released: dict[tuple[int, int], frozenset[int]] = {}

    def step(self, num_micro_batches: int) -> Iterator[list[Transfer]]:
        """Yield the transfers of each micro batch of an optimizer step."""
        for _ in range(num_micro_batches):
            self._is_tracing = self._num_micro_batches < _NUM_TRACING
            self._num_micro_batches += 1
            yield list(self._micro_batch())
        self._there = set(self._persistent)  # the step partitions all parameters, then gathers these again

    def _micro_batch(self) -> Iterator[Transfer]:
        trace = [] if self._is_tracing else self._fetches
        self._queue = deque((index, step) for step, visit in enumerate(trace) for index in sorted(visit.parameters))
        self._fetched_for = dict.fromkeys(range(len(self._sizes)), _NEVER)
        self._under_way: set[int] = set()
        self._step = 0
        gradients: list[int] = []
        for visit in self._visits:
            if visit.kind == "fetch":
                yield from self._fetch(visit)
            elif visit.kind == "release":
                self._release(visit)
            else:
                if gradients and self._count({*gradients, *visit.parameters}) > self._bucket:
                    yield Transfer(kind="reduce", parameters=tuple(sorted(gradients)))
                    gradients = []
                gradients += visit.parameters
        yield Transfer(kind="reduce", parameters=tuple(sorted(gradients)))
        for index in self._under_way:  # prefetched and never used
            self._let_go(index)
        for index, submodules in self._active.items():  # no release hook runs if their inputs need no gradient
            if submodules:
                submodules.clear()
                self._there -= {index} - self._persistent

    def _fetch(self, visit: Visit) -> Iterator[Transfer]:
        missing = set(visit.parameters) - self._there
        if missing:
            self._there |= missing
            yield Transfer(kind="gather", parameters=tuple(sorted(missing)))
        self._under_way.difference_update(visit.parameters)
        for index in visit.parameters:
            self._active[index].add(visit.submodule)
        if not self._is_tracing and (ahead := self._look_ahead(visit)):
            self._there |= ahead
            self._under_way |= ahead
            yield Transfer(kind="gather", parameters=tuple(sorted(ahead)))
        self._step += 1

    def _look_ahead(self, visit: Visit) -> set[int]:
        due = {index for index in visit.parameters if self._fetched_for[index] < self._step}
        taken: set[int] = set()
        while self._queue and len(taken) < len(due):
            index, step = self._queue.popleft()
            self._fetched_for[index] = step
            taken.add(index)
        assert taken == due, "the fetches of these visits are not in the order of the trace"
        ahead: set[int] = set()
        while self._queue and self._count(ahead) < self._bucket:
            index, step = self._queue.popleft()
            self._fetched_for[index] = max(self._fetched_for[index], step)
            if index not in self._there:
                ahead.add(index)
        return ahead

    def _release(self, visit: Visit) -> None:
        if self._is_tracing:
            doomed = frozenset(visit.parameters)
        else:
            key = visit.submodule, self._step
            if key not in self._released:
                self._released[key] = self._used_up(visit)
            doomed = self._released[key]
        for index in visit.parameters:
            self._active[index].discard(visit.submodule)
            if index in doomed and index not in self._under_way:
                self._let_go(index)

    def _used_up(self, visit: Visit) -> frozenset[int]:
        """Parameters that are not persistent, not skipped by the prefetch, and not reused within the reuse distance."""
        doomed = set(visit.parameters) - self._persistent
        doomed -= {index for index in doomed if self._fetched_for[index] > self._step}
        distance = 0
        for later in self._fetches[self._step :]:
            if distance >= self._reach:
                break
            doomed.difference_update(later.parameters)
            distance += self._count(later.parameters)
        return frozenset(doomed)

    def _count(self, parameters: Iterable[int]) -> int:
        return sum(self._sizes[index] for index in parameters)

    def _let_go(self, index: int) -> None:
        if not self._active[index]:
            self._there.discard(index)


def planned_transfers(
    visits: Sequence[Visit],
    sizes: Sequence[int],
    *,
    persistent: frozenset[int],
    bucket: int,
    num_micro_batches: Sequence[int],
    reach: int = 10**9,
) -> list[list[list[Transfer]]]:
    """Plan the transfers of each optimizer step and micro batch, in order.

    Args:
        visits: the hook calls of one micro batch, in order.
        sizes: number of elements of each parameter.
        persistent: parameters small enough to stay gathered.
        bucket: minimum number of elements to prefetch, and maximum number to reduce together.
        num_micro_batches: number of micro batches of each step, starting with the first step of the run.
        reach: DeepSpeed's max_reuse_distance: parameters reused within this number of elements are not released.
    """
    run = _Run(visits, sizes, persistent=persistent, bucket=bucket, reach=reach)
    return [list(run.step(number)) for number in num_micro_batches]
