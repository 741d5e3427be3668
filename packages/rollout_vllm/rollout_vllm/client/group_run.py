"""Generation of one group of samples, from the start or resumed from a partial rollout.

A response that was interrupted (finish reason "abort") is resumed by a new request whose prompt is the original prompt
followed by all tokens generated so far. Each token keeps the log-prob and the policy version it was sampled with.
"""

import asyncio
import dataclasses
import time
from collections.abc import Sequence

import numpy as np

from ..config import SamplingConfig
from ..samples import Failure, FailureKind, Group, Request, Sample, id_list, merge_spans, request_seed
from .protocol import Choice
from .request_runner import RequestFailure, RequestRunner


def extend(part: Sample, choice: Choice, sampling: SamplingConfig, *, version: int, last_version: int) -> Sample:
    """Append a choice's tokens to `part`. The result is finished unless the choice was interrupted.

    version: the client's policy version when the request was sent; last_version: when the response arrived. The
    versions that the server noted for the tokens take precedence.
    """
    spans = choice.spans or ((version, len(choice.response_ids)),)
    noted = [(version if own is None else own, count) for own, count in spans]
    ids = np.concatenate([part.response_ids, choice.response_ids])
    log_probs = None
    if part.log_probs is not None and choice.log_probs is not None:
        log_probs = np.concatenate([part.log_probs, choice.log_probs])
    reason = None if choice.finish_reason == "abort" else choice.finish_reason
    if reason is None and len(ids) >= sampling.response_tokens:
        reason = "length"  # interrupted after its last token
    return part.changed(
        response_ids=ids.astype(np.int32, copy=False),
        log_probs=None if log_probs is None else log_probs.astype(np.float32, copy=False),
        routes=part.routes if choice.routes is None else choice.routes,
        version_spans=merge_spans([*part.version_spans, *noted]),
        finish_reason=reason,
        last_policy_version=max([last_version, *(version for version, _ in noted)]),
    )


def remaining(part: Sample, sampling: SamplingConfig) -> SamplingConfig:
    """The sampling settings of the request that resumes `part`."""
    done = len(part.response_ids)
    max_tokens = sampling.response_tokens - done
    return dataclasses.replace(sampling, n=1, max_tokens=max_tokens, min_tokens=max(0, sampling.min_tokens - done))


def seed_of(request: Request, part: Sample) -> int | None:
    """The seed of the request that resumes `part`; it differs after every interruption.

    With the same seed, later tokens would be sampled with the random numbers of the first ones.
    """
    if request.seed is None:
        return None
    own = request.seed + part.sample_index
    return own if not part.response_ids.size else request_seed(own, len(part.response_ids), "go on")


class GroupRun:
    """Generates every sample of a group.

    A fresh group is one request for all its samples; interrupted samples are resumed with one request each. Cancelling
    `run` loses only the responses in flight: see `partial`.
    """

    def __init__(
        self,
        start: Group,
        sampling: SamplingConfig,
        runner: RequestRunner,
        urls: Sequence[str],
        max_len: int | None,
    ) -> None:
        self.request = start.request
        self.parts = list(start.samples)
        self.stopping = False  # set before an interruption, so that interrupted responses are not resumed
        self._failures: dict[int, Failure] = {}
        self._sampling, self._runner, self._urls, self._max_len = sampling, runner, urls, max_len

    async def run(self) -> None:
        unfinished = self._unfinished(range(len(self.parts)))
        wanted = len(self.request.prompt_ids) + self._sampling.response_tokens
        if unfinished and self._max_len is not None and wanted > self._max_len:
            sizes = f"prompt of {len(self.request.prompt_ids)} + max_tokens {self._sampling.response_tokens}"
            self._fail(unfinished, "too_long", f"{sizes} > max_model_len {self._max_len}", 0)
            return
        await self._generate(unfinished)

    async def _generate(self, indices: list[int]) -> None:
        """Finish or fail all of `indices`: one request for a fresh group, else one request per sample."""
        while indices and not self.stopping:
            whole = len(indices) == len(self.parts) and not any(self.parts[i].response_ids.size for i in indices)
            if not whole and len(indices) > 1:
                await asyncio.gather(*(self._generate([index]) for index in indices))
                return
            await self._send(indices, whole)
            indices = self._unfinished(indices)

    async def _send(self, indices: list[int], whole: bool) -> None:
        """One request for all samples of a fresh group if `whole`, else for the rest of the one sample of `indices`."""
        started, request, part = time.monotonic(), self.request, self.parts[indices[0]]
        prompt_ids, sampling, seed = id_list(request.prompt_ids), self._sampling, request.seed
        if not whole:
            prompt_ids, sampling = prompt_ids + part.response_ids.tolist(), remaining(part, sampling)
            seed = seed_of(request, part)
        outcome, num_attempts = await self._runner.run(self, prompt_ids, sampling, seed)
        duration_s = time.monotonic() - started
        if outcome is None:
            return
        if isinstance(outcome, RequestFailure):
            self._fail(indices, outcome.decision.kind, outcome.message, num_attempts)
            return
        for index, choice in zip(indices, outcome.choices, strict=True):
            before = self.parts[index]
            part = extend(
                before, choice, self._sampling, version=outcome.version, last_version=self._runner.policy_version
            )
            self.parts[index] = part.changed(
                num_attempts=before.num_attempts + num_attempts,
                server_url=self._urls[outcome.server],
                duration_s=before.duration_s + duration_s,
            )

    def _unfinished(self, indices: Sequence[int]) -> list[int]:
        return [i for i in indices if self.parts[i].finish_reason is None and i not in self._failures]

    def _fail(self, indices: Sequence[int], kind: FailureKind, message: str, num_attempts: int) -> None:
        for index in indices:
            self._failures[index] = Failure(
                prompt_id=self.request.prompt_id,
                sample_index=index,
                kind=kind,
                message=message,
                num_attempts=num_attempts,
            )

    @property
    def is_finished(self) -> bool:
        """True if every sample is complete or has failed."""
        return not self._unfinished(range(len(self.parts)))

    def result(self) -> Group:
        """The result, once `run` has returned."""
        return Group(
            request=self.request,
            samples=tuple(part for part in self.parts if part.sample_index not in self._failures),
            failures=tuple(self._failures[index] for index in sorted(self._failures)),
        )

    def partial(self) -> Group:
        """The samples so far. Failed samples are unfinished in it, so a later call retries them."""
        return Group(request=self.request, samples=tuple(self.parts))
