"""One group on its way: which requests bring its samples, and what has come so far."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Sequence

from ..config import SamplingConfig
from ..samples import Failure, FailureKind, GroupResult, PartialGroup
from .attempts import Asker, Call, GivenUp
from .partial import extend, finished_sample, remaining, seed_of


class GroupRun:
    """Brings every sample of a group to an end, from nothing or from where it was cut off.

    A fresh group is one request for all its samples. What is cut short is gone on with, one request a sample.
    Cancelling `run` loses the answers under way and nothing else: see `partial`.
    """

    def __init__(
        self, start: PartialGroup, sampling: SamplingConfig, asker: Asker, urls: Sequence[str], max_len: int | None
    ) -> None:
        self.request = start.request
        self.parts = list(start.samples)
        self.stopping = False  # set before cutting it short: what comes back is not gone on with
        self._failures: dict[int, Failure] = {}
        self._sampling, self._asker, self._urls, self._max_len = sampling, asker, urls, max_len

    async def run(self) -> None:
        open_parts = self._unfinished(range(len(self.parts)))
        wanted = len(self.request.prompt_ids) + self._sampling.max_tokens
        if open_parts and self._max_len is not None and wanted > self._max_len:
            sizes = f"prompt of {len(self.request.prompt_ids)} + max_tokens {self._sampling.max_tokens}"
            self.fail(open_parts, "too_long", f"{sizes} > max_model_len {self._max_len}", 0)
            return
        await self._bring(open_parts)

    async def _bring(self, indices: list[int]) -> None:
        """All of `indices` finished or failed. One request for a whole fresh group, else one for each."""
        while indices and not self.stopping:
            whole = len(indices) == len(self.parts) and not any(self.parts[i].response_ids for i in indices)
            if not whole and len(indices) > 1:
                await asyncio.gather(*(self._bring([index]) for index in indices))
                return
            await self._ask(indices, whole)
            indices = self._unfinished(indices)

    async def _ask(self, indices: list[int], whole: bool) -> None:
        started = time.monotonic()
        outcome = await self._asker.ask(self._whole_call() if whole else self._call_for(indices[0]))
        duration_s = time.monotonic() - started
        if outcome is None:
            return
        if isinstance(outcome, GivenUp):
            self.fail(indices, outcome.kind, outcome.message, outcome.num_attempts)
            return
        for index, choice in zip(indices, outcome.choices, strict=True):
            before = self.parts[index]
            part = extend(
                before, choice, self._sampling, version=outcome.version, last_version=self._asker.policy_version
            )
            self.parts[index] = dataclasses.replace(
                part,
                num_attempts=before.num_attempts + outcome.num_attempts,
                server_url=self._urls[outcome.server],
                duration_s=before.duration_s + duration_s,
            )

    def _whole_call(self) -> Call:
        request = self.request
        return Call(
            group=request.prompt_id,
            owner=self,
            prompt_ids=request.prompt_ids,
            sampling=self._sampling,
            seed=request.seed,
        )

    def _call_for(self, index: int) -> Call:
        part = self.parts[index]
        return Call(
            group=self.request.prompt_id,
            owner=self,
            prompt_ids=[*self.request.prompt_ids, *part.response_ids],
            sampling=remaining(part, self._sampling),
            seed=seed_of(self.request, part),
        )

    def _unfinished(self, indices: Sequence[int]) -> list[int]:
        return [i for i in indices if self.parts[i].finish_reason is None and i not in self._failures]

    def fail(self, indices: Sequence[int], kind: FailureKind, message: str, num_attempts: int) -> None:
        for index in indices:
            self._failures[index] = Failure(
                prompt_id=self.request.prompt_id,
                sample_index=index,
                kind=kind,
                message=message,
                num_attempts=num_attempts,
            )

    def fail_unfinished(self, kind: FailureKind, message: str) -> None:
        for index in self._unfinished(range(len(self.parts))):
            self.fail([index], kind, message, max(1, self.parts[index].num_attempts))

    def result(self) -> GroupResult:
        """After the end of `run` or `fail_unfinished`."""
        samples = tuple(finished_sample(self.request, p) for p in self.parts if p.sample_index not in self._failures)
        return GroupResult(
            prompt_id=self.request.prompt_id,
            samples=samples,
            failures=tuple(self._failures[index] for index in sorted(self._failures)),
        )

    def partial(self) -> PartialGroup:
        """What has come so far; samples that failed are to be tried again."""
        return PartialGroup(request=self.request, samples=tuple(self.parts))
