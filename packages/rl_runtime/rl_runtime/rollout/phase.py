"""The rollout phase of a step: generates responses, scores them, and leaves failed samples out of the batch.

Generation, the user's rollout function and scoring run concurrently in the client's event loop.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, SupportsFloat

from rollout_vllm import (
    ChatFormat,
    Episode,
    EpisodeGroup,
    EpisodeRuns,
    GroupResult,
    PartialGroup,
    Request,
    RolloutClient,
    SamplingConfig,
    request_seed,
)
from rollout_vllm.client.group_run import fresh_group
from rollout_vllm.client.transport import gather_or_cancel

from ..errors import InputError, RolloutFailed
from ..experience import Experience, ExperienceBatch, Phase, PromptLike
from .config import EpisodeConfig, OversamplingConfig
from .episodes import episode_player
from .groups import Collected, Finish, GroupScorer, ScoredGroup, largest, with_baseline, with_final_scores
from .meter import RolloutMeter
from .partial_rollouts import PartialRollout
from .scoring import Scorer
from .validation import PromptResult, Validation, prompt_result

MorePrompts = Callable[[Sequence[Experience]], Sequence[PromptLike]]
"""All scored samples of a step so far -> the prompts of its next round of generation, none to end."""


@dataclass(frozen=True, kw_only=True)
class _Round:
    """A round of generation: its scored samples, its requested groups, and the seconds of generation."""

    items: list[Experience]
    ended: list[ScoredGroup]
    num_groups: int
    gen_s: float

    @property
    def num_failed(self) -> int:
        """Samples of the ended groups that are not in the batch."""
        return sum(group.num_samples for group in self.ended) - len(self.items)


class RolloutPhase:
    """Generates and scores the samples of a step. The seed of a request depends on `seed`, the step and the prompt.

    With `greedy_baseline`, each prompt of a step gets one more response at temperature 0. It is generated and scored at
    the same time as the others, and its score is their `baseline_score` (ReMax).

    Raises:
        InputError: `episode.function` or `episode.environment` cannot be imported or called.
    """

    def __init__(
        self,
        client: RolloutClient,
        tokenizer: Any,
        *,
        scorer: Scorer,
        seed: int,
        episode: EpisodeConfig | None = None,
        chat: ChatFormat | None = None,
        oversampling: OversamplingConfig | None = None,
        greedy_baseline: bool = False,
    ) -> None:
        self._client, self._scorer, self._seed = client, scorer, seed
        self._group_scorer = GroupScorer(scorer, tokenizer)
        self._episode, self._oversampling = episode or EpisodeConfig(), oversampling or OversamplingConfig()
        self._play = episode_player(self._episode, tokenizer, chat)
        self._greedy_baseline = greedy_baseline
        self._meter = RolloutMeter(client)
        self._partial: list[PartialRollout] = []
        self._prompts: dict[str, PromptLike] = {}  # of episodes that run or are held
        self._training_episodes = self._episode_runs()

    def num_prompts(self, train_batch_size: int) -> int:
        """Number of new prompts for the next step, so that `train_batch_size` groups can complete."""
        return train_batch_size + self._oversampling.extra_prompts - len(self._partial)

    def collect(
        self,
        prompts: Sequence[PromptLike],
        sampling: SamplingConfig,
        *,
        step: int,
        phase: Phase | None = None,
        more: MorePrompts | None = None,
    ) -> Collected:
        """Generates and scores `sampling.n` samples of every prompt, and of the prompts that `more` adds.

        A sample that cannot be generated or scored is left out, never scored as zero. A group left with fewer than two
        samples (if `sampling.n` is larger) is left out as well, because it has nothing to compare; with a greedy
        baseline, so is a group whose greedy response failed.

        With over-sampling, the partial rollouts of earlier steps are requested before `prompts`, and the step does not
        wait for the last `extra_prompts` groups.

        Args:
            more: called with all scored samples after each round of generation; returns the prompts of the next round,
                none to end.

        Raises:
            RolloutFailed: no sample is left to train on (gives the first reason), or the reward hangs.
        """
        phase = phase or (lambda _: nullcontext())
        rounds: list[_Round] = []
        items: list[Experience] = []
        while prompts:
            rounds.append(self._round(prompts, sampling, step, phase, place=sum(r.num_groups for r in rounds)))
            items += rounds[-1].items
            prompts = more(items) if more is not None else ()
        ended = tuple(group for r in rounds for group in r.ended)
        reasons = [reason for group in ended for reason in group.reasons]
        num_failed = sum(r.num_failed for r in rounds)
        if not items:
            raise RolloutFailed(f"step {step}: none of {num_failed} samples was generated and scored: {reasons[0]}")
        with phase("gen"):
            metrics = self._client.run(self._meter.read(sum(r.gen_s for r in rounds)))
        if self._oversampling.extra_prompts:
            metrics["rollout/num_partial_groups"] = float(len(self._partial))
            metrics["rollout/num_partial_tokens"] = float(sum(partial.num_tokens for partial in self._partial))
        return Collected(
            batch=ExperienceBatch(items=tuple(items)),
            num_failed=num_failed,
            reason=reasons[0] if reasons else "",
            metrics=metrics,
            ended=ended,
        )

    def _round(
        self, prompts: Sequence[PromptLike], sampling: SamplingConfig, step: int, phase: Phase, *, place: int
    ) -> _Round:
        """Scored samples of `prompts` and of the partial rollouts; `place` is the number of the first group."""
        num_requested = len(prompts) + len(self._partial)
        num_groups = max(1, num_requested - self._oversampling.extra_prompts)
        with phase("gen"):
            started = time.perf_counter()
            scoring = self._client.run(self._generate(prompts, sampling, step, num_groups, place=place))
            gen_s = time.perf_counter() - started
        with phase("reward"):  # scoring that did not overlap with generation
            ended = self._client.run(_all(scoring))
        self.check_scorer(step)
        items = [
            item for group in largest(ended, self.min_samples(sampling), at_most=num_groups) for item in group.items
        ]
        return _Round(items=items, ended=ended, num_groups=num_requested, gen_s=gen_s)

    @property
    def is_resumable(self) -> bool:
        """Whether an unfinished group can be continued from its tokens alone."""
        return self._play is None and not self._greedy_baseline

    def min_samples(self, sampling: SamplingConfig) -> int:
        """Scored samples that a group needs so that they can be compared."""
        return 1 if self._greedy_baseline else min(2, sampling.n)

    def validate(
        self,
        prompts: Sequence[PromptLike],
        sampling: SamplingConfig,
        *,
        step: int,
        on_scored: Callable[[], None] = lambda: None,
        finish: Finish | None = None,
    ) -> Validation:
        """Samples and scores held-out prompts.

        Args:
            on_scored: called when the samples of a prompt are scored, in the client's thread.
            finish: completes the scores of all samples, in the thread of the caller.

        Raises:
            RolloutFailed: no sample could be generated and scored (gives the first reason), or the reward hangs.
        """
        scoring = self._client.run(self._generate(prompts, sampling, -1 - step, None, on_scored=on_scored))
        groups = self._client.run(_all(scoring))
        if finish is not None:
            groups = with_final_scores(groups, finish)
        results = self._client.run(self._results(prompts, groups, vote=sampling.n > 1))
        self._client.run(self._meter.read(1.0))  # so that the metrics of the next step exclude the validation
        self.check_scorer(step)
        validation = Validation(prompts=tuple(results), num_samples_per_prompt=sampling.n)
        if not validation.num_samples:
            raise RolloutFailed(
                f"validation after step {step}: no sample was generated and scored: {validation.failure}"
            )
        return validation

    async def _results(
        self, prompts: Sequence[PromptLike], groups: Sequence[ScoredGroup], *, vote: bool
    ) -> list[PromptResult]:
        async def one(prompt: PromptLike, scored: ScoredGroup) -> PromptResult:
            return prompt_result(
                prompt,
                scored.items,
                is_right=[self._scorer.is_full(item) for item in scored.items],
                votes=await self._scorer.votes(scored.items, by_episode=scored.by_episode) if vote else None,
                failures=scored.reasons,
            )

        return await asyncio.gather(*(one(prompt, group) for prompt, group in zip(prompts, groups, strict=True)))

    def check_scorer(self, step: int) -> None:
        """Raises RolloutFailed if the reward hangs."""
        if self._scorer.gave_up:
            raise RolloutFailed(f"step {step}: {self._scorer.gave_up}")

    def state_dict(self) -> dict[str, Any]:
        """The partial rollouts; JSON-able."""
        return {"partial_rollouts": [partial.to_state() for partial in self._partial]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the result of `state_dict`."""
        if "schedule" in state and state["groups"]:
            raise InputError(
                f"the checkpoint has {len(state['groups'])} groups that were drawn ahead of the trainer; resume it "
                "with trainer.max_staleness of 1 or more, or they would be lost"
            )
        groups = (
            [] if "schedule" in state else state["partial_rollouts" if "partial_rollouts" in state else "carried"]
        )  # "carried" in 0.1
        self._partial = [PartialRollout.from_state(group) for group in groups]

    async def _generate(
        self,
        prompts: Sequence[PromptLike],
        sampling: SamplingConfig,
        step: int,
        num_groups: int | None,
        *,
        place: int = 0,
        on_scored: Callable[[], None] = lambda: None,
    ) -> list[asyncio.Task[ScoredGroup]]:
        """Generates all groups; returns the scoring tasks of complete groups.

        Args:
            num_groups: number of complete groups that a training step waits for; None for held-out prompts.
            place: number of the first group, so that the groups of all rounds of a step have numbers of their own.
            on_scored: called when the samples of a group are scored.
        """
        requested: list[tuple[PromptLike, Request | PartialGroup]] = []
        if num_groups is not None:  # first, so that none of them waits indefinitely
            requested += [(rest.prompt, rest.group) for rest in self._partial]
        requested += [(prompt, self.request(prompt, step=step, number=n)) for n, prompt in enumerate(prompts, place)]
        prompt_of = {group.prompt_id: (number, prompt) for number, (prompt, group) in enumerate(requested, place)}
        scoring: dict[str, asyncio.Task[ScoredGroup]] = {}
        greedy: dict[str, asyncio.Task[ScoredGroup]] = {}

        def score_into(tasks: dict[str, asyncio.Task[ScoredGroup]]) -> Callable[[GroupResult | EpisodeGroup], None]:
            def on_group(group: GroupResult | EpisodeGroup) -> None:
                place, prompt = prompt_of[group.prompt_id]
                task = tasks[group.prompt_id] = asyncio.create_task(self._group_scorer.score(place, prompt, group))
                task.add_done_callback(lambda _: on_scored())

            return on_group

        requests = [group for _, group in requested]
        generation = [self._generate_groups(requests, sampling, num_groups, prompt_of, score_into(scoring))]
        if self._greedy_baseline and num_groups is not None:
            single = replace(sampling, n=1, temperature=0.0)
            generation.append(self._generate_groups(requests, single, None, prompt_of, score_into(greedy)))
        await gather_or_cancel(generation)
        held = {rest.group.prompt_id for rest in self._partial}
        for prompt_id in prompt_of.keys() - held:
            self._prompts.pop(prompt_id, None)
        for prompt_id, baseline in greedy.items():
            scoring[prompt_id] = asyncio.create_task(with_baseline(scoring[prompt_id], baseline))
        return [scoring[prompt_id] for prompt_id in prompt_of if prompt_id in scoring]

    async def _generate_groups(
        self,
        requests: Sequence[Request | PartialGroup],
        sampling: SamplingConfig,
        num_groups: int | None,
        prompt_of: Mapping[str, tuple[int, PromptLike]],
        on_group: Callable[[GroupResult | EpisodeGroup], None],
    ) -> None:
        """Generates the groups of `requests`; those that a step does not wait for become partial rollouts.

        Episodes that a step does not wait for are held in this process. In a checkpoint a held group is its request, so
        that a run that resumes from it starts its episodes again.
        """
        keep = num_groups is not None and self._oversampling.extra_prompts > 0 and self._oversampling.partial_rollouts
        if self._play is not None:
            whole = [request if isinstance(request, Request) else request.request for request in requests]
            self._prompts |= {prompt_id: prompt for prompt_id, (_, prompt) in prompt_of.items()}
            runs, wanted = self._training_episodes, num_groups
            if wanted is None:
                runs, wanted = self._episode_runs(), len(whole)
            groups = await runs.first(whole, sampling, num_groups=wanted, keep_rest=keep, on_group=on_group)
            ended = {group.prompt_id for group in groups}
            if keep:
                self._partial = [
                    PartialRollout(prompt=self._prompts[request.prompt_id], group=fresh_group(request, sampling.n))
                    for request in whole
                    if request.prompt_id not in ended
                ]
        elif num_groups is not None and num_groups < len(requests):
            first = await self._client.generate_first(
                requests, sampling, num_groups=num_groups, keep_rest=keep, on_group=on_group
            )
            self._partial = [PartialRollout(prompt=prompt_of[rest.prompt_id][1], group=rest) for rest in first.rest]
        else:
            await self._client.generate(requests, sampling, on_group=on_group)

    def request(self, prompt: PromptLike, *, step: int, number: int) -> Request:
        """The request for group `number` of those that were drawn for `step`."""
        return Request(
            prompt_id=f"{step}/{number}:{prompt.id}",
            prompt_ids=list(prompt.token_ids),
            seed=request_seed(self._seed, step, f"{number}:{prompt.id}"),
        )

    async def play(self, prompt: PromptLike, start: Request | PartialGroup, sampling: SamplingConfig) -> ScoredGroup:
        """Generates and scores one group, independently of steps; its samples have `group_id` 0."""

        async def one(sampling: SamplingConfig) -> ScoredGroup:
            ended: list[GroupResult | EpisodeGroup] = []
            if self._play is None:
                await self._client.generate([start], sampling, on_group=ended.append)
            else:
                self._prompts[start.prompt_id] = prompt
                await self._training_episodes.first(
                    [start if isinstance(start, Request) else start.request],
                    sampling,
                    num_groups=1,
                    keep_rest=False,
                    on_group=ended.append,
                )
            return await self._group_scorer.score(0, prompt, ended[0])

        try:
            if not self._greedy_baseline:
                return await one(sampling)
            single = replace(sampling, n=1, temperature=0.0)
            async with asyncio.TaskGroup() as both:
                scoring, greedy = both.create_task(one(sampling)), both.create_task(one(single))
            return await with_baseline(scoring, greedy)
        finally:
            self._prompts.pop(start.prompt_id, None)

    def _episode_runs(self) -> EpisodeRuns:
        async def play(episode: Episode) -> SupportsFloat | None:
            assert self._play is not None
            return await self._play(episode, self._prompts[episode.prompt_id])

        return EpisodeRuns(
            self._client,
            play,
            episode_timeout_s=self._episode.timeout_s,
            max_concurrent=self._episode.max_environments if self._episode.environment is not None else None,
        )


async def _all(scoring: Sequence[Awaitable[ScoredGroup]]) -> list[ScoredGroup]:
    return await asyncio.gather(*scoring)
