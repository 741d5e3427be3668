"""Ends scoring by a function or service that hangs, so that it cannot stall a run for hours."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from rollout_vllm import RewardOutcome, Sample

_CALLS_WITHOUT_ANSWER, _ROUNDS_WITHOUT_ANSWER = 4, 2
_CALLS_AFTER_AN_ANSWER, _ROUNDS_AFTER_AN_ANSWER = 16, 4
"""Timeouts in a row after which scoring is given up: so many, and so many for each call that is made at a time."""


Call = Callable[[Sequence[Sample]], Awaitable[Sequence[RewardOutcome]]]
"""Scores some samples of a group: one outcome for each."""


class HangGuard:
    """Makes the calls of one function or service, counts its timeouts in a row, and gives up where they do not end."""

    def __init__(
        self,
        call: Call,
        source: str,
        *,
        whole_groups: bool,
        at_once: int,
        timeout_s: float,
        report: Callable[[str], None],
    ) -> None:
        """
        Args:
            source: the configuration key and its value, for messages.
            whole_groups: call it once with all samples of a group; else once for each sample.
            at_once: number of calls that are made at the same time. After so many timeouts in a row `report` gets a
                line.
        """
        self._call, self._source, self._whole_groups = call, source, whole_groups
        self._at_once, self._timeout_s, self._report = at_once, timeout_s, report
        self._num_timeouts, self._has_answered = 0, False
        self._calls: set[asyncio.Future[Sequence[RewardOutcome]]] = set()
        self.gave_up = ""
        """Why no call is made any more; empty while calls are made."""

    async def score(self, samples: Sequence[Sample]) -> Sequence[RewardOutcome]:
        """One outcome for each sample of a group."""
        calls = [samples] if self._whole_groups and samples else [[sample] for sample in samples]
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
        """Counts a call; reports timeouts in a row, and gives up where they do not end."""
        if outcome.kind != "timeout":
            self._num_timeouts, self._has_answered = 0, self._has_answered or outcome.kind == "ok"
            return
        self._num_timeouts += 1
        limit = max(_CALLS_WITHOUT_ANSWER, _ROUNDS_WITHOUT_ANSWER * self._at_once)
        if self._has_answered:
            limit = max(_CALLS_AFTER_AN_ANSWER, _ROUNDS_AFTER_AN_ANSWER * self._at_once)
        hangs = (
            f"{self._source} hangs: its last {self._num_timeouts} calls took longer than "
            f"reward.timeout_s={self._timeout_s:g}"
        )
        if self._num_timeouts == self._at_once:
            self._report(f"warning: {hangs}; the run ends after {limit} such calls in a row")
        elif self._num_timeouts >= limit and not self.gave_up:
            self.gave_up = f"{hangs}; fix it, raise reward.timeout_s, or score more at a time (reward.num_workers)"
            for call in self._calls:
                call.cancel()
