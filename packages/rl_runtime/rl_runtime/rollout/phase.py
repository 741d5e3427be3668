"""From prompts to scored samples: asks the servers, rewards what comes while the rest is generated, keeps what counts.

Generation, the user's rollout function and scoring go on side by side in the client's event loop.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

import numpy as np

from rollout_vllm import (
    Episode,
    EpisodeGroup,
    EpisodeResult,
    GroupResult,
    PartialGroup,
    Request,
    RolloutClient,
    Sample,
    SamplingConfig,
    request_seed,
    run_episodes,
    token_versions,
)

from ..config import EpisodeConfig, OversamplingConfig
from ..errors import RolloutFailed
from ..experience import Experience, ExperienceBatch, PromptLike
from .partial_rollouts import PartialRollout
from .scoring import Scorer
from .user_functions import load_function

Phase = Callable[[str], AbstractContextManager[Any]]
RolloutFunction = Callable[[Episode, PromptLike, Any], Awaitable[None]]

_COUNTERS = {
    "rollout/num_preemptions": "num_preemptions",
    "rollout/num_retries": "client/num_retries",
}


@dataclass(frozen=True, kw_only=True)
class Collected:
    """The train batch of a step and what was left out of it."""

    batch: ExperienceBatch
    num_failed: int
    reason: str = ""
    """Why the first of those was left out."""
    metrics: dict[str, float] = field(default_factory=dict)
    """What servers and client did meanwhile."""


@dataclass(frozen=True, kw_only=True)
class Validation:
    """Scores on held-out prompts."""

    accuracy: float
    score_mean: float
    num_samples: int
    num_failed: int


@dataclass(frozen=True, kw_only=True)
class _Scored:
    """A group's samples with their scores, and why the others have none."""

    items: list[Experience]
    reasons: list[str]


class RolloutMeter:
    """Reads the counters after every rollout; what they gained since the last reading belongs to it.

    A server that was started again begins at zero: what it lost is not subtracted from the others' gain. Metrics that
    the servers do not serve are left out.
    """

    def __init__(self, client: RolloutClient) -> None:
        self._client = client
        self._last: dict[str, float] = {}

    async def read(self, gen_s: float) -> dict[str, float]:
        """The metrics of the rollout that took `gen_s` seconds and has just ended."""
        last, now = self._last, await self._client.fetch_metrics()
        self._last = now

        def gained(name: str) -> float:
            return max(0.0, now[name] - last.get(name, 0.0))

        metrics = {"rollout/tokens_per_s": gained("client/response_tokens") / gen_s}
        metrics |= {ours: gained(name) for ours, name in _COUNTERS.items() if name in now}
        metrics |= {f"rollout/{name}": now[name] for name in ("num_running", "num_waiting") if name in now}
        if queries := gained("prefix_cache_queries") if "prefix_cache_queries" in now else 0.0:
            metrics["rollout/prefix_cache_hit_rate"] = min(1.0, gained("prefix_cache_hits") / queries)
        return metrics


class RolloutPhase:
    """Generation and scoring of one step. `seed`, the step and the prompt's place decide every request's seed.

    Raises:
        InputError: `episode.function` is no such function.
    """

    def __init__(
        self,
        client: RolloutClient,
        tokenizer: Any,
        *,
        scorer: Scorer,
        seed: int,
        episode: EpisodeConfig | None = None,
        oversampling: OversamplingConfig | None = None,
    ) -> None:
        self._client, self._tokenizer, self._scorer, self._seed = client, tokenizer, scorer, seed
        self._episode, self._oversampling = episode or EpisodeConfig(), oversampling or OversamplingConfig()
        self._function = load_rollout(self._episode.function) if self._episode.function is not None else None
        self._meter = RolloutMeter(client)
        self._partial: list[PartialRollout] = []

    def num_prompts(self, train_batch_size: int) -> int:
        """How many prompts the next step wants, so that it can be done with the first `train_batch_size` groups."""
        return train_batch_size + self._oversampling.extra_prompts - len(self._partial)

    def collect(
        self,
        prompts: Sequence[PromptLike],
        sampling: SamplingConfig,
        *,
        step: int,
        phase: Phase | None = None,
    ) -> Collected:
        """Generates and scores `sampling.n` samples of every prompt.

        A sample that could not be generated or scored is left out, never scored as zero; a prompt left with fewer than
        two samples (when more were asked for) is left out whole, since its group has nothing to compare.

        With over-sampling, groups that earlier steps did not wait for come before `prompts`, and the last
        `extra_prompts` groups of them all are not waited for.

        Raises:
            RolloutFailed: nothing was left to train on; gives the first reason.
        """
        phase = phase or (lambda _: nullcontext())
        with phase("gen"):
            num_groups = max(1, len(prompts) + len(self._partial) - self._oversampling.extra_prompts)
            scoring, metrics = self._client.run(self._generate(prompts, sampling, step, num_groups))
        with phase("reward"):  # what generation did not hide
            items, reasons = self._client.run(_finish(scoring, min_samples=min(2, sampling.n), at_most=num_groups))
        num_failed = len(scoring) * sampling.n - len(items)
        if not items:
            raise RolloutFailed(f"step {step}: none of {num_failed} samples could be had: {reasons[0]}")
        reason = reasons[0] if reasons else ""
        return Collected(
            batch=ExperienceBatch(items=tuple(items)), num_failed=num_failed, reason=reason, metrics=metrics
        )

    def validate(self, prompts: Sequence[PromptLike], sampling: SamplingConfig, *, step: int) -> Validation:
        """Scores held-out prompts; accuracy is the share of samples with the full score."""
        scoring, _ = self._client.run(self._generate(prompts, sampling, -1 - step, None))
        items, reasons = self._client.run(_finish(scoring, min_samples=1, at_most=len(prompts)))
        if not items:
            raise RolloutFailed(f"validation after step {step}: no sample could be had: {reasons[0]}")
        scores = np.array([item.score for item in items])
        return Validation(
            accuracy=float(np.mean(scores >= self._scorer.full_score)),
            score_mean=float(scores.mean()),
            num_samples=len(items),
            num_failed=len(prompts) * sampling.n - len(items),
        )

    def state_dict(self) -> dict[str, Any]:
        """The groups that the next step goes on with; JSON-able."""
        return {"partial_rollouts": [partial.to_state() for partial in self._partial]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on with what `state_dict` gave."""
        groups = state["partial_rollouts" if "partial_rollouts" in state else "carried"]  # version 0.1
        self._partial = [PartialRollout.from_state(group) for group in groups]

    async def _generate(
        self, prompts: Sequence[PromptLike], sampling: SamplingConfig, step: int, num_groups: int | None
    ) -> tuple[list[asyncio.Task[_Scored]], dict[str, float]]:
        """The scoring of every group, begun when the group was complete, and the meter's reading.

        `num_groups`: how many complete groups a training step waits for; None for held-out prompts.
        """
        started = time.perf_counter()
        asked = self._ask(prompts, step, partial=self._partial if num_groups is not None else [])
        prompt_of = {group.prompt_id: (place, prompt) for place, (prompt, group) in enumerate(asked)}
        scoring: dict[str, asyncio.Task[_Scored]] = {}

        def on_group(group: GroupResult | EpisodeGroup) -> None:
            scoring[group.prompt_id] = asyncio.create_task(self._score(*prompt_of[group.prompt_id], group))

        requests = [group for _, group in asked]
        if self._function is not None:
            await self._run_episodes(requests, sampling, prompt_of, on_group)
        elif num_groups is not None and num_groups < len(requests):
            keep = self._oversampling.partial_rollouts
            first = await self._client.generate_first(
                requests, sampling, num_groups=num_groups, keep_rest=keep, on_group=on_group
            )
            self._partial = [PartialRollout(prompt=prompt_of[rest.prompt_id][1], group=rest) for rest in first.rest]
        else:
            await self._client.generate(requests, sampling, on_group=on_group)
        metrics = await self._meter.read(time.perf_counter() - started)
        if self._oversampling.extra_prompts:
            metrics["rollout/num_partial_groups"] = float(len(self._partial))
            metrics["rollout/num_partial_tokens"] = float(sum(partial.num_tokens for partial in self._partial))
        return [scoring[prompt_id] for prompt_id in prompt_of if prompt_id in scoring], metrics

    def _ask(
        self, prompts: Sequence[PromptLike], step: int, *, partial: Sequence[PartialRollout]
    ) -> list[tuple[PromptLike, Request | PartialGroup]]:
        """What is asked for: unfinished groups first, so that none of them waits for ever."""
        asked: list[tuple[PromptLike, Request | PartialGroup]] = [(item.prompt, item.group) for item in partial]
        for place, prompt in enumerate(prompts):
            request = Request(
                prompt_id=f"{step}/{place}:{prompt.id}",
                prompt_ids=list(prompt.token_ids),
                seed=request_seed(self._seed, step, f"{place}:{prompt.id}"),
            )
            asked.append((prompt, request))
        return asked

    async def _run_episodes(
        self,
        requests: Sequence[Request | PartialGroup],
        sampling: SamplingConfig,
        prompt_of: Mapping[str, tuple[int, PromptLike]],
        on_group: Callable[[EpisodeGroup], None],
    ) -> None:
        async def run(episode: Episode) -> None:
            assert self._function is not None
            await self._function(episode, prompt_of[episode.prompt_id][1], self._tokenizer)

        await run_episodes(
            self._client,
            [request for request in requests if isinstance(request, Request)],
            run,
            sampling,
            on_group=on_group,
            episode_timeout_s=self._episode.timeout_s,
        )

    async def _score(self, place: int, prompt: PromptLike, group: GroupResult | EpisodeGroup) -> _Scored:
        samples = group.samples if isinstance(group, GroupResult) else group.results
        drafts = [self._draft(place, prompt, sample) for sample in samples]
        outcomes = await asyncio.gather(*(self._scorer.score(draft.response_text, prompt) for draft in drafts))
        return _Scored(
            items=[replace(d, score=o.score) for d, o in zip(drafts, outcomes, strict=True) if o.score is not None],
            reasons=[failure.message for failure in group.failures]
            + [f"no reward: {outcome.message}" for outcome in outcomes if outcome.score is None],
        )

    def _draft(self, place: int, prompt: PromptLike, sample: Sample | EpisodeResult) -> Experience:
        """The sample, not scored yet."""
        mask = np.array(sample.response_mask) if isinstance(sample, EpisodeResult) else None
        log_probs = np.asarray(sample.log_probs, dtype=np.float32)
        return Experience(
            prompt=prompt,
            group_id=place,
            sample_index=sample.sample_index,
            response_ids=tuple(sample.response_ids),
            response_text=self._tokenizer.decode(sample.response_ids, skip_special_tokens=True),
            response_mask=None if mask is None or mask.all() else mask,
            rollout_log_probs=log_probs if mask is None else log_probs[mask],
            finish_reason=sample.finish_reason,
            version_spans=_generated_spans(sample),
            num_turns=sample.num_turns if isinstance(sample, EpisodeResult) else 1,
            score=float("nan"),
        )


def load_rollout(name: str) -> RolloutFunction:
    """The coroutine function that `episode.function` names.

    Raises:
        InputError: there is none that can be called so.
    """
    return load_function(name, key="episode.function", arguments=("episode", "prompt", "tokenizer"), is_coroutine=True)


async def _finish(
    scoring: Sequence[asyncio.Task[_Scored]], *, min_samples: int, at_most: int
) -> tuple[list[Experience], list[str]]:
    """The scored samples of `at_most` groups that kept enough of them, the fullest, and why others are missing."""
    groups = await asyncio.gather(*scoring)
    reasons = [reason for group in groups for reason in group.reasons]
    enough = [group.items for group in groups if len(group.items) >= min_samples]
    fullest = sorted(sorted(range(len(enough)), key=lambda i: -len(enough[i]))[:at_most])
    return [item for i in fullest for item in enough[i]], reasons


def _generated_spans(sample: Sample | EpisodeResult) -> tuple[tuple[int, int], ...]:
    """(policy version, number of tokens) over the generated tokens."""
    versions = token_versions(sample.version_spans)
    if isinstance(sample, EpisodeResult):
        versions = [version for version, own in zip(versions, sample.response_mask, strict=True) if own]
    return tuple((version, len(list(run))) for version, run in groupby(versions))
