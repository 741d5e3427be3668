"""Multi-turn rollouts: the user's coroutine drives a conversation, which is recorded as one training sequence.

    async def with_calculator(episode: Episode) -> None:
        for _ in range(4):
            turn = await episode.generate(stop_token_ids=(CALL_ID,))
            if turn.response_ids[-1] != CALL_ID:
                return
            episode.add_context(encode(compute(decode(turn.response_ids))))

    results = await run_episodes(client, requests, with_calculator, sampling)

Everything is token ids, without decoding and re-encoding, so the trainer sees exactly the tokens that the model saw.
"""

import asyncio
import dataclasses
import inspect
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..client.client import RolloutClient
from ..client.transport import gather_or_cancel
from ..config import SamplingConfig
from ..errors import RolloutError
from ..samples import Failure, FailureKind, FinishReason, Request, Sample, VersionSpan, merge_spans, request_seed


class TurnFailedError(RolloutError):
    """A turn failed. If the rollout function does not catch it, the episode becomes a Failure."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure)
        self.failure = failure

    def __str__(self) -> str:
        return f"{self.failure.kind}: {self.failure.message}"


@dataclass(frozen=True, kw_only=True)
class EpisodeResult:
    """One finished episode: a training sequence.

    response_ids: everything after the prompt, turns and context, in order. log_probs (0.0 for context) and
    response_mask (True: sampled by the policy, False: context, e.g. the result of a tool) have the same length.
    policy_versions: the version of the first token of every turn. version_spans: the policy version of every token, as
    in `Sample`; context has the version of the tokens before it, so that num_tokens sum to the length of the response.
    data: the contents of `episode.data`.
    """

    prompt_id: str
    sample_index: int
    response_ids: list[int]
    log_probs: list[float]
    response_mask: list[bool]
    finish_reason: FinishReason  # of the last turn
    policy_versions: tuple[int, ...]
    version_spans: tuple[VersionSpan, ...]
    num_turns: int
    duration_s: float
    data: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class EpisodeGroup:
    """All episodes of one prompt. Every index is either in results or in failures."""

    prompt_id: str
    results: tuple[EpisodeResult, ...]
    failures: tuple[Failure, ...] = ()


class Episode:
    """One conversation with the policy, as token ids. Passed to the rollout function."""

    def __init__(self, client: RolloutClient, request: Request, sample_index: int, sampling: SamplingConfig) -> None:
        self.prompt_id = request.prompt_id
        self.sample_index = sample_index
        self.prompt_ids = list(request.prompt_ids)
        self.response_ids: list[int] = []
        self.log_probs: list[float] = []
        self.response_mask: list[bool] = []
        self.turns: list[Sample] = []
        self._version_spans: list[VersionSpan] = []
        self.data: dict[str, Any] = {}  # for the rollout function; returned with the result
        self._client, self._sampling, self._seed = client, dataclasses.replace(sampling, n=1), request.seed

    @property
    def token_ids(self) -> list[int]:
        """Prompt, turns and context so far, i.e. the prompt of the next turn."""
        return self.prompt_ids + self.response_ids

    @property
    def num_tokens_left(self) -> int:
        """Tokens left of sampling.max_tokens, which limits the whole response: turns and context together."""
        return max(0, self._sampling.max_tokens - len(self.response_ids))

    async def generate(self, *, max_tokens: int | None = None, stop_token_ids: Sequence[int] = ()) -> Sample:
        """Sample one turn and append it.

        max_tokens: limit of this turn, in addition to num_tokens_left. stop_token_ids: in addition to those of the
        sampling settings. Raises TurnFailedError if generation fails, ValueError if no tokens are left.
        """
        left = self.num_tokens_left
        if left == 0:
            raise ValueError("no tokens are left for another turn: check episode.num_tokens_left")
        sampling = dataclasses.replace(
            self._sampling,
            max_tokens=min(left, max_tokens or left),
            min_tokens=0,
            stop_token_ids=tuple(dict.fromkeys((*self._sampling.stop_token_ids, *stop_token_ids))),
        )
        turn_number = len(self.turns)
        seed = None
        if self._seed is not None:
            seed = request_seed(self._seed, turn_number, f"{self.sample_index}/{self.prompt_id}")
        # A distinct routing name: later turns use the server that has this episode's prefix in its cache.
        name = f"{self.prompt_id}/{self.sample_index}"
        group = await self._client.sample(Request(prompt_id=name, prompt_ids=self.token_ids, seed=seed), sampling)
        if group.failures:
            raise TurnFailedError(group.failures[0])
        turn = group.samples[0]
        self.turns.append(turn)
        if not self._version_spans and self.response_ids:  # context before the first turn
            self._version_spans.append(VersionSpan(turn.policy_version, len(self.response_ids)))
        self._version_spans += turn.version_spans
        self._append(turn.response_ids, turn.log_probs, True)
        return turn

    def add_context(self, token_ids: Sequence[int]) -> None:
        """Append tokens that the policy did not sample, e.g. the result of a tool. They are masked out of the loss."""
        if self._version_spans:
            self._version_spans.append(VersionSpan(self._version_spans[-1].policy_version, len(token_ids)))
        self._append(list(token_ids), [0.0] * len(token_ids), False)

    def _append(self, ids: list[int], log_probs: list[float], sampled: bool) -> None:
        self.response_ids += ids
        self.log_probs += log_probs
        self.response_mask += [sampled] * len(ids)

    def result(self, duration_s: float) -> EpisodeResult:
        if not self.turns:
            raise ValueError("the rollout function generated nothing")
        return EpisodeResult(
            prompt_id=self.prompt_id,
            sample_index=self.sample_index,
            response_ids=self.response_ids,
            log_probs=self.log_probs,
            response_mask=self.response_mask,
            finish_reason=self.turns[-1].finish_reason,
            policy_versions=tuple(turn.policy_version for turn in self.turns),
            version_spans=merge_spans(self._version_spans),
            num_turns=len(self.turns),
            duration_s=duration_s,
            data=self.data,
        )


RolloutFunction = Callable[[Episode], Awaitable[None]]
OnEpisodes = Callable[[EpisodeGroup], Awaitable[None] | None]


async def run_episodes(
    client: RolloutClient,
    requests: Sequence[Request],
    function: RolloutFunction,
    sampling: SamplingConfig,
    *,
    on_group: OnEpisodes | None = None,
    episode_timeout_s: float | None = None,
) -> list[EpisodeGroup]:
    """Run `function` on `sampling.n` episodes of every request concurrently. Groups are in request order.

    on_group: called (and awaited) with each group as soon as it ends. An episode whose function raises, or takes longer
    than episode_timeout_s, is a Failure of its group (kind "rollout" or "deadline"); the other episodes continue.
    """

    async def one_group(request: Request) -> EpisodeGroup:
        episodes = [Episode(client, request, index, sampling) for index in range(sampling.n)]
        outcomes = await asyncio.gather(*(_run_one(e, function, episode_timeout_s) for e in episodes))
        group = EpisodeGroup(
            prompt_id=request.prompt_id,
            results=tuple(o for o in outcomes if isinstance(o, EpisodeResult)),
            failures=tuple(o for o in outcomes if isinstance(o, Failure)),
        )
        if on_group is not None:
            answer = on_group(group)
            if inspect.isawaitable(answer):
                await answer
        return group

    return await gather_or_cancel(one_group(request) for request in requests)


async def _run_one(episode: Episode, function: RolloutFunction, timeout_s: float | None) -> EpisodeResult | Failure:
    begin = time.monotonic()
    try:
        async with asyncio.timeout(timeout_s) as limit:
            await function(episode)
        return episode.result(time.monotonic() - begin)
    except TurnFailedError as error:
        return _failure(episode, error.failure.kind, error.failure.message, error.failure.num_attempts)
    except TimeoutError as error:
        if limit.expired():
            return _failure(episode, "deadline", f"not finished within {timeout_s:g} s", 1)
        return _failure(episode, "rollout", f"TimeoutError: {error}", 1)
    except (Exception, SystemExit) as error:  # sys.exit in the user's function must not end the run
        return _failure(episode, "rollout", f"{type(error).__name__}: {error}", 1)


def _failure(episode: Episode, kind: FailureKind, message: str, num_attempts: int) -> Failure:
    return Failure(
        prompt_id=episode.prompt_id,
        sample_index=episode.sample_index,
        kind=kind,
        message=message,
        num_attempts=num_attempts,
    )
