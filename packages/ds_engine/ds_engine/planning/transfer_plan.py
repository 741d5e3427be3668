"""Order of ZeRO-3 gathers and gradient reductions, as a pure function of the order in which submodules run.

DeepSpeed records in the first micro batch which submodules run forward and backward (the trace, the same for every
batch). From then on it prefetches: before a submodule runs, it gathers the submodule's missing parameters, then the
next ones in the trace up to a bucket. This module implements the rules of PartitionedParameterCoordinator in DeepSpeed
0.19. Gradients fill buckets in the order in which they arrive.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

_NEVER = -(10**10)


@dataclass(frozen=True, kw_only=True)
class HookCall:
    """A call of one of DeepSpeed's hooks: before ("fetch") or after ("release") a submodule runs, or for a gradient."""

    kind: Literal["fetch", "release", "gradient"]
    parameters: tuple[int, ...]
    """Indices of the submodule's own parameters, or of the parameter of the gradient."""
    submodule: int = -1


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """One collective that gathers parameters or reduce-scatters their gradients, in order."""

    kind: Literal["gather", "reduce"]
    parameters: tuple[int, ...]


class _Coordinator:
    """State of DeepSpeed's PartitionedParameterCoordinator between hooks."""

    def __init__(
        self,
        hook_calls: Sequence[HookCall],
        sizes: Sequence[int],
        *,
        persistent: frozenset[int],
        bucket: int,
        prefetched: int,
        max_reuse_distance: int,
    ) -> None:
        self._fetches = [call for call in hook_calls if call.kind == "fetch"]
        self._hook_calls, self._sizes, self._persistent = hook_calls, sizes, persistent
        self._bucket, self._prefetched, self._max_reuse_distance = bucket, prefetched, max_reuse_distance
        self._active: dict[int, set[int]] = {index: set() for index in range(len(sizes))}
        self._available: set[int] = set()
        self._is_tracing = True  # in the first micro batch, which has no prefetching
        # Parameters to release by submodule and step; computed at the first call and then cached, as in DeepSpeed.
        self._release_cache: dict[tuple[int, int], frozenset[int]] = {}

    def step(self, num_micro_batches: int) -> Iterator[list[Transfer]]:
        """Yield the transfers of each micro batch of an optimizer step."""
        for _ in range(num_micro_batches):
            transfers = list(self._micro_batch())
            self._is_tracing = False
            yield transfers
        self._available = set(self._persistent)  # the step partitions all parameters, then gathers these again

    def _micro_batch(self) -> Iterator[Transfer]:
        trace = [] if self._is_tracing else self._fetches
        self._queue = deque((index, step) for step, call in enumerate(trace) for index in sorted(call.parameters))
        # Latest step of the trace for which each parameter was gathered.
        self._last_fetch = dict.fromkeys(range(len(self._sizes)), _NEVER)
        self._in_flight: set[int] = set()
        self._step = 0
        gradients: list[int] = []
        for call in self._hook_calls:
            if call.kind == "fetch":
                yield from self._fetch(call)
            elif call.kind == "release":
                self._release(call)
            else:
                if gradients and self._num_elements({*gradients, *call.parameters}) > self._bucket:
                    yield Transfer(kind="reduce", parameters=tuple(sorted(gradients)))
                    gradients = []
                gradients += call.parameters
        yield Transfer(kind="reduce", parameters=tuple(sorted(gradients)))
        for index in self._in_flight:  # prefetched and never used
            self._release_if_unused(index)
        for index, submodules in self._active.items():  # no release hook runs if their inputs need no gradient
            if submodules:
                submodules.clear()
                self._available -= {index} - self._persistent

    def _fetch(self, call: HookCall) -> Iterator[Transfer]:
        missing = set(call.parameters) - self._available
        if missing:
            self._available |= missing
            yield Transfer(kind="gather", parameters=tuple(sorted(missing)))
        self._in_flight.difference_update(call.parameters)
        for index in call.parameters:
            self._active[index].add(call.submodule)
        if not self._is_tracing and (prefetched := self._prefetch(call)):
            self._available |= prefetched
            self._in_flight |= prefetched
            yield Transfer(kind="gather", parameters=tuple(sorted(prefetched)))
        self._step += 1

    def _prefetch(self, call: HookCall) -> set[int]:
        expected = {index for index in call.parameters if self._last_fetch[index] < self._step}
        dequeued: set[int] = set()
        while self._queue and len(dequeued) < len(expected):
            index, step = self._queue.popleft()
            self._last_fetch[index] = step
            dequeued.add(index)
        assert dequeued == expected, "the fetches of these hook calls are not in the order of the trace"
        prefetched: set[int] = set()
        while self._queue and self._num_elements(prefetched) < self._prefetched:
            index, step = self._queue.popleft()
            self._last_fetch[index] = max(self._last_fetch[index], step)
            if index not in self._available:
                prefetched.add(index)
        return prefetched

    def _release(self, call: HookCall) -> None:
        if self._is_tracing:
            to_release = frozenset(call.parameters)
        else:
            key = call.submodule, self._step
            if key not in self._release_cache:
                self._release_cache[key] = self._releasable(call)
            to_release = self._release_cache[key]
        for index in call.parameters:
            self._active[index].discard(call.submodule)
            if index in to_release and index not in self._in_flight:
                self._release_if_unused(index)

    def _releasable(self, call: HookCall) -> frozenset[int]:
        """Parameters that are not persistent, not skipped by the prefetch, and not reused within the reuse distance."""
        to_release = set(call.parameters) - self._persistent
        to_release -= {index for index in to_release if self._last_fetch[index] > self._step}
        distance = 0
        for later in self._fetches[self._step :]:
            if distance >= self._max_reuse_distance:
                break
            to_release.difference_update(later.parameters)
            distance += self._num_elements(later.parameters)
        return frozenset(to_release)

    def _num_elements(self, parameters: Iterable[int]) -> int:
        return sum(self._sizes[index] for index in parameters)

    def _release_if_unused(self, index: int) -> None:
        if not self._active[index]:
            self._available.discard(index)


def planned_transfers(
    hook_calls: Sequence[HookCall],
    sizes: Sequence[int],
    *,
    persistent: frozenset[int],
    bucket: int,
    num_micro_batches: Sequence[int],
    prefetched: int | None = None,
    max_reuse_distance: int = 10**9,
) -> list[list[list[Transfer]]]:
    """Plan the transfers of each optimizer step and micro batch, in order.

    Args:
        hook_calls: the hook calls of one micro batch, in order.
        sizes: number of elements of each parameter.
        persistent: parameters small enough to stay gathered.
        bucket: maximum number of elements to reduce together.
        num_micro_batches: number of micro batches of each step, starting with the first step of the run.
        prefetched: minimum number of elements to prefetch; None: a bucket.
        max_reuse_distance: parameters reused within this number of elements are not released.
    """
    coordinator = _Coordinator(
        hook_calls,
        sizes,
        persistent=persistent,
        bucket=bucket,
        prefetched=bucket if prefetched is None else prefetched,
        max_reuse_distance=max_reuse_distance,
    )
    return [list(coordinator.step(number)) for number in num_micro_batches]
