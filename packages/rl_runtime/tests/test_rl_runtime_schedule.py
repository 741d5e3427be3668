"""Bounded staleness: the schedule, and `RolloutsAhead` under many interleavings of what can happen."""

import json
import random
from collections import Counter
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from plinth_testing.errors import raises
from rl_core import BatchConfig
from rl_data import Prompt, PromptSampler
from rl_runtime.config import TrainerConfig
from rl_runtime.errors import InputError, RolloutFailed
from rl_runtime.job_config import JobConfig
from rl_runtime.rollout import ahead as ahead_module
from rl_runtime.rollout.ahead import RolloutsAhead, check_groups
from rl_runtime.rollout.config import DynamicSamplingConfig, OversamplingConfig
from rl_runtime.rollout.schedule import Schedule
from rollout_vllm import Group, Request, RolloutConfig, SamplingConfig, VersionSpan
from weight_sync import SyncConfig

NUM_SAMPLES = 2
LAST_STEP = 12


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 12))
def test_without_over_sampling_each_step_trains_on_its_own_groups(
    batch_size: int, max_staleness: int, last_step: int
) -> None:
    schedule = Schedule(batch_size=batch_size, max_staleness=max_staleness, last_step=last_step)
    for step in range(1, last_step + 1):
        schedule.publish(step - 1)
        for due, num_groups in schedule.due():
            assert due <= step + max_staleness
            schedule.draw(due, num_groups)
        for ticket in schedule.tickets:
            if not ticket.has_ended and ticket.step <= step:
                schedule.end(ticket.number, None)
        taken = schedule.take(step)
        assert {ticket.step for ticket in taken} == {step}
        assert [ticket.number for ticket in taken] == list(range((step - 1) * batch_size, step * batch_size))
        assert {step - 1 - ticket.version for ticket in taken} == {min(step - 1, max_staleness)}
    assert schedule.tickets == ()


def test_a_step_waits_for_groups_that_the_next_one_could_not_use() -> None:
    schedule = Schedule(batch_size=1, max_staleness=1, extra_groups=1, last_step=9)
    schedule.publish(0)
    assert schedule.due() == [(1, 2)]
    first, second = schedule.draw(1, 2)
    schedule.end(second.number, 0)
    assert schedule.is_ready(1)
    assert [ticket.number for ticket in schedule.take(1)] == [second.number]
    schedule.publish(1)
    [(step, num_groups)] = schedule.due()
    assert (step, num_groups) == (2, 1)
    [third] = schedule.draw(step, num_groups)
    schedule.end(third.number, 1)
    assert not schedule.is_ready(2), "the first group would be too old in step 3"
    schedule.end(first.number, 0)
    assert [ticket.number for ticket in schedule.take(2)] == [first.number]


def test_a_group_is_as_old_as_the_oldest_token_of_all_its_samples() -> None:
    """The second of its samples was cut by a push."""
    servers: Any = Servers()
    rollouts = rollouts_of(servers, num_samples=3)
    ahead = RolloutsAhead(rollouts, servers, Schedule(batch_size=1, max_staleness=2, last_step=3), check=lambda: None)
    ahead.published(0)
    job = next(iter(servers.jobs.values()))
    of_tokens = [[2], [0, 1], [1, 2]]
    group = Group.fresh(job.request, 3)
    samples = [
        replace(one, response_ids=[5] * len(versions), version_spans=spans(versions), score=1.0, finish_reason="stop")
        for one, versions in zip(group.samples, of_tokens, strict=True)
    ]
    assert [one.policy_version for one in samples] == [2, 0, 1]
    job.future.set_result(replace(group, samples=tuple(samples)))
    ahead.published(1)
    assert ahead._schedule.tickets[0].version == 0


@dataclass
class Job:
    """A group that the stand-in for servers generates: the policy version of each of its tokens."""

    future: Future[Group]
    request: Request
    versions: list[int] = field(default_factory=list)
    num_returned: int = 0
    """Tokens up to the last push, which the client has."""


def spans(versions: list[int]) -> tuple[VersionSpan, ...]:
    return tuple(VersionSpan(version, count) for version, count in sorted(Counter(versions).items()))


class Servers:
    """Stands in for the client, the servers and the rollout phase; groups advance when a test says so."""

    busy_s = 0.0
    is_resumable = True

    def __init__(self) -> None:
        self.version = 0
        self.jobs: dict[str, Job] = {}

    # the rollout phase
    def request(self, prompt: Any, *, step: int, number: int) -> Request:
        return Request(prompt_id=f"{step}/{number}:{prompt.id}", prompt_ids=[1], seed=number, prompt=prompt)

    def play(self, start: Request | Group, sampling: SamplingConfig) -> Any:
        return start

    def with_images(self, group: Group) -> Group:
        return group

    def min_samples(self, sampling: SamplingConfig) -> int:
        return 2

    def check_scorer(self, step: int) -> None: ...

    # the client
    def start(self, work: Any) -> Future[Group]:
        start: Request | Group = work
        job = Job(Future(), start.request if isinstance(start, Group) else start)
        if isinstance(start, Group):
            job.versions = [v for span in start.samples[0].version_spans for v in [span[0]] * span[1]]
            job.num_returned = len(job.versions)
        self.jobs[job.request.prompt_id] = job
        return job.future

    def run(self, coroutine: Any) -> dict[str, float]:
        coroutine.close()
        return {}

    def partial_groups(self) -> list[Group]:
        groups = []
        for job in self.running:
            fresh, count = Group.fresh(job.request, NUM_SAMPLES), job.num_returned
            grown = {
                "response_ids": [5] * count,
                "log_probs": [0.0] * count,
                "version_spans": spans(job.versions[:count]),
            }
            groups.append(replace(fresh, samples=tuple(replace(sample, **grown) for sample in fresh.samples)))
        return groups

    @property
    def running(self) -> list[Job]:
        return [job for job in self.jobs.values() if not job.future.done()]

    def push(self, version: int) -> None:
        """Cuts what runs; it continues with the new weights."""
        for job in self.running:
            job.num_returned = len(job.versions)
        self.version = version

    def finish(self, job: Job, num_failed: int, *, scores_differ: bool = True) -> None:
        job.versions.append(self.version)
        group = Group.fresh(job.request, NUM_SAMPLES)
        samples = tuple(
            replace(
                sample,
                response_ids=[5] * len(job.versions),
                log_probs=None,
                finish_reason="stop",
                version_spans=spans(job.versions),
                score=float(sample.sample_index * scores_differ),
            )
            for sample in group.samples
        )
        lost = samples[NUM_SAMPLES - num_failed :]
        job.future.set_result(replace(group, samples=samples).without(lost, "server", "it failed"))


def prompts(count: int) -> list[Prompt]:
    return [
        Prompt(id=f"p{i}", text="", token_ids=(1,), ground_truth="", data_source="", extra={}, messages=(), tools=())
        for i in range(count)
    ]


def rollouts_of(
    servers: Any, sampler: PromptSampler | None = None, *, num_samples: int = NUM_SAMPLES, max_rounds: int = 0
) -> Any:
    """The rollouts of a run over these servers."""
    sampler = sampler or PromptSampler(9)
    data = prompts(sampler.num_prompts)
    return SimpleNamespace(
        phase=servers,
        sampler=sampler,
        sampling=SamplingConfig(n=num_samples),
        draw=lambda count: [data[i] for i in sampler.next(count)],
        dynamic_sampling=DynamicSamplingConfig(max_rounds=max_rounds),
    )


class AheadMachine(RuleBasedStateMachine):
    """A training loop whose servers, pushes, checkpoints and deaths come in any order."""

    patch = pytest.MonkeyPatch()

    @initialize(
        batch_size=st.integers(1, 3), staleness=st.integers(1, 3), extra=st.integers(0, 2), rounds=st.integers(0, 2)
    )
    def begin(self, batch_size: int, staleness: int, extra: int, rounds: int) -> None:
        self.rounds = 0 if extra else rounds
        self.settings: dict[str, Any] = {
            "batch_size": batch_size,
            "max_staleness": staleness,
            "last_step": LAST_STEP,
            "extra_groups": min(extra, batch_size),
            "replaces": self.rounds > 0,
        }
        self.patch.setattr(ahead_module, "_CHECK_S", 0.0)  # nothing else happens while the loop waits
        self.step, self.ledger, self.saved = 0, {}, None
        self.start(None)

    def teardown(self) -> None:
        self.patch.undo()

    def start(self, saved: tuple[int, str, dict[tuple[str, int], int]] | None) -> None:
        """A new process, from a checkpoint (step, state, ledger) or from the beginning."""
        self.servers = Servers()
        self.sampler = PromptSampler(1000, seed=1)
        rollouts = rollouts_of(self.servers, self.sampler, max_rounds=self.rounds)
        client: Any = self.servers
        self.ahead = RolloutsAhead(rollouts, client, Schedule(**self.settings), check=lambda: None)
        self.step, self.ledger = 0, {}
        if saved is not None:
            self.step, text, ledger = saved
            self.ledger = dict(ledger)
            state = json.loads(text)
            self.sampler.load_state_dict(state["sampler"])
            self.ahead.load_state_dict(state["rollout"])
        self.publish()
        for ticket in self.ahead._schedule.tickets:
            group = self.ahead._groups[ticket.number]
            if group.scored is None and not self.servers.jobs[group.start.prompt_id].versions:
                assert ticket.version == self.step, "it has no tokens, so it is as young as the weights"

    def publish(self) -> None:
        self.servers.push(self.step)
        self.ahead.published(self.step)

    @precondition(lambda self: self.servers.running)
    @rule(data=st.data(), tokens=st.integers(1, 3))
    def generate(self, data: st.DataObject, tokens: int) -> None:
        job = data.draw(st.sampled_from(self.servers.running))
        job.versions += [self.servers.version] * tokens

    @precondition(lambda self: self.servers.running)
    @rule(data=st.data(), num_failed=st.sampled_from([0, 0, 0, 1, 2]), scores_differ=st.booleans())
    def finish(self, data: st.DataObject, num_failed: int, scores_differ: bool) -> None:
        job = data.draw(st.sampled_from(self.servers.running))
        self.servers.finish(job, num_failed, scores_differ=scores_differ)

    @precondition(lambda self: self.step < LAST_STEP)
    @rule(saves=st.booleans(), data=st.data())
    def train(self, saves: bool, data: st.DataObject) -> None:
        """A step, for which the servers finish what it waits for."""
        step = self.step + 1
        order = data.draw(st.permutations(self.servers.running))
        chance = random.Random(data.draw(st.integers(0, 999)))

        def finish_one() -> None:  # also of the groups that replace others meanwhile
            job = next(job for job in (*order, *self.servers.running) if not job.future.done())
            self.servers.finish(job, 0, scores_differ=chance.random() < 0.5)

        self.ahead._check = finish_one
        try:
            collected = self.ahead.collect(step, lambda _: nullcontext())
        except RolloutFailed:  # ends the run
            self.kill()
            return
        self.step = step
        for item in collected.samples:
            assert step - 1 - item.policy_version <= self.settings["max_staleness"], "a sample is too old"
            sample = (item.prompt_id, item.sample_index)
            assert sample not in self.ledger, "a sample is trained on twice"
            self.ledger[sample] = step
        self.check_replacements(collected)
        self.ended = {group.prompt_id for group in collected.ended}
        for key in self.ended:
            for index in range(NUM_SAMPLES):
                self.ledger.setdefault((key, index), -step)
        if saves:
            state = {"sampler": self.sampler.state_dict(), "rollout": self.ahead.state_dict()}
            self.saved = (step, json.dumps(state), dict(self.ledger))
            saved = [group for group in state["rollout"]["groups"].values() if not group["is_scored"]]
            num_tokens = sorted(len(group["samples"][0]["response_ids"]) for group in saved)
            assert num_tokens == sorted(job.num_returned for job in self.servers.running)
        self.publish()

    def check_replacements(self, collected: Any) -> None:
        """With dynamic sampling a step trains on groups whose scores differ, and has no group more than it needs."""
        if not self.rounds:
            return
        batch_size = self.settings["batch_size"]
        scores: dict[str, set[float]] = {}
        for item in collected.samples:
            scores.setdefault(item.prompt_id, set()).add(item.score)
        assert all(len(values) == NUM_SAMPLES for values in scores.values())
        assert len(scores) <= batch_size
        useless = [group for group in collected.ended if len({item.score for item in group.samples}) < NUM_SAMPLES]
        assert len(collected.ended) == batch_size + min(len(useless), self.rounds * batch_size)
        if len(scores) < batch_size:
            assert len(collected.ended) == batch_size * (1 + self.rounds), "groups were missing, and rounds were left"

    @rule()
    def kill(self) -> None:
        """Everything in memory is gone."""
        self.start(self.saved)

    @invariant()
    def no_prompt_is_lost(self) -> None:
        """Each drawn prompt is between drawing and training, or its samples are in the ledger; none is in both."""
        if not hasattr(self, "ahead"):
            return
        waiting = {group.start.prompt_id for group in self.ahead._groups.values()}
        ended = {key for key, _ in self.ledger}
        assert not waiting & ended
        assert len(waiting | ended) == self.sampler.position
        names = [key.split(":")[1] for key in waiting | ended]
        assert len(set(names)) == len(names)

    @invariant()
    def the_servers_have_work(self) -> None:
        """Groups of as many steps as the staleness allows are drawn, and no more."""
        if not hasattr(self, "ahead"):
            return
        ahead = self.settings["max_staleness"] - bool(self.settings["extra_groups"])
        steps = min(LAST_STEP, self.step + 1 + ahead) - self.step
        extra = self.settings["extra_groups"]
        by_step = Counter(ticket.step for ticket in self.ahead._schedule.tickets)
        size = self.settings["batch_size"]
        if not self.rounds:
            assert len(self.ahead._groups) == max(0, steps) * size + extra
        else:
            assert sorted(by_step) == list(range(self.step + 1, self.step + 1 + max(0, steps)))
            assert all(size <= count <= size * (1 + self.rounds) for count in by_step.values())


TestAhead = AheadMachine.TestCase
TestAhead.settings = settings(max_examples=30, stateful_step_count=40, deadline=None)


@pytest.mark.thorough
def test_hundreds_of_interleavings() -> None:
    run_state_machine_as_test(AheadMachine, settings=settings(max_examples=300, stateful_step_count=60, deadline=None))


STALE = {"max_staleness": 1}
SECTIONS: dict[str, Any] = {
    "trainer": TrainerConfig,
    "rollout": RolloutConfig,
    "sync": SyncConfig,
    "oversampling": OversamplingConfig,
    "dynamic_sampling": DynamicSamplingConfig,
}


@pytest.mark.parametrize(
    ("sections", "field"),
    [
        ({"trainer": {"max_staleness": -1}}, "max_staleness"),
        ({"trainer": STALE | {"take_turns": "both"}}, "trainer.take_turns"),
        ({"trainer": STALE, "rollout": {"deterministic": True}}, "rollout.deterministic"),
        (
            {"trainer": STALE, "dynamic_sampling": {"max_rounds": 2}, "oversampling": {"extra_prompts": 1}},
            "dynamic_sampling.max_rounds",
        ),
        ({"trainer": STALE, "oversampling": {"extra_prompts": 99}}, "oversampling.extra_prompts"),
        (
            {"trainer": STALE, "oversampling": {"extra_prompts": 1, "partial_rollouts": False}},
            "oversampling.partial_rollouts",
        ),
        (
            {"trainer": STALE, "rollout": {"urls": ("http://h:1",)}, "sync": {"running_requests": "keep"}},
            "sync.running_requests",
        ),
    ],
)
def test_what_does_not_work_during_generation_is_refused(sections: dict[str, dict[str, Any]], field: str) -> None:
    with raises(InputError, field=field):
        JobConfig(**{name: SECTIONS[name](**keys) for name, keys in sections.items()})


def test_groups_of_another_batch_are_not_resumed() -> None:
    servers: Any = Servers()

    def ahead(batch_size: int, max_rounds: int = 0) -> RolloutsAhead:
        rollouts = rollouts_of(servers, PromptSampler(9), max_rounds=max_rounds)
        schedule = Schedule(batch_size=batch_size, max_staleness=1, last_step=3, replaces=max_rounds > 0)
        return RolloutsAhead(rollouts, servers, schedule, check=lambda: None)

    def check(state: Any, batch_size: int, max_staleness: int = 1, max_rounds: int = 0) -> None:
        job = JobConfig(
            trainer=TrainerConfig(max_staleness=max_staleness),
            batch=BatchConfig(train_batch_size=batch_size, mini_batch_size=batch_size),
            sampling=SamplingConfig(n=NUM_SAMPLES),
            dynamic_sampling=DynamicSamplingConfig(max_rounds=max_rounds),
        )
        check_groups(state, job)

    first = ahead(2)
    first.published(0)
    state = json.loads(json.dumps(first.state_dict()))
    check(state, 2)
    ahead(2).load_state_dict(state)
    with raises(InputError, field="batch.train_batch_size", value=3, allowed="2"):
        check(state, 3)
    check({"partial_rollouts": []}, 3)
    for saved, staleness in (({"partial_rollouts": [{}]}, 1), (state, 0)):
        with raises(InputError, field="trainer.max_staleness", value=staleness):
            check(saved, 2, staleness)
    replacing = ahead(2, max_rounds=1)
    replacing.published(0)
    servers.finish(servers.running[0], 0, scores_differ=False)
    replacing.published(0)
    state = json.loads(json.dumps(replacing.state_dict()))
    check(state, 2, max_rounds=2)
    with raises(InputError, field="dynamic_sampling.max_rounds", value=0):
        check(state, 2)
