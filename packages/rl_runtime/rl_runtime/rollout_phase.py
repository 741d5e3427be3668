"""From prompts to scored samples: asks the servers, rewards what comes while the rest is generated, keeps what counts.

The phase runs an event loop of its own in the caller's thread, so that generation, the user's rollout function and
scoring go on side by side.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from rollout_vllm import (
    Episode,
    EpisodeGroup,
    EpisodeResult,
    GroupResult,
    Request,
    RolloutClient,
    Sample,
    SamplingConfig,
    request_seed,
    run_episodes,
)

from .config import EpisodeConfig
from .errors import RolloutFailed
from .experience import Experience, ExperienceBatch, PromptLike
from .functions import load_function
from .rollout_meter import RolloutMeter
from .scoring import Scorer

Phase = Callable[[str], AbstractContextManager[Any]]
RolloutFunction = Callable[[Episode, PromptLike, Any], Awaitable[None]]


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


class RolloutPhase:
    """Generation and scoring of one step. `seed`, the step and the prompt's place decide every request's seed.

    To be closed, or used as a context.

    Raises:
        InputError: `episode.function` is no such function.
    """

    def __init__(
        self, client: RolloutClient, tokenizer: Any, *, scorer: Scorer, seed: int, episode: EpisodeConfig | None = None
    ) -> None:
        self._client, self._tokenizer, self._scorer, self._seed = client, tokenizer, scorer, seed
        self._episode = episode or EpisodeConfig()
        self._function = load_rollout(self._episode.function) if self._episode.function is not None else None
        self._meter = RolloutMeter(client)
        self._runner = asyncio.Runner()

    def collect(
        self, prompts: Sequence[PromptLike], sampling: SamplingConfig, *, step: int, phase: Phase | None = None
    ) -> Collected:
        """Generates and scores `sampling.n` samples of every prompt.

        A sample that could not be generated or scored is left out, never scored as zero; a prompt left with fewer than
        two samples (when more were asked for) is left out whole, since its group has nothing to compare.

        Raises:
            RolloutFailed: nothing was left to train on; gives the first reason.
        """
        phase = phase or (lambda _: nullcontext())
        with phase("gen"):
            scoring, metrics = self._runner.run(self._generate(prompts, sampling, step))
        with phase("reward"):  # what generation did not hide
            items, reasons = self._runner.run(_finish(scoring, min_samples=min(2, sampling.n)))
        num_failed = len(prompts) * sampling.n - len(items)
        if not items:
            raise RolloutFailed(f"step {step}: none of {num_failed} samples could be had: {reasons[0]}")
        reason = reasons[0] if reasons else ""
        return Collected(
            batch=ExperienceBatch(items=tuple(items)), num_failed=num_failed, reason=reason, metrics=metrics
        )

    def validate(self, prompts: Sequence[PromptLike], sampling: SamplingConfig, *, step: int) -> Validation:
        """Scores held-out prompts; accuracy is the share of samples with the full score."""
        scoring, _ = self._runner.run(self._generate(prompts, sampling, -1 - step))
        items, reasons = self._runner.run(_finish(scoring, min_samples=1))
        if not items:
            raise RolloutFailed(f"validation after step {step}: no sample could be had: {reasons[0]}")
        scores = np.array([item.score for item in items])
        return Validation(
            accuracy=float(np.mean(scores >= self._scorer.full_score)),
            score_mean=float(scores.mean()),
            num_samples=len(items),
            num_failed=len(prompts) * sampling.n - len(items),
        )

    def close(self) -> None:
        """Gives up what is still asked for and closes the connections."""
        self._runner.run(self._end())
        self._runner.close()

    def __enter__(self) -> "RolloutPhase":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def _generate(
        self, prompts: Sequence[PromptLike], sampling: SamplingConfig, step: int
    ) -> tuple[list[asyncio.Task[_Scored]], dict[str, float]]:
        """The scoring of every group, begun when the group was complete, and the meter's reading."""
        requests = [
            Request(
                prompt_id=f"{place}:{prompt.id}",
                prompt_ids=list(prompt.token_ids),
                seed=request_seed(self._seed, step, f"{place}:{prompt.id}"),
            )
            for place, prompt in enumerate(prompts)
        ]
        place_of = {request.prompt_id: place for place, request in enumerate(requests)}
        scoring: dict[int, asyncio.Task[_Scored]] = {}

        def on_group(group: GroupResult | EpisodeGroup) -> None:
            place = place_of[group.prompt_id]
            scoring[place] = asyncio.create_task(self._score(place, prompts[place], group))

        started = time.perf_counter()
        if self._function is None:
            await self._client.generate(requests, sampling, on_group=on_group)
        else:
            function = self._function

            async def run(episode: Episode) -> None:
                await function(episode, prompts[place_of[episode.prompt_id]], self._tokenizer)

            await run_episodes(
                self._client, requests, run, sampling, on_group=on_group, episode_timeout_s=self._episode.timeout_s
            )
        metrics = await self._meter.read(time.perf_counter() - started)
        return [scoring[place] for place in range(len(prompts))], metrics

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
            version_spans=_version_spans(sample),
            num_turns=sample.num_turns if isinstance(sample, EpisodeResult) else 1,
            score=float("nan"),
        )

    async def _end(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await self._client.aclose()


def load_rollout(name: str) -> RolloutFunction:
    """The coroutine function that `episode.function` names.

    Raises:
        InputError: there is none that can be called so.
    """
    return load_function(name, key="episode.function", arguments=("episode", "prompt", "tokenizer"), is_coroutine=True)


async def _finish(scoring: Sequence[asyncio.Task[_Scored]], *, min_samples: int) -> tuple[list[Experience], list[str]]:
    """The scored samples of all groups that kept enough of them, and why others are missing."""
    groups = await asyncio.gather(*scoring)
    items = [item for group in groups if len(group.items) >= min_samples for item in group.items]
    return items, [reason for group in groups for reason in group.reasons]


def _version_spans(sample: Sample | EpisodeResult) -> tuple[tuple[int, int], ...]:
    """(policy version, number of tokens) over the generated tokens."""
    if isinstance(sample, Sample):
        return ((sample.policy_version, len(sample.response_ids)),)
    return ((min(sample.policy_versions), sum(sample.response_mask)),)
