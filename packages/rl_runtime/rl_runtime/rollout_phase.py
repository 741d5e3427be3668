"""From prompts to scored samples: asks the servers, decodes, rewards, and keeps what could be generated."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np

from rl_data import RewardConfig, reward_for
from rollout_vllm import GroupResult, Request, RolloutClient, SamplingConfig, request_seed

from .errors import RolloutFailed
from .experience import Experience, ExperienceBatch, PromptLike

Phase = Callable[[str], AbstractContextManager[Any]]


@dataclass(frozen=True, kw_only=True)
class Collected:
    """The train batch of a step and what was left out of it."""

    batch: ExperienceBatch
    num_failed: int


@dataclass(frozen=True, kw_only=True)
class Validation:
    """Scores on held-out prompts."""

    accuracy: float
    score_mean: float
    num_samples: int
    num_failed: int


class RolloutPhase:
    """Generation and scoring of one step. `seed`, the step and the prompt's place decide every request's seed."""

    def __init__(self, client: RolloutClient, tokenizer: Any, *, reward: RewardConfig, seed: int) -> None:
        self._client, self._tokenizer, self._reward, self._seed = client, tokenizer, reward, seed

    def collect(
        self, prompts: Sequence[PromptLike], sampling: SamplingConfig, *, step: int, phase: Phase | None = None
    ) -> Collected:
        """Generates and scores `sampling.n` samples of every prompt.

        A sample that could not be generated is left out, never scored as zero; a prompt left with fewer than two
        samples (when more were asked for) is left out whole, since its group has nothing to compare.

        Raises:
            RolloutFailed: nothing was left to train on; gives the first reason.
        """
        phase = phase or (lambda _: nullcontext())
        with phase("gen"):
            groups = self._generate(prompts, sampling, step)
        with phase("reward"):
            items = self._score(prompts, groups, min_samples=min(2, sampling.n))
        num_failed = len(prompts) * sampling.n - len(items)
        if not items:
            reasons = [failure.message for group in groups for failure in group.failures]
            raise RolloutFailed(f"step {step}: none of {num_failed} samples could be generated: {reasons[0]}")
        return Collected(batch=ExperienceBatch(items=tuple(items)), num_failed=num_failed)

    def validate(self, prompts: Sequence[PromptLike], sampling: SamplingConfig, *, step: int) -> Validation:
        """Scores held-out prompts; accuracy is the share of samples with the full score."""
        groups = self._generate(prompts, sampling, -1 - step)
        items = self._score(prompts, groups, min_samples=1)
        if not items:
            reasons = [failure.message for group in groups for failure in group.failures]
            raise RolloutFailed(f"validation after step {step}: no sample could be generated: {reasons[0]}")
        scores = np.array([item.score for item in items])
        return Validation(
            accuracy=float(np.mean(scores >= self._reward.score)),
            score_mean=float(scores.mean()),
            num_samples=len(items),
            num_failed=len(prompts) * sampling.n - len(items),
        )

    def _generate(self, prompts: Sequence[PromptLike], sampling: SamplingConfig, step: int) -> list[GroupResult]:
        requests = [
            Request(
                prompt_id=f"{place}:{prompt.id}",
                prompt_ids=list(prompt.token_ids),
                seed=request_seed(self._seed, step, f"{place}:{prompt.id}"),
            )
            for place, prompt in enumerate(prompts)
        ]
        return self._client.generate_blocking(requests, sampling)

    def _score(
        self, prompts: Sequence[PromptLike], groups: Sequence[GroupResult], *, min_samples: int
    ) -> list[Experience]:
        items: list[Experience] = []
        for place, (prompt, group) in enumerate(zip(prompts, groups, strict=True)):
            if len(group.samples) < min_samples:
                continue
            reward = reward_for(prompt.data_source)
            for sample in group.samples:
                text = self._tokenizer.decode(sample.response_ids, skip_special_tokens=True)
                items.append(
                    Experience(
                        prompt=prompt,
                        group_id=place,
                        sample_index=sample.sample_index,
                        response_ids=tuple(sample.response_ids),
                        response_text=text,
                        rollout_log_probs=np.asarray(sample.log_probs, dtype=np.float32),
                        finish_reason=sample.finish_reason,
                        policy_version=sample.policy_version,
                        score=reward(text, prompt.ground_truth, self._reward),
                    )
                )
        return items
