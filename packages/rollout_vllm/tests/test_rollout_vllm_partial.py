"""Partial rollouts without servers: version spans, log-probs, seeds, and the state of the client."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
import pickle
import random
import threading
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plinth_testing import raises
from rollout_vllm import (
    Endpoint,
    Episode,
    EpisodeRuns,
    Group,
    Request,
    RolloutClient,
    RolloutConfig,
    RolloutConfigError,
    Sample,
    SamplingConfig,
    VersionSpan,
    run_episodes,
)
from rollout_vllm.client.dispatch import Dispatcher
from rollout_vllm.client.group_run import GroupRun, extend, remaining, seed_of
from rollout_vllm.client.metrics import ClientCounters
from rollout_vllm.client.protocol import Choice
from rollout_vllm.client.request_runner import Completion, Owner, RequestFailure
from rollout_vllm.client.retry import CONNECTION_LOST
from rollout_vllm.samples import merge_spans

QUICK = settings(deadline=None, derandomize=True)
PROMPT = [7, 8, 9]


@QUICK
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4))))
def test_merged_spans_cover_every_token_once(spans: list[tuple[int, int]]) -> None:
    merged = merge_spans(spans)
    versions = [version for version, count in spans for _ in range(count)]
    assert Sample(sample_index=0, response_ids=versions, version_spans=merged).versions.tolist() == versions
    assert all(span.num_tokens > 0 for span in merged)
    assert all(a.policy_version != b.policy_version for a, b in itertools.pairwise(merged))
    assert merge_spans(merged) == merged


@pytest.mark.parametrize("versions", [(3, 4, 9), (9, 3, 4), (4,)])
def test_policy_version_of_a_sample_is_that_of_its_oldest_token(versions: tuple[int, ...]) -> None:
    """The bound of staleness counts from it."""
    spans = tuple(VersionSpan(version, 2) for version in versions)
    sample = Sample(sample_index=0, response_ids=[1] * 2 * len(spans), version_spans=spans, last_policy_version=9)
    assert sample.policy_version == min(versions)
    assert Sample(sample_index=0, last_policy_version=9).policy_version == 9


def test_uninterrupted_sample_has_one_span() -> None:
    sample = Sample(
        prompt_id="a",
        sample_index=0,
        response_ids=[1, 2],
        log_probs=[-1.0, -2.0],
        finish_reason="stop",
        last_policy_version=4,
    )
    assert sample.version_spans == (VersionSpan(4, 2),)
    assert sample.policy_version == 4
    assert (sample.response_ids.dtype, sample.log_probs.dtype) == (np.int32, np.float32)
    assert pickle.loads(pickle.dumps(sample)).to_state() == sample.to_state()


class Call(NamedTuple):
    """A request that the servers got."""

    prompt_ids: Sequence[int]
    sampling: SamplingConfig
    seed: int | None


class FakeServers:
    """A RequestRunner whose token at `place` is 1000 * version + place, with log-prob -(place + 1) / 8 - version.

    `place` counts from the start of the response, so lost, repeated and moved tokens are detected. Responses are
    interrupted at random. lengths: of the complete responses. notes_versions: the policy is also updated within a
    response, and the response has the version of every token.
    """

    def __init__(
        self,
        seed: int,
        lengths: list[int],
        *,
        interrupt_rate: float,
        fail_rate: float,
        notes_versions: bool = False,
    ) -> None:
        self._notes_versions = notes_versions
        self.policy_version = 0
        self.calls: list[Call] = []
        self._random = random.Random(seed)
        self._lengths, self._interrupt_rate, self._fail_rate = lengths, interrupt_rate, fail_rate

    async def run(
        self, owner: Owner, prompt_ids: Sequence[int], sampling: SamplingConfig, seed: int | None
    ) -> tuple[Completion | RequestFailure | None, int]:
        await asyncio.sleep(0)
        if owner.stopping:
            return None, 1
        call = Call(prompt_ids, sampling, seed)
        self.calls.append(call)
        if self._random.random() < self._fail_rate:
            return RequestFailure(CONNECTION_LOST, "gone"), 3
        version = self.policy_version
        if self._random.random() < 0.5:
            self.policy_version += 1  # the policy is updated while the request is in flight
        choices = [self._choice(call, index, version) for index in range(call.sampling.num_samples)]
        choices = [self._updated(choice, version) for choice in choices] if self._notes_versions else choices
        return Completion(choices=choices, server=0, version=version), 1

    def _choice(self, call: Call, index: int, version: int) -> Choice:
        done = len(call.prompt_ids) - len(PROMPT)
        left = call.sampling.response_tokens
        wanted = min(left, max(1, self._lengths[index % len(self._lengths)] - done))
        stops = wanted < left or done + wanted >= self._lengths[index % len(self._lengths)]
        interrupted = self._random.random() < self._interrupt_rate
        count = self._random.randint(0, wanted) if interrupted else wanted
        places = range(done, done + count)
        # The row of a token is its place in the sequence, and 100 more for each policy version.
        rows = (np.arange(len(call.prompt_ids) + count - 1) + 100 * version).astype(np.uint16)[:, None, None]
        return Choice(
            [1000 * version + place for place in places],
            [-(place + 1) / 8 - version for place in places],
            "abort" if interrupted else ("stop" if stops else "length"),
            routes=rows if count else None,
        )

    def _updated(self, choice: Choice, sent: int) -> Choice:
        """The first tokens keep the version at which the request was sent, which the server may not know."""
        ids, log_probs = choice.response_ids, choice.log_probs or []
        change = self._random.randint(0, len(ids))
        new = self.policy_version = self.policy_version + 1
        spans = ((self._random.choice((None, sent)), change), (new, len(ids) - change))
        return Choice(
            [*ids[:change], *(token + 1000 * (new - sent) for token in ids[change:])],
            [*log_probs[:change], *(value - (new - sent) for value in log_probs[change:])],
            choice.finish_reason,
            tuple((version, count) for version, count in spans if count),
            choice.routes,
        )


@settings(deadline=None, derandomize=True, max_examples=200)
@given(
    st.integers(0, 10**6),
    st.lists(st.integers(1, 12), min_size=1, max_size=4),
    st.integers(1, 4),
    st.sampled_from([0.0, 0.3, 0.8]),
    st.sampled_from([0.0, 0.1]),
    st.booleans(),
)
def test_no_token_is_lost_repeated_or_moved(
    seed: int, lengths: list[int], n: int, interrupt_rate: float, fail_rate: float, notes_versions: bool
) -> None:
    sampling = SamplingConfig(n=n, max_tokens=10, min_tokens=2)
    rates = {"interrupt_rate": interrupt_rate, "fail_rate": fail_rate}
    servers = FakeServers(seed, lengths, **rates, notes_versions=notes_versions)
    request = Request(prompt_id="a", prompt_ids=PROMPT, seed=40)
    run = GroupRun(Group.fresh(request, n), sampling, servers, ["http://a"], None)  # type: ignore[arg-type]
    asyncio.run(run.run())
    result = run.result()
    indices = [s.sample_index for s in result.samples] + [f.sample_index for f in result.failures]
    assert sorted(indices) == list(range(n))
    for sample in result.samples:
        versions = sample.versions.tolist()
        expected = [1000 * version + place for place, version in enumerate(versions)]
        assert sample.response_ids.tolist() == expected
        assert sample.log_probs.tolist() == [-(place + 1) / 8 - version for place, version in enumerate(versions)]
        assert 1 <= len(sample.response_ids) <= 10
        assert sample.policy_version <= sample.last_policy_version
        rows = sample.routes.flatten().astype(int)
        assert (rows % 100).tolist() == list(range(sample.token_ids.size - 1))
        assert len(set(rows // 100)) == 1, "all of the last request"
        restored = Sample.from_state(json.loads(json.dumps(sample.to_state())))
        assert (restored.routes.dtype, restored.routes.tolist()) == (np.uint16, sample.routes.tolist())
        if versions:
            assert sample.policy_version == versions[0]
    for call in servers.calls:
        done = len(call.prompt_ids) - len(PROMPT)
        assert call.sampling.response_tokens + done == 10
        assert call.sampling.min_tokens == max(0, 2 - done)
    seeds = [
        call.seed for call in servers.calls if call.sampling.num_samples == 1 and len(call.prompt_ids) > len(PROMPT)
    ]
    assert not set(seeds) & set(range(40, 40 + n)), "the random numbers of the first tokens were reused"


@settings(deadline=None, derandomize=True)
@given(st.integers(0, 10**6), st.integers(1, 4))
def test_stopped_group_is_resumed(seed: int, n: int) -> None:
    """The group is stopped after any request, pickled, and passed to another run."""
    sampling = SamplingConfig(n=n, max_tokens=10)
    servers = FakeServers(seed, [9, 4], interrupt_rate=0.6, fail_rate=0.0)
    start: Group = Group.fresh(Request(prompt_id="a", prompt_ids=PROMPT), n)
    for _ in range(100):
        run = GroupRun(start, sampling, servers, ["http://a"], None)  # type: ignore[arg-type]

        async def stopped(run: GroupRun = run) -> None:
            task = asyncio.ensure_future(run.run())
            for _ in range(3):
                await asyncio.sleep(0)
            run.stopping = True
            await task

        asyncio.run(stopped())
        start = pickle.loads(pickle.dumps(run.partial()))
        if all(part.finish_reason for part in start.samples):
            break
    result = run.result()
    assert result.complete
    for sample in result.samples:
        assert [i % 1000 for i in sample.response_ids.tolist()] == list(range(len(sample.response_ids)))
        assert sample.versions.tolist() == [i // 1000 for i in sample.response_ids.tolist()]


def test_extend_and_remaining() -> None:
    sampling = SamplingConfig(n=4, max_tokens=5, min_tokens=3)
    part = Sample(sample_index=2)
    request = Request(prompt_id="a", prompt_ids=PROMPT, seed=10)
    assert seed_of(request, part) == 12  # vLLM uses the same seed for the third choice of one request
    part = extend(part, Choice([5, 6], [-1.0, -2.0], "abort"), sampling, version=0, last_version=1)
    assert part.finish_reason is None
    assert (remaining(part, sampling).max_tokens, remaining(part, sampling).min_tokens) == (3, 1)
    assert seed_of(request, part) not in (None, 12)
    assert seed_of(dataclasses.replace(request, seed=None), part) is None
    part = extend(part, Choice([7, 8, 9], [-1.0] * 3, "abort"), sampling, version=1, last_version=1)
    assert part.finish_reason == "length"  # interrupted after its last token
    assert part.version_spans == (VersionSpan(0, 2), VersionSpan(1, 3))
    assert [getattr(part, name).dtype for name in ("response_ids", "log_probs")] == [np.int32, np.float32]


def test_waiting_requests_end_in_spite_of_a_pause_when_no_server_is_left() -> None:
    async def main() -> None:
        dispatcher = Dispatcher(1, max_in_flight=2)
        dispatcher.pause()
        tasks = [asyncio.ensure_future(dispatcher.acquire(f"g{number}", 2)) for number in range(2)]
        await asyncio.sleep(0)
        tasks.pop().cancel()
        await asyncio.sleep(0)
        dispatcher.retire(0)
        assert await tasks[0] is None

    asyncio.run(main())


@settings(deadline=None, max_examples=100)
@given(
    sizes=st.lists(st.integers(1, 3), min_size=1, max_size=12),
    late=st.integers(0, 12),
    cancelled=st.sets(st.integers(0, 11), max_size=3),
    yields=st.integers(0, 6),
)
def test_requests_after_a_pause_do_not_overtake_those_before_it(
    sizes: list[int], late: int, cancelled: set[int], yields: int
) -> None:
    """Each request holds its capacity until the test releases it; `late` of them come when the queue is resumed."""

    async def main() -> None:
        dispatcher, order = Dispatcher(1, max_in_flight=4), list[int]()

        async def one(number: int) -> None:
            assert await dispatcher.acquire(f"g{number}", sizes[number]) == 0
            order.append(number)

        early = len(sizes) - min(late, len(sizes))
        dispatcher.pause()
        tasks = [asyncio.ensure_future(one(number)) for number in range(early)]
        await asyncio.sleep(0)
        dispatcher.resume()
        for _ in range(yields):
            await asyncio.sleep(0)
        tasks += [asyncio.ensure_future(one(number)) for number in range(early, len(sizes))]
        for number in cancelled & set(range(len(sizes))):
            tasks[number].cancel()
        released = 0
        while any(not task.done() for task in tasks):
            await asyncio.sleep(0.001)
            if released == len(order):
                assert all(task.done() for task in tasks), "nothing runs and nothing is started: a turn was lost"
                break
            dispatcher.release(0, sizes[order[released]])
            released += 1
        assert order == sorted(order)
        assert set(range(len(sizes))) - set(order) <= cancelled
        for number in order[released:]:
            dispatcher.release(0, sizes[number])
        assert dispatcher.samples_in_flight == 0

    asyncio.run(main())


def test_wrong_group_sizes_are_rejected() -> None:
    client = RolloutClient([Endpoint("http://127.0.0.1:9", "k", "m")], RolloutConfig())
    partial = Group.fresh(Request(prompt_id="a", prompt_ids=PROMPT), 3)
    with raises(RolloutConfigError, field="n", value=2):
        client.generate_blocking([partial], SamplingConfig(n=2))
    with raises(RolloutConfigError, field="num_groups", value=2):
        client.run(client.generate_first([partial], SamplingConfig(n=3), num_groups=2))
    client.close()


def test_version_spans_of_an_episode_include_context() -> None:
    client = RolloutClient([Endpoint("http://127.0.0.1:9", "k", "m")], RolloutConfig())
    versions = iter([(VersionSpan(0, 2),), (VersionSpan(0, 1), VersionSpan(1, 2)), (VersionSpan(1, 1),)])

    async def sample(request: Request, sampling: SamplingConfig) -> Group:
        spans = next(versions)
        count = sum(span.num_tokens for span in spans)
        one = Sample(
            prompt_id=request.prompt_id,
            sample_index=0,
            response_ids=[5] * count,
            log_probs=[-1.0] * count,
            finish_reason="stop",
            last_policy_version=spans[-1].policy_version,
            version_spans=spans,
        )
        return Group(request=request, samples=(one,))

    client.sample = sample  # type: ignore[assignment,method-assign]

    async def function(episode: Episode) -> None:
        episode.add_context([9])
        for reward in range(3):
            await episode.generate()
            episode.add_context([8, 8])
            episode.reward(reward)

    [group] = asyncio.run(
        run_episodes(client, [Request(prompt_id="a", prompt_ids=PROMPT)], function, SamplingConfig(n=1))
    )
    [result] = group.samples
    assert result.versions.tolist() == [0] * 6 + [1] * 7
    assert result.prompt_ids.tolist() == PROMPT
    assert result.response_ids.tolist() == [9, 5, 5, 8, 8, 5, 5, 5, 8, 8, 5, 8, 8]
    assert result.response_mask is not None
    assert result.response_mask.tolist() == [token == 5 for token in result.response_ids]
    assert result.generated_log_probs is not None
    assert result.generated_log_probs.tolist() == [-1.0] * 6
    assert result.turn_rewards is not None
    assert result.turn_rewards.tolist() == [0, 0, 0, 0, 1, 2]
    assert result.score == 3
    assert sum(span.num_tokens for span in result.version_spans) == len(result.response_ids) == 13
    assert [span.policy_version for span in result.generated_spans] == list(dict.fromkeys(result.generated_versions))
    assert sum(span.num_tokens for span in result.generated_spans) == result.num_generated < 13


def test_a_task_that_exits_ends_no_other_task_of_the_clients_thread() -> None:
    """asyncio ends an event loop at SystemExit; calls that wait for the loop would never end."""
    client = RolloutClient([Endpoint("http://127.0.0.1:9", "k", "m")], RolloutConfig())

    async def leave(error: BaseException) -> None:
        raise error

    async def wait() -> int:
        await asyncio.sleep(0.2)
        return 7

    waiting = client.start(wait())
    for error in (SystemExit(3), KeyboardInterrupt()):
        with pytest.raises(type(error)):
            client.run(leave(error))
    assert waiting.result(20) == 7
    assert client.run(wait()) == 7
    client.close()


def test_a_client_without_a_thread_is_an_error_of_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    client = RolloutClient([Endpoint("http://127.0.0.1:9", "k", "m")], RolloutConfig())

    async def seven() -> int:
        return 7

    def no_thread(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_thread)
        for _ in range(2):
            call = seven()
            with pytest.raises(RuntimeError):
                client.run(call)
            call.close()
    assert client.run(seven()) == 7
    client.close()


def test_blocking_call_from_the_clients_thread_is_rejected() -> None:
    client = RolloutClient([Endpoint("http://127.0.0.1:9", "k", "m")], RolloutConfig())

    async def callback() -> None:
        client.run(client.pause())

    with pytest.raises(RuntimeError):
        client.run(callback())
    client.close()


# ---- episodes that outlive a step ------------------------------------------------------------------------------------
class HoldingServers(FakeServers):
    """FakeServers that answer one token of a response per tick, and at once when they are interrupted."""

    def __init__(self, lengths: dict[str, int]) -> None:
        super().__init__(0, [1], interrupt_rate=0.0, fail_rate=0.0)
        self.lengths_of, self.in_flight = lengths, set[int]()
        self.lock, self.counters = threading.Lock(), ClientCounters()

    async def run(
        self, owner: Owner, prompt_ids: Sequence[int], sampling: SamplingConfig, seed: int | None
    ) -> tuple[Completion | RequestFailure | None, int]:
        if owner.stopping:
            return None, 1
        version, place, choice = self.policy_version, len(prompt_ids) - len(PROMPT), Choice([], [], "abort")
        self.in_flight.add(id(owner))
        while not owner.stopping:
            await asyncio.sleep(0.001)
            choice.response_ids.append(1000 * version + place)
            choice.log_probs.append(-float(place))
            place += 1
            if place >= self.lengths_of[owner.request.prompt_id.split("/")[0]]:
                choice = dataclasses.replace(choice, finish_reason="stop")
                break
        self.in_flight.discard(id(owner))
        return Completion(choices=[choice], server=0, version=version), 1

    def has_attempts_in_flight(self, owners: list[GroupRun]) -> bool:
        return bool(self.in_flight & set(map(id, owners)))

    async def interrupt(self, owners: list[GroupRun] | None = None) -> None:
        await asyncio.sleep(0)


def test_held_episodes_go_on_with_their_tokens_and_their_time() -> None:
    """Two steps: the long episodes of the first are held in the middle of a turn, and end in the second."""
    client = RolloutClient([Endpoint("http://127.0.0.1:1")])
    servers = HoldingServers({"short": 2, "long": 150, "next": 2})
    client._runner = servers  # type: ignore[assignment]
    began: list[str] = []

    async def function(episode: Episode) -> float:
        began.append(episode.prompt_id)
        await episode.generate()
        return 1.0

    async def two_steps() -> tuple[list[Group], list[Group]]:
        runs = EpisodeRuns(client, function, episode_timeout_s=1.0)
        requests = {name: Request(prompt_id=name, prompt_ids=PROMPT) for name in ("long", "short", "next")}
        sampling = SamplingConfig(n=2, max_tokens=512)
        first = await runs.first([requests["long"], requests["short"]], sampling, num_groups=1)
        assert not servers.in_flight, "weights can be pushed"
        await asyncio.sleep(1.2)  # an update that takes longer than the episodes may
        servers.policy_version = 1
        return first, await runs.first([requests["long"], requests["next"]], sampling, num_groups=2)

    first, second = asyncio.run(two_steps())
    assert [group.prompt_id for group in first] == ["short"]
    assert [group.prompt_id for group in second] == ["long", "next"]
    assert sorted(began) == ["long", "long", "next", "next", "short", "short"], "nothing starts again"
    for result in second[0].samples:
        assert [span.policy_version for span in result.version_spans] == [0, 1]
        versions = result.versions.tolist()
        assert result.response_ids.tolist() == [1000 * version + place for place, version in enumerate(versions)]
        assert result.log_probs.tolist() == [-float(place) for place in range(150)]
        assert result.score == 1.0


def test_episodes_that_are_not_kept_are_cancelled() -> None:
    client = RolloutClient([Endpoint("http://127.0.0.1:1")])
    client._runner = HoldingServers({"short": 2, "long": 10**9})  # type: ignore[assignment]
    ended: list[str] = []

    async def function(episode: Episode) -> None:
        try:
            await episode.generate()
        finally:
            ended.append(episode.prompt_id)

    async def step() -> list[Group]:
        runs = EpisodeRuns(client, function)
        requests = [Request(prompt_id=name, prompt_ids=PROMPT) for name in ("long", "short")]
        return await runs.first(requests, SamplingConfig(n=1, max_tokens=10**9), num_groups=1, keep_rest=False)

    assert [group.prompt_id for group in asyncio.run(step())] == ["short"]
    assert ended == ["short", "long"]
