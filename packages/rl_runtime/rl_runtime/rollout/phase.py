"""The rollout phase of a step: generates responses, scores them, and leaves failed samples out of the batch.

Generation, the user's rollout function and scoring run concurrently in the client's event loop.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, SupportsFloat

from rl_core import ExtraRollout
from rl_data import ImageFiles, Prompt
from rollout_vllm import (
    ChatFormat,
    Episode,
    EpisodeRuns,
    Group,
    Request,
    RolloutClient,
    Sample,
    SamplingConfig,
    request_seed,
)
from rollout_vllm.client.transport import gather_or_cancel

from ..errors import RolloutFailed
from ..samples import Phase
from .config import EpisodeConfig, OversamplingConfig
from .episodes import episode_player
from .groups import Collected, Finish, decoded, from_state, largest, to_state, with_baseline, with_final_scores
from .meter import RolloutMeter
from .scoring import Scorer
from .validation import PromptResult, Validation, prompt_result

MorePrompts = Callable[[Sequence[Sample]], Sequence[Prompt]]
"""All scored samples of a step so far -> the prompts of its next round of generation, none to end."""


class RolloutPhase:
    """Generates and scores the samples of a step. The seed of a request depends on `seed`, the step and the prompt.

    With an `extra_rollout`, each prompt of a step gets further responses, such as a greedy one (ReMax). They are
    generated and scored at the same time as the others, and their mean score is the others' `baseline_score`.

    Raises:
        InputError: `episode.function`, `episode.environment` or `episode.agent` cannot be imported or called.
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
        max_prompt_tokens: int | None = None,
        oversampling: OversamplingConfig | None = None,
        extra_rollout: ExtraRollout | None = None,
        images: ImageFiles | None = None,
    ) -> None:
        """`images`: the files of prompts with images."""
        self._images = images
        self._client, self._scorer, self._seed, self._tokenizer = client, scorer, seed, tokenizer
        self._episode, self._oversampling = episode or EpisodeConfig(), oversampling or OversamplingConfig()
        self._play = episode_player(self._episode, tokenizer, chat, max_prompt_tokens, images)
        self._extra_rollout = extra_rollout
        self._meter = RolloutMeter(client)
        self._partial: list[Group] = []
        self._training_episodes = self._episode_runs()

    def num_prompts(self, train_batch_size: int) -> int:
        """Number of new prompts for the next step, so that `train_batch_size` groups can complete."""
        return train_batch_size + self._oversampling.extra_prompts - len(self._partial)

    def collect(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingConfig,
        *,
        step: int,
        phase: Phase | None = None,
        more: MorePrompts | None = None,
    ) -> Collected:
        """Generates and scores `sampling.n` samples of every prompt, and of the prompts that `more` adds.

        A sample that cannot be generated or scored is left out, never scored as zero. A group left with fewer than two
        samples (if `sampling.n` is larger) is left out as well, because it has nothing to compare; with an extra
        rollout, so is a group whose extra responses failed.

        With over-sampling, the partial rollouts of earlier steps are requested before `prompts`, and the step does not
        wait for the last `extra_prompts` groups.

        Args:
            more: called with all scored samples after each round of generation; returns the prompts of the next round,
                none to end.

        Raises:
            RolloutFailed: no sample is left to train on (gives the first reason), or the reward hangs.
        """
        phase = phase or (lambda _: nullcontext())
        samples: list[Sample] = []
        ended: list[Group] = []
        num_requested, gen_s = 0, 0.0
        while prompts:
            self._make_images(prompts)
            new = [self.request(prompt, step=step, number=n) for n, prompt in enumerate(prompts, num_requested)]
            # Partial rollouts first, so that none of them waits indefinitely.
            requests: list[Request | Group] = [*self._partial, *new]
            num_requested += len(requests)
            num_groups = max(1, len(requests) - self._oversampling.extra_prompts)
            with phase("gen"):
                started = time.perf_counter()
                scoring = self._client.run(self._generate(requests, sampling, num_groups))
                gen_s += time.perf_counter() - started
            with phase("reward"):  # scoring that did not overlap with generation
                groups = self._client.run(_all(scoring))
            self.check_scorer(step)
            ended += groups
            chosen = largest(groups, self.min_samples(sampling), at_most=num_groups)
            samples += [sample for group in chosen for sample in group.samples]
            prompts = more(samples) if more is not None else ()
        reason = next((failure.message for group in ended for failure in group.failures), "")
        num_failed = sum(group.size for group in ended) - len(samples)
        if not samples:
            raise RolloutFailed(f"step {step}: none of {num_failed} samples was generated and scored: {reason}")
        metrics = {}
        if self._oversampling.extra_prompts:
            metrics["rollout/num_partial_groups"] = float(len(self._partial))
            metrics["rollout/num_partial_tokens"] = float(sum(group.num_tokens for group in self._partial))
        return Collected(
            samples=tuple(samples),
            num_failed=num_failed,
            reason=reason,
            metrics=metrics,
            reading=self._client.start(self._meter.read(gen_s)),
            ended=tuple(ended),
        )

    @property
    def is_resumable(self) -> bool:
        """True if an unfinished group can be continued from its tokens alone."""
        return self._play is None and self._extra_rollout is None

    def min_samples(self, sampling: SamplingConfig) -> int:
        """Scored samples that a group needs so that they can be compared."""
        return 1 if self._extra_rollout is not None else min(2, sampling.num_samples)

    def validate(
        self,
        prompts: Sequence[Prompt],
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
        self._make_images(prompts)
        requests = [self.request(prompt, step=-1 - step, number=n) for n, prompt in enumerate(prompts)]
        scoring = self._client.run(self._generate(requests, sampling, None, on_scored=on_scored))
        groups = self._client.run(_all(scoring))
        if finish is not None:
            groups = with_final_scores(groups, finish)
        results = self._client.run(self._results(prompts, groups, vote=sampling.num_samples > 1))
        self._client.run(self._meter.read(1.0))  # so that the metrics of the next step exclude the validation
        self.check_scorer(step)
        validation = Validation(prompts=tuple(results), num_samples_per_prompt=sampling.num_samples)
        if not validation.num_samples:
            raise RolloutFailed(
                f"validation after step {step}: no sample was generated and scored: {validation.failure}"
            )
        return validation

    async def _results(self, prompts: Sequence[Prompt], groups: Sequence[Group], *, vote: bool) -> list[PromptResult]:
        async def one(prompt: Prompt, group: Group) -> PromptResult:
            return prompt_result(
                prompt,
                group.samples,
                is_right=[self._scorer.is_full(sample) for sample in group.samples],
                votes=await self._scorer.votes(group.samples) if vote else None,
                failures=[failure.message for failure in group.failures],
            )

        return await asyncio.gather(*(one(prompt, group) for prompt, group in zip(prompts, groups, strict=True)))

    def check_scorer(self, step: int) -> None:
        """Raises RolloutFailed if the reward hangs."""
        if self._scorer.gave_up:
            raise RolloutFailed(f"step {step}: {self._scorer.gave_up}")

    def state_dict(self) -> dict[str, Any]:
        """The partial rollouts; JSON-able."""
        return {"partial_rollouts": list(map(to_state, self._partial))}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the result of `state_dict`, which `check_groups` has accepted."""
        self._partial = (
            [] if "schedule" in state else [self.with_images(from_state(one)) for one in state["partial_rollouts"]]
        )

    async def _generate(
        self,
        requests: Sequence[Request | Group],
        sampling: SamplingConfig,
        num_groups: int | None,
        *,
        on_scored: Callable[[], None] = lambda: None,
    ) -> list[asyncio.Task[Group]]:
        """Generates all groups; returns the scoring tasks of complete groups.

        Args:
            num_groups: number of complete groups that a training step waits for; None for held-out prompts.
            on_scored: called when the samples of a group are scored.
        """
        scoring: dict[str, asyncio.Task[Group]] = {}
        extra: dict[str, asyncio.Task[Group]] = {}

        def score_into(tasks: dict[str, asyncio.Task[Group]]) -> Callable[[Group], None]:
            def on_group(group: Group) -> None:
                task = tasks[group.prompt_id] = asyncio.create_task(self._scored(group))
                task.add_done_callback(lambda _: on_scored())

            return on_group

        generation = [self._generate_groups(requests, sampling, num_groups, score_into(scoring))]
        if self._extra_rollout is not None and num_groups is not None:
            extra_sampling = self._extra_sampling(sampling, self._extra_rollout)
            generation.append(self._generate_groups(requests, extra_sampling, None, score_into(extra)))
        await gather_or_cancel(generation)
        for prompt_id, baseline in extra.items():
            scoring[prompt_id] = asyncio.create_task(with_baseline(scoring[prompt_id], baseline))
        return [scoring[request.prompt_id] for request in requests if request.prompt_id in scoring]

    async def _scored(self, group: Group) -> Group:
        return await self._scorer.score(decoded(group, self._tokenizer))

    async def _generate_groups(
        self,
        requests: Sequence[Request | Group],
        sampling: SamplingConfig,
        num_groups: int | None,
        on_group: Callable[[Group], None],
    ) -> None:
        """Generates the groups of `requests`; those that a step does not wait for become partial rollouts.

        Episodes that a step does not wait for are held in this process. In a checkpoint a held group is its request, so
        that a run that resumes from it starts its episodes again.
        """
        keep = num_groups is not None and self._oversampling.extra_prompts > 0 and self._oversampling.partial_rollouts
        if self._play is not None:
            whole = list(map(_request_of, requests))
            runs, wanted = self._training_episodes, num_groups
            if wanted is None:
                runs, wanted = self._episode_runs(), len(whole)
            groups = await runs.first(whole, sampling, num_groups=wanted, keep_rest=keep, on_group=on_group)
            ended = {group.prompt_id for group in groups}
            if keep:
                self._partial = [Group.fresh(one, sampling.num_samples) for one in whole if one.prompt_id not in ended]
        elif num_groups is not None and num_groups < len(requests):
            _, self._partial = await self._client.generate_first(
                requests, sampling, num_groups=num_groups, keep_rest=keep, on_group=on_group
            )
        else:
            await self._client.generate(requests, sampling, on_group=on_group)

    def request(self, prompt: Prompt, *, step: int, number: int) -> Request:
        """The request for group `number` of those that were drawn for `step`."""
        return Request(
            prompt_id=f"{step}/{number}:{prompt.id}",
            prompt_ids=prompt.token_ids,
            seed=request_seed(self._seed, step, f"{number}:{prompt.id}"),
            prompt=prompt,
            images=self._file_of(prompt),
        )

    def with_images(self, group: Group) -> Group:
        """A group of a checkpoint with the files of its images in this run."""
        if self._images is None:
            return group
        samples = tuple(replace(sample, images=self._images(sample.prompt.images)) for sample in group.samples)
        return replace(
            group, request=replace(group.request, images=self._file_of(group.request.prompt)), samples=samples
        )

    def _file_of(self, prompt: Prompt) -> str | None:
        return self._images(prompt.images) if self._images is not None else None

    def _make_images(self, prompts: Sequence[Prompt]) -> None:
        if self._images is not None:
            self._images.make(prompt.images for prompt in prompts)

    async def play(self, start: Request | Group, sampling: SamplingConfig) -> Group:
        """Generates and scores one group, independently of steps."""

        async def one(start: Request | Group, sampling: SamplingConfig) -> Group:
            ended: list[Group] = []
            if self._play is None:
                await self._client.generate([start], sampling, on_group=ended.append)
            else:
                await self._training_episodes.first(
                    [_request_of(start)], sampling, num_groups=1, keep_rest=False, on_group=ended.append
                )
            return await self._scored(ended[0])

        if self._extra_rollout is None:
            return await one(start, sampling)
        extra_sampling = self._extra_sampling(sampling, self._extra_rollout)
        async with asyncio.TaskGroup() as both:
            scoring = both.create_task(one(start, sampling))
            extra = both.create_task(one(_request_of(start), extra_sampling))
        return await with_baseline(scoring, extra)

    @staticmethod
    def _extra_sampling(sampling: SamplingConfig, extra: ExtraRollout) -> SamplingConfig:
        return replace(sampling, n=extra.num_samples, temperature=extra.temperature)

    def _episode_runs(self) -> EpisodeRuns:
        async def play(episode: Episode) -> SupportsFloat | None:
            assert self._play is not None
            return await self._play(episode, episode.prompt)

        return EpisodeRuns(
            self._client,
            play,
            episode_timeout_s=self._episode.timeout_s,
            max_concurrent=self._episode.max_environments if self._episode.has_process else None,
        )


def _request_of(start: Request | Group) -> Request:
    return start if isinstance(start, Request) else start.request


async def _all(scoring: Sequence[Awaitable[Group]]) -> list[Group]:
    return await asyncio.gather(*scoring)
