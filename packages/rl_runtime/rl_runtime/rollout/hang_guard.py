"""Ends scoring by a function or service that hangs, so that it cannot stall a run for hours."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from rollout_vllm import RewardOutcome, Sample

_CALLS, _ROUNDS = 8, 4
"""Timeouts in a row after which scoring is given up: so many, and so many for each call that is made at a time."""


Call = Callable[[Sequence[Sample]], Awaitable[Sequence[RewardOutcome]]]
"""Scores some samples of a group: one outcome for each."""


class HangGuard:
    """Makes the calls of one function or service, counts its timeouts in a row, and gives up where they do not end."""

    def __init__(
        self, call: Call, source: str, *, whole_groups: Callable[[Sample], bool], at_once: int, timeout_s: float
    ) -> None:
        """
        Args:
            source: the configuration key and its value, for messages.
            whole_groups: True if it is called once with all samples of this one's group; else once for each sample.
            at_once: number of calls that are made at the same time.
        """
        self._call, self._source, self._whole_groups, self._timeout_s = call, source, whole_groups, timeout_s
        self._limit, self._num_timeouts = max(_CALLS, _ROUNDS * at_once), 0
        self._calls: set[asyncio.Future[Sequence[RewardOutcome]]] = set()
        self.gave_up = ""
        """Reason why calls stopped; empty while they go on."""

    async def score(self, samples: Sequence[Sample]) -> Sequence[RewardOutcome]:
        """One outcome for each sample of a group."""
        calls = [samples] if samples and self._whole_groups(samples[0]) else [[sample] for sample in samples]
        parts = await asyncio.gather(*map(self._guarded, calls))
        return [outcome for part in parts for outcome in part]

    async def _guarded(self, samples: Sequence[Sample]) -> Sequence[RewardOutcome]:
        if self.gave_up:
            return self._refusals(samples)
        call = asyncio.ensure_future(self._call(samples))
        self._calls.add(call)
        try:
            outcomes = await call
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            return self._refusals(samples)
        finally:
            self._calls.discard(call)
        self.count(outcomes[0])
        return outcomes

    def _refusals(self, samples: Sequence[Sample]) -> Sequence[RewardOutcome]:
        return [RewardOutcome(None, "timeout", self.gave_up)] * len(samples)

    def count(self, outcome: RewardOutcome) -> None:
        """Counts a call; gives up where timeouts do not end, also on calls that still wait for a worker."""
        self._num_timeouts = self._num_timeouts + 1 if outcome.kind == "timeout" else 0
        if self._num_timeouts >= self._limit and not self.gave_up:
            self.gave_up = (
                f"{self._source} hangs: its last {self._num_timeouts} calls took longer than reward.timeout_s="
                f"{self._timeout_s:g}; fix it, raise reward.timeout_s, or score more at a time (reward.num_workers)"
            )
            for call in self._calls:
                call.cancel()
