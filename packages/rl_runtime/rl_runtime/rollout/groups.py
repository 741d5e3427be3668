"""Groups of scored samples: from what the client or an episode generated to what a step trains on."""

import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from rollout_vllm import EpisodeGroup, EpisodeResult, GroupResult, Sample, token_versions
from rollout_vllm.samples import merge_spans

from ..experience import Experience, ExperienceBatch, PromptLike, with_token_ids
from .scoring import Scorer

Finish = Callable[[Sequence[Experience]], list[Experience]]
"""Completes the scores of samples, in their order."""


@dataclass(frozen=True, kw_only=True)
class ScoredGroup:
    """The scored samples of a group, and the reasons why others have no score."""

    key: str
    """Name of the group in the run."""
    num_samples: int
    """Samples that were asked for."""
    items: list[Experience]
    reasons: list[str] = field(default_factory=list)
    is_stale: bool = False
    """Whether it was given up because it was too old."""
    by_episode: bool = False
    """An episode scored itself: what it answered is not for a reward to extract."""


@dataclass(frozen=True, kw_only=True)
class Collected:
    """The train batch of a step and the number of samples left out of it."""

    batch: ExperienceBatch
    dropped: ExperienceBatch = field(default_factory=lambda: ExperienceBatch(items=()))
    """Scored samples that are not trained on, because dynamic sampling dropped their group."""
    num_failed: int
    reason: str = ""
    """Why the first of these samples was left out."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Metrics of the rollout: of the servers, the client, and dynamic sampling."""
    note: str = ""
    """A line for the log, if the batch has fewer groups than asked for."""
    ended: tuple[ScoredGroup, ...] = ()
    """Every group that ended in this step, those that are not in the batch too."""

    @property
    def scored(self) -> ExperienceBatch:
        """All scored samples of the step; their mean score is that of the policy, also with dynamic sampling."""
        return ExperienceBatch(items=self.batch.items + self.dropped.items)


class GroupScorer:
    """Makes scored samples of a generated group. A sample without a score is left out, with the reason."""

    def __init__(self, scorer: Scorer, tokenizer: Any) -> None:
        self._scorer, self._tokenizer = scorer, tokenizer

    async def score(self, place: int, prompt: PromptLike, group: GroupResult | EpisodeGroup) -> ScoredGroup:
        """The samples of a group with their scores; `place` becomes their `group_id`."""
        samples = group.samples if isinstance(group, GroupResult) else group.results
        drafts = [self._draft(place, prompt, sample) for sample in samples]
        scores = await self._scorer.score(drafts)
        return ScoredGroup(
            key=group.prompt_id,
            num_samples=len(samples) + len(group.failures),
            items=[
                replace(draft, score=found.score, reward_terms=found.terms)
                for draft, found in zip(drafts, scores, strict=True)
                if found.score is not None
            ],
            reasons=[failure.message for failure in group.failures]
            + [f"no reward: {found.message}" for found in scores if found.score is None],
            by_episode=not all(math.isnan(draft.score) for draft in drafts),
        )

    def _draft(self, place: int, prompt: PromptLike, sample: Sample | EpisodeResult) -> Experience:
        """The sample with the score that its episode gave itself, else NaN."""
        episode = sample if isinstance(sample, EpisodeResult) else None
        mask = np.array(sample.response_mask) if isinstance(sample, EpisodeResult) else None
        log_probs = None if sample.log_probs is None else np.asarray(sample.log_probs, dtype=np.float32)
        return Experience(
            prompt=prompt if episode is None else with_token_ids(prompt, episode.prompt_ids),
            group_id=place,
            group_key=sample.prompt_id,
            sample_index=sample.sample_index,
            response_ids=tuple(sample.response_ids),
            response_text=self._tokenizer.decode(sample.response_ids, skip_special_tokens=True),
            response_mask=None if mask is None or mask.all() else mask,
            rollout_log_probs=log_probs if mask is None or log_probs is None else log_probs[mask],
            finish_reason=sample.finish_reason,
            version_spans=_generated_spans(sample),
            num_turns=1 if episode is None else episode.num_turns,
            score=math.nan if episode is None or episode.score is None else episode.score,
            turn_rewards=None
            if episode is None or episode.turn_rewards is None
            else np.asarray(episode.turn_rewards, dtype=np.float32),
        )


def largest(groups: Sequence[ScoredGroup], min_samples: int, *, at_most: int) -> list[ScoredGroup]:
    """The `at_most` groups with the most scored samples, in order, of those with at least `min_samples`."""
    enough = [group for group in groups if len(group.items) >= min_samples]
    fullest = sorted(sorted(range(len(enough)), key=lambda i: -len(enough[i].items))[:at_most])
    return [enough[i] for i in fullest]


async def with_baseline(scoring: Awaitable[ScoredGroup], greedy: Awaitable[ScoredGroup]) -> ScoredGroup:
    """The samples of a group with the score of its greedy response; none if that failed."""
    scored, baseline = await scoring, await greedy
    if not baseline.items:
        reasons = [f"no greedy response: {reason}" for reason in baseline.reasons]
        return replace(scored, items=[], reasons=scored.reasons + reasons)
    score = baseline.items[0].score
    return replace(scored, items=[replace(item, baseline_score=score) for item in scored.items])


def with_final_scores(groups: Sequence[ScoredGroup], finish: Finish) -> list[ScoredGroup]:
    """The groups with the final scores of their samples, which are computed together."""
    items = iter(finish([item for group in groups for item in group.items]))
    return [replace(group, items=[next(items) for _ in group.items]) for group in groups]


def _generated_spans(sample: Sample | EpisodeResult) -> tuple[tuple[int, int], ...]:
    """(policy version, number of consecutive tokens) over the generated tokens."""
    if isinstance(sample, Sample):
        return merge_spans(sample.version_spans)
    tokens = zip(token_versions(sample.version_spans), sample.response_mask, strict=True)
    return merge_spans((version, 1) for version, own in tokens if own)
