"""Multi-turn rollouts: the user's coroutine drives a conversation, which is recorded as one training sequence.

    async def with_calculator(episode: Episode) -> None:
        for _ in range(4):
            turn = await episode.generate(stop_token_ids=(CALL_ID,))
            if turn.response_ids[-1] != CALL_ID:
                return
            episode.add_context(encode(compute(decode(turn.response_ids))))

    results = await run_episodes(client, requests, with_calculator, sampling)

Everything is token ids, without decoding and re-encoding, so the trainer sees exactly the tokens that the model saw.

The rollout function can score the episode itself: it returns a number, or calls `episode.reward(number)` after a turn.
"""

import asyncio
import dataclasses
import hashlib
import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, nullcontext
from functools import partial
from typing import Any, SupportsFloat

import numpy as np

from ..client.client import Gate, RolloutClient
from ..client.transport import call_back, cancel, first_complete, gather_or_cancel
from ..config import SamplingConfig
from ..errors import RolloutError
from ..samples import (
    Failure,
    FailureKind,
    Group,
    Request,
    Sample,
    id_list,
    request_seed,
)
from .processes import describe
from .rewards import read_number
from .tree import EpisodeTree


class TurnFailedError(RolloutError):
    """A turn failed. If the rollout function does not catch it, the episode becomes a Failure."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(f"{failure.kind}: {failure.message}")
        self.failure = failure


class Episode:
    """One conversation with the policy, as token ids; or, with `answer`, several that branch. Passed to the rollout
    function."""

    def __init__(
        self,
        client: RolloutClient,
        request: Request,
        sample_index: int,
        sampling: SamplingConfig,
        gate: Gate | None = None,
    ) -> None:
        self.prompt_id = request.prompt_id
        self.prompt = request.prompt
        self.sample_index = sample_index
        self.prompt_ids = id_list(request.prompt_ids)
        self.images = request.images
        self.response_ids: list[int] = []
        self.tree = EpisodeTree()  # the turns
        self._rewards: dict[int, float] = {}  # of turns, by index
        self._branches = False  # turns of `answer`
        self._score: float | None = None  # of all of them
        self._num_asked: Counter[bytes] = Counter()  # turns after each prompt
        self.data: dict[str, Any] = {}  # for the rollout function; returned with the result
        self.is_cut = False  # set by the rollout function if a limit ends the episode
        self._client, self._gate = client, gate
        self._sampling, self._seed = dataclasses.replace(sampling, n=1), request.seed

    @property
    def token_ids(self) -> list[int]:
        """Prompt, turns and context so far, i.e. the prompt of the next turn."""
        return self.prompt_ids + self.response_ids

    @property
    def num_tokens_left(self) -> int:
        """Tokens left of sampling.max_tokens, which limits the whole response: turns and context together."""
        return max(0, self._sampling.response_tokens - len(self.response_ids))

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
        turn = await self._sample(self.token_ids, sampling, len(self.tree.turns), self.prompt_id)
        self.tree.add(self.token_ids, turn)
        self.response_ids += turn.response_ids.tolist()
        return turn

    async def answer(
        self, prompt_ids: Sequence[int], *, n: int = 1, max_tokens: int | None = None, stop: Sequence[str] = ()
    ) -> list[int]:
        """Sample `n` turns after any prompt, also concurrently; returns their indices in `tree`.

        max_tokens: limit of a turn, in addition to sampling.max_tokens. stop: texts in addition to those of the
        sampling settings. Raises TurnFailedError if a turn fails; the others are in the tree. The seeds depend on the
        prompt and on how often it was asked, not on the order of concurrent calls.
        """
        if self.images is not None:
            raise ValueError("turns after any prompt cannot see the images of the data's prompt")
        self._branches = True
        limit = self._sampling.response_tokens
        sampling = dataclasses.replace(
            self._sampling,
            max_tokens=min(limit, max_tokens or limit),
            min_tokens=0,
            stop=tuple(dict.fromkeys((*self._sampling.stop, *stop))),
        )
        ids = np.asarray(prompt_ids, np.int32)
        place = hashlib.sha256(ids.tobytes())

        async def one(number: int) -> int:
            turn = await self._sample(list(prompt_ids), sampling, number, f"{place.hexdigest()}/{self.prompt_id}")
            return self.tree.add(ids, turn)

        first = self._num_asked[place.digest()]
        self._num_asked[place.digest()] += n
        turns = await asyncio.gather(*(one(first + index) for index in range(n)), return_exceptions=True)
        for turn in turns:
            if isinstance(turn, BaseException):
                raise turn
        return [turn for turn in turns if isinstance(turn, int)]

    async def _sample(self, prompt_ids: list[int], sampling: SamplingConfig, number: int, place: str) -> Sample:
        """Samples a turn. number, place: they decide the seed."""
        seed = None if self._seed is None else request_seed(self._seed, number, f"{self.sample_index}/{place}")
        # A distinct routing name: later turns use the server that has this episode's prefix in its cache.
        name = f"{self.prompt_id}/{self.sample_index}"
        request = Request(prompt_id=name, prompt_ids=prompt_ids, seed=seed, images=self.images)
        sample = self._client.sample if self._gate is None else partial(self._client.sample, gate=self._gate)
        group = await sample(request, sampling)
        if group.failures:
            raise TurnFailedError(group.failures[0])
        return group.samples[0]

    def add_context(self, token_ids: Sequence[int], *, images: str | None = None) -> None:
        """Append tokens that the policy did not sample, e.g. the result of a tool. They are masked out of the loss.

        images: if they have placeholders, the file of all images so far (`Request.images`).
        """
        self.images = images or self.images
        self.response_ids += token_ids

    def reward(self, value: SupportsFloat, *, turn: int | None = None) -> None:
        """Reward the latest turn, at its last token. Rewards of one turn add up; the score is the sum of all.

        turn: its index in `tree`; None: in an episode of `answer`, the reward is that of all its turns.
        Raises TypeError if value is not a number, ValueError if it is not finite, if it or the sum of all is larger
        than a training step can use, or if nothing was generated yet.
        """
        number = read_number(value)
        if turn is None and self._branches and self.tree.turns:
            self._score = number + (self._score or 0.0)
        else:
            sampled = [index for index, one in enumerate(self.tree.turns) if one.sample.response_ids.size]
            if turn is None and not sampled:
                raise ValueError("a reward was given before the first turn")
            place = sampled[-1] if turn is None else turn
            self._rewards[place] = read_number(self._rewards.get(place, 0.0) + number)
        read_number(math.fsum((*self._rewards.values(), self._score or 0.0)))

    def replace_prompt(self, token_ids: Sequence[int], *, images: str | None = None) -> None:
        """Use another prompt than that of the request. Raises ValueError once the response has begun."""
        if self.response_ids:
            raise ValueError("the prompt cannot be replaced: the response has begun")
        self.prompt_ids, self.images = list(token_ids), images

    def result(self, duration_s: float) -> Sample:
        """The finished episode as one training sequence, or one for each path of the tree, with the sum of its rewards
        as its score."""
        if not self.tree.turns:
            raise ValueError("the rollout function generated nothing")
        last = self.tree.turns[-1]
        episode = Sample(
            prompt_id=self.prompt_id,
            sample_index=self.sample_index,
            prompt=self.prompt,
            images=self.images,
            finish_reason="length" if self.is_cut else last.sample.finish_reason,
            last_policy_version=max(turn.sample.last_policy_version for turn in self.tree.turns),
            num_turns=len(self.tree.turns),
            duration_s=duration_s,
        )
        if self._branches:
            main, *branches = self.tree.samples(episode, self._rewards)
        else:
            start, tail = len(self.prompt_ids), self.token_ids[last.token_ids.size :]
            main, *branches = self.tree.samples(episode, self._rewards, start=start, tail=tail)
        has_score = self._rewards or self._score is not None
        return dataclasses.replace(
            main,
            branches=tuple(branches),
            tree=tuple(self.tree.lines()) if self._branches else (),
            data=self.data,
            score=math.fsum((*self._rewards.values(), self._score or 0.0)) if has_score else None,
        )


RolloutFunction = Callable[[Episode], Awaitable[SupportsFloat | None]]
OnEpisodes = Callable[[Group], Awaitable[None] | None]


async def run_episodes(
    client: RolloutClient,
    requests: Sequence[Request],
    function: RolloutFunction,
    sampling: SamplingConfig,
    *,
    on_group: OnEpisodes | None = None,
    episode_timeout_s: float | None = None,
    max_concurrent: int | None = None,
) -> list[Group]:
    """Run `function` on `sampling.n` episodes of every request concurrently. Groups are in request order.

    on_group: called (and awaited) with each group as soon as it ends. An episode whose function raises, returns
    something else than a finite number or None, or takes longer than episode_timeout_s, is a Failure of its group (kind
    "rollout" or "deadline"); the other episodes continue. A returned number is a reward of the last turn.
    max_concurrent: limit of the episodes that run at the same time; None: no limit.
    """
    runs = EpisodeRuns(client, function, episode_timeout_s=episode_timeout_s, max_concurrent=max_concurrent)
    return await runs.first(requests, sampling, num_groups=len(requests), keep_rest=False, on_group=on_group)


class EpisodeRuns:
    """Episodes that may outlive the call that started them, for steps that do not wait for the longest ones.

    Arguments as in `run_episodes`. Of one event loop.
    """

    def __init__(
        self,
        client: RolloutClient,
        function: RolloutFunction,
        *,
        episode_timeout_s: float | None = None,
        max_concurrent: int | None = None,
    ) -> None:
        self._client, self._function, self._timeout_s = client, function, episode_timeout_s
        self._free = nullcontext() if max_concurrent is None else asyncio.Semaphore(max_concurrent)
        self._clock, self._gate = _Clock(), Gate()
        self._held: dict[str, asyncio.Task[Group]] = {}

    async def first(
        self,
        requests: Sequence[Request],
        sampling: SamplingConfig,
        *,
        num_groups: int,
        keep_rest: bool = True,
        on_group: OnEpisodes | None = None,
    ) -> list[Group]:
        """Run the episodes of every request, and return as soon as `num_groups` groups are complete.

        The other groups are held if keep_rest (requires `RolloutConfig(control_routes=True)`, else ControlError), else
        cancelled. A held group goes on when a later call has its request again: its functions and environments stay as
        they are, the turns in flight keep their tokens and resume, and its time limits stand still in between.
        Returns the groups that ended, in request order; like those that on_group gets.
        """
        self._clock.go_on()
        self._gate.is_open.set()
        gate = self._gate if keep_rest else None
        tasks = [
            self._held.pop(request.prompt_id)
            if request.prompt_id in self._held
            else asyncio.ensure_future(self._group(request, sampling, gate))
            for request in requests
        ]
        try:
            ended = await first_complete(
                tasks, num_groups, is_complete=lambda one: not one.failures, on_end=partial(call_back, on_group)
            )
            rest = {r.prompt_id: t for i, (r, t) in enumerate(zip(requests, tasks, strict=True)) if i not in ended}
            if keep_rest and rest:
                self._clock.stop()
                await self._client.hold(self._gate)
                self._held |= rest
            else:
                await cancel(rest.values())
        except BaseException:
            await cancel(tasks)
            raise
        return [ended[index] for index in sorted(ended)]

    async def _group(self, request: Request, sampling: SamplingConfig, gate: Gate | None) -> Group:
        episodes = [Episode(self._client, request, index, sampling, gate) for index in range(sampling.num_samples)]
        outcomes = await gather_or_cancel(map(self._one, episodes))
        return Group(
            request=request,
            samples=tuple(o for o in outcomes if isinstance(o, Sample)),
            failures=tuple(o for o in outcomes if isinstance(o, Failure)),
        )

    async def _one(self, episode: Episode) -> Sample | Failure:
        async with self._free:
            begin = time.monotonic()
            try:
                async with self._clock.limit(self._timeout_s) as limit:
                    value = await self._function(episode)
                if value is not None:
                    episode.reward(value)
                return episode.result(time.monotonic() - begin)
            except TurnFailedError as error:
                return _failure(episode, error.failure.kind, error.failure.message, error.failure.num_attempts)
            except TimeoutError as error:
                if limit.expired():
                    return _failure(episode, "deadline", f"not finished within {self._timeout_s:g} s")
                return _failure(episode, "rollout", describe(error))
            except RolloutError as error:  # of this package: the message says it all
                return _failure(episode, "rollout", str(error))
            except (Exception, SystemExit) as error:  # sys.exit in the user's function must not end the run
                return _failure(episode, "rollout", describe(error))


class _Clock:
    """The time limits of episodes, which stand still while the episodes are held."""

    def __init__(self) -> None:
        self._left_s: dict[asyncio.Timeout, float] = {}  # of limits that stand still
        self._limits: set[asyncio.Timeout] = set()
        self._stands_still = False

    @asynccontextmanager
    async def limit(self, timeout_s: float | None) -> AsyncIterator[asyncio.Timeout]:
        async with asyncio.timeout(timeout_s) as limit:
            self._limits.add(limit)
            if self._stands_still:
                self._stop(limit)
            try:
                yield limit
            finally:
                self._limits.discard(limit)
                self._left_s.pop(limit, None)

    def stop(self) -> None:
        self._stands_still = True
        for limit in self._limits:
            self._stop(limit)

    def _stop(self, limit: asyncio.Timeout) -> None:
        when = limit.when()
        if when is not None and not limit.expired():
            self._left_s[limit] = when - asyncio.get_running_loop().time()
            limit.reschedule(None)

    def go_on(self) -> None:
        self._stands_still = False
        for limit, left_s in self._left_s.items():
            limit.reschedule(asyncio.get_running_loop().time() + left_s)
        self._left_s.clear()


def _failure(episode: Episode, kind: FailureKind, message: str, num_attempts: int = 1) -> Failure:
    return Failure(
        prompt_id=episode.prompt_id,
        sample_index=episode.sample_index,
        kind=kind,
        message=message,
        num_attempts=num_attempts,
    )
