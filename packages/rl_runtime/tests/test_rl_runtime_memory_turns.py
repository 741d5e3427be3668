"""Turns of trainer and servers on one GPU: over HTTP with servers that sleep as vLLM's do, and real trainer workers."""

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from rl_runtime_sleeping_server import SleepingServer, sleeping_servers

from plinth_testing import raises, wait_until
from rl_runtime.errors import RankError, RlRuntimeError
from rl_runtime.ranks.trainer_worker import TrainerWorker
from rl_runtime.rollout import servers as rollout_servers
from rl_runtime.rollout import watched_servers
from rl_runtime.rollout.memory_turns import MemoryTurns, Turn, put_to_sleep, sleep_level
from rl_runtime.rollout.servers import RolloutServers
from rollout_vllm import Endpoint, Request, RolloutClient, RolloutConfig, SamplingConfig, ServerGroup, WatchEvent
from run_kit.timing import PhaseTimer
from weight_sync import SyncConfig, WeightSyncError
from weight_sync.push.server import ServerControl

GB = 10**9


@dataclass
class Engine:
    """Knows where its states are; 91 GB of them move."""

    on_gpu: bool = True
    moves_params: bool = False

    def offload(self, *, include_params: bool) -> int:
        assert self.on_gpu, "offloaded twice"
        self.on_gpu, self.moves_params = False, include_params
        return 91 * GB

    def reload(self) -> int:
        assert not self.on_gpu, "reloaded twice"
        self.on_gpu = True
        return 91 * GB


class Ranks:
    """One rank: a real worker whose engines are `Engine`s."""

    def __init__(self) -> None:
        self.worker = TrainerWorker(0, 1, device="cpu", num_threads=1)
        self.actor, self.ref = Engine(), Engine()
        self.worker._engines |= {"actor": self.actor, "ref": self.ref}  # type: ignore[dict-item]

    def run(self, method: Callable[..., Any], *args: Any) -> list[Any]:
        return [method(self.worker, *args)]


@dataclass(frozen=True)
class Report:
    transports: dict[str, str] = field(default_factory=dict)


@dataclass
class Actor:
    """Pushes as weight_sync does, route by route, but no tensors."""

    ranks: Ranks
    name: str = "actor"
    fails: bool = False
    _controls: list[ServerControl] = field(default_factory=list)

    def connect_servers(
        self, endpoints: list[Endpoint], config: SyncConfig, adapter: str | None, version: int, *, base: bool
    ) -> None:
        self._controls = [ServerControl(endpoint.url, endpoint.api_key, 20.0) for endpoint in endpoints]

    def push_weights(self, version: int) -> Report:
        assert not self.ranks.actor.moves_params, "the weights to push are in host memory"
        for control in self._controls:
            control.pause(20.0)
            control.start()
            if self.fails:
                raise RankError("the push failed", WeightSyncError("connection lost"))
            control.update({"version": version}, 20.0)
            control.finish(version)
            control.drop_prefix_cache()
            control.drop_encoder_cache()
            control.resume()
        return Report()


@dataclass
class ManualWatch:
    """A watch whose restarts a test makes."""

    servers: list[SleepingServer]
    client: RolloutClient
    events: list[WatchEvent] = field(default_factory=list)

    def start(self) -> None: ...
    def stop(self, *, abort_restarts: bool) -> None: ...
    def check(self) -> None: ...
    def restart(self, index: int) -> None:
        self.servers[index].stop()
        self.client.dispatcher.block(index)
        self.events.append(WatchEvent(index, "died", "", 0.0))


class Rig:
    """RolloutServers with turns over `servers`."""

    def __init__(
        self,
        servers: list[SleepingServer],
        *,
        moves_states: bool = True,
        level: Any = 2,
        max_restarts: int = 3,
        watch: Callable[..., Any] | None = None,
        timeout_s: float = 20.0,
    ) -> None:
        self.servers, self.ranks, self.lines = servers, Ranks(), list[str]()
        group = ServerGroup([s.endpoint for s in servers], servers, 60.0)  # type: ignore[arg-type]
        self.client = RolloutClient(group.endpoints, RolloutConfig(num_servers=len(servers), max_retries=0))
        self.actor = Actor(self.ranks)
        self.turns = MemoryTurns(
            self.client,
            [self.ranks],  # type: ignore[list-item]
            pushed_role="actor",
            moves_states=moves_states,
            level=level,
            report=self.lines.append,
            timeout_s=timeout_s,
        )
        real = watched_servers.ServerWatch
        if watch is not None:
            watched_servers.ServerWatch = watch  # type: ignore[misc, assignment]
        try:
            self.fleet = RolloutServers(
                group,
                self.client,
                self.actor,  # type: ignore[arg-type]
                SyncConfig(),
                max_restarts=max_restarts,
                report=self.lines.append,
                turns=self.turns,
            )
        finally:
            watched_servers.ServerWatch = real  # type: ignore[misc]
        for server in servers:  # as run_job does before it builds the engines
            server.sleep(level)

    def step(self, version: int) -> PhaseTimer:
        timer = PhaseTimer()
        with timer.step(), self.fleet.changing_weights(timer.phase):
            assert self.ranks.actor.on_gpu
            assert self.ranks.ref.on_gpu
            assert not any(server.gpu_tags for server in self.servers), "the trainer works while a server is awake"
            self.fleet.push(version, timer.phase)
        return timer

    def generate(self, num_groups: int = 2) -> list[Any]:
        requests = [Request(prompt_id=f"p{i}", prompt_ids=[1, 2], seed=i) for i in range(num_groups)]
        sampling = SamplingConfig(n=2, max_tokens=3)
        return self.client.generate_blocking(requests, sampling)

    def crimes(self) -> list[str]:
        return [crime for server in self.servers for crime in server.crimes]


@pytest.fixture
def two_servers() -> Iterator[list[SleepingServer]]:
    with sleeping_servers(2) as servers:
        yield servers


@pytest.mark.parametrize("moves_states", [False, True])
def test_a_step_hands_the_memory_over_in_order(two_servers: list[SleepingServer], moves_states: bool) -> None:
    rig = Rig(two_servers, moves_states=moves_states)
    with rig.client:
        rig.step(0)
        for server in two_servers:
            server.calls.clear()
        assert all(group.complete for group in rig.generate())
        assert rig.ranks.actor.on_gpu != moves_states
        timer = rig.step(1)
        assert all(group.complete for group in rig.generate())
    control = [call for call in two_servers[0].calls if "completions" not in call and "reset" not in call]
    assert control == [
        "POST /sleep?level=2",
        "POST /wake_up?tags=weights",
        "POST /sleep?level=0&mode=wait",
        "POST /start_weight_update",
        "POST /update_weights",
        "POST /finish_weight_update",
        "POST /wake_up?tags=scheduling",
        "POST /wake_up?tags=kv_cache",
        "GET /is_sleeping",
    ]
    phases = {"sleep", "offload", "wake", "sync"} | ({"reload"} if moves_states else set())
    assert phases == {name.removeprefix("timing_s/") for name in timer.metrics()} - {"step", "other"}
    moved = rig.fleet.take_metrics()["turns/moved_gb"]
    assert moved == (6 * 91 if moves_states else 0)  # two engines: out, back, and out again
    assert rig.fleet.take_metrics() == {"turns/moved_gb": 0.0}
    assert [server.weights for server in two_servers] == [1, 1]
    assert rig.crimes() == []


def test_ranks_that_compute_between_two_steps_have_the_memory_and_give_it_back(
    two_servers: list[SleepingServer],
) -> None:
    rig = Rig(two_servers)
    with rig.client:
        rig.step(3)
        with rig.fleet.lending_memory():
            assert rig.ranks.actor.on_gpu
            assert rig.ranks.ref.on_gpu
            assert not any(server.gpu_tags for server in two_servers)
        assert [server.weights for server in two_servers] == [3, 3], "sleeping servers lose their weights"
        assert all(group.complete for group in rig.generate())
        rig.step(4)
    assert rig.crimes() == []


def test_the_pushed_weights_stay_and_those_of_other_models_move(two_servers: list[SleepingServer]) -> None:
    rig = Rig(two_servers)
    with rig.client:
        rig.step(0)
    assert not rig.ranks.actor.moves_params
    assert rig.ranks.ref.moves_params


@pytest.mark.parametrize("level", [1, 2])
def test_servers_sleep_before_models_are_built_however_a_lost_trainer_has_left_them(level: Any) -> None:
    """Awake, asleep, about to wake up, dead."""
    with sleeping_servers(4) as servers:
        for server in servers[1:3]:
            server.sleep(level)
        servers[2].wake_up(["weights"])
        servers[3].stop()
        group = ServerGroup([s.endpoint for s in servers], servers, 60.0)  # type: ignore[arg-type]
        put_to_sleep(group, level=level)
        assert [server.gpu_tags for server in servers] == [set()] * 4
        assert all(server.paused for server in servers[:3])
        assert servers[0].weights == (-1 if level == 1 else None)


def test_adapters_alone_keep_the_base_weights() -> None:
    assert (sleep_level(RolloutConfig(max_lora_rank=8)), sleep_level(RolloutConfig())) == (1, 2)


def test_turns_out_of_order_are_refused(two_servers: list[SleepingServer]) -> None:
    rig = Rig(two_servers)
    with rig.client:
        for call in (rig.turns.start_generation, rig.turns.start_training):
            with raises(RlRuntimeError, field="turn", value=Turn.TRAINING.value):
                call([], lambda _: threading.Lock())
        rig.step(0)
        with raises(RlRuntimeError, field="turn", value=Turn.GENERATION.value):
            rig.fleet.push(1)


def test_requests_wait_while_the_servers_sleep(two_servers: list[SleepingServer]) -> None:
    rig = Rig(two_servers)
    results: list[Any] = []
    with rig.client:
        rig.step(0)
        with rig.fleet.changing_weights():
            thread = threading.Thread(target=lambda: results.extend(rig.generate()))
            thread.start()
            time.sleep(0.2)
            assert not any("completions" in call for server in two_servers for call in server.calls)
            rig.fleet.push(1)
        thread.join(60)
    assert all(group.complete and group.samples[0].policy_version == 1 for group in results)
    assert len(results) == 2
    assert rig.crimes() == []


@pytest.mark.parametrize("fault", ["error", "hang"])
@pytest.mark.parametrize("action", ["sleep", "wake_up"])
def test_without_restarts_a_failure_names_the_server(
    two_servers: list[SleepingServer], action: str, fault: str
) -> None:
    rig = Rig(two_servers, max_restarts=0, timeout_s=1.0)
    with rig.client:
        rig.step(0)
        two_servers[1].faults[action] = fault
        with raises(RlRuntimeError, field="trainer.take_turns") as error:
            rig.step(1)
    (server,) = error.value.__cause__.problems
    assert server == two_servers[1].endpoint.url
    assert ("out of memory" if fault == "error" else "timed out") in error.value.problem


@pytest.mark.parametrize(
    ("action", "fault"),
    # A server that says it has done what it has not is detected when it should serve.
    [*itertools.product(("sleep", "wake_up", "kv_cache"), ("error", "hang")), ("kv_cache", "lie")],
)
def test_a_server_that_does_not_follow_is_restarted_with_the_new_weights(
    two_servers: list[SleepingServer], action: str, fault: str
) -> None:
    """With the real watch. The trainer never waits for it, and works only when its memory is free."""
    rig = Rig(two_servers, timeout_s=1.0)
    bad = two_servers[1]
    with rig.client, rig.fleet:
        rig.step(0)
        bad.faults[action] = fault
        rig.step(1)
        assert two_servers[0].weights == 1
        wait_until(lambda: rig.fleet.num_restarts == 1)
        assert (bad.num_starts, bad.weights) == (1, 1)
        assert all(group.complete for group in rig.generate(4))
        rig.step(2)
    assert [server.weights for server in two_servers] == [2, 2]
    assert any(bad.endpoint.url in line for line in rig.lines)
    assert rig.crimes() == []


def test_a_server_that_dies_while_the_trainer_works_starts_when_the_servers_have_the_memory(
    two_servers: list[SleepingServer],
) -> None:
    rig = Rig(two_servers)
    with rig.client, rig.fleet:
        rig.step(0)
        with rig.fleet.changing_weights():
            two_servers[1].stop()
            wait_until(lambda: any("died" in line for line in rig.lines))
            time.sleep(0.3)
            assert two_servers[1].num_starts == 0, "it would need the memory that the trainer has"
            rig.fleet.push(1)
        wait_until(lambda: rig.fleet.num_restarts == 1)
        assert [server.weights for server in two_servers] == [1, 1]
        assert all(group.complete for group in rig.generate(4))
    assert rig.crimes() == []


def test_the_trainer_waits_for_a_server_that_starts(two_servers: list[SleepingServer]) -> None:
    rig = Rig(two_servers)
    loading = threading.Event()
    two_servers[1].wait_ready = lambda _: loading.wait(60)  # type: ignore[method-assign, assignment, return-value]
    with rig.client, rig.fleet:
        rig.step(0)
        two_servers[1].stop()
        wait_until(lambda: two_servers[1].num_starts == 1)
        assert all(group.complete for group in rig.generate()), "the other server generates meanwhile"
        thread = threading.Thread(target=rig.step, args=(1,))
        thread.start()
        time.sleep(0.3)
        assert rig.turns.turn is Turn.GENERATION
        loading.set()
        thread.join(60)
        assert rig.turns.turn is Turn.GENERATION
    assert [server.weights for server in two_servers] == [1, 1]
    assert rig.crimes() == []


def test_the_end_of_a_run_in_the_trainers_turn_starts_no_server(two_servers: list[SleepingServer]) -> None:
    rig = Rig(two_servers)

    def diverge() -> None:
        with rig.fleet:
            rig.step(0)
            with rig.fleet.changing_weights():
                two_servers[1].stop()
                wait_until(lambda: any("died" in line for line in rig.lines))
                raise RuntimeError("the policy diverged")

    with rig.client:
        with pytest.raises(RuntimeError, match="diverged"):
            diverge()
        assert two_servers[1].num_starts == 0


class AllOrders(RuleBasedStateMachine):
    """Steps, deaths, failures and restarts in any order."""

    notice_s = rollout_servers._NOTICE_S

    @initialize(moves_states=st.booleans(), level=st.sampled_from([1, 2]), count=st.integers(1, 3))
    def begin(self, moves_states: bool, level: int, count: int) -> None:
        rollout_servers._NOTICE_S = 0.02
        self.context = sleeping_servers(count)
        self.servers = self.context.__enter__()

        def watch(_: Any, client: RolloutClient, **__: Any) -> ManualWatch:
            self.watch = ManualWatch(self.servers, client)
            return self.watch

        self.rig = Rig(self.servers, moves_states=moves_states, level=level, watch=watch, timeout_s=20.0)
        self.moves_states, self.version = moves_states, 0
        self.rig.step(0)

    def teardown(self) -> None:
        rollout_servers._NOTICE_S = self.notice_s
        if hasattr(self, "context"):
            self.rig.client.close()
            self.context.__exit__(None, None, None)

    def up(self) -> list[SleepingServer]:
        return [server for server in self.servers if server.alive]

    @rule()
    def train(self) -> None:
        self.version += 1
        self.rig.step(self.version)

    @precondition(lambda self: self.up())
    @rule()
    def generate(self) -> None:
        for group in self.rig.generate():
            assert group.complete
            assert all(sample.policy_version == self.version for sample in group.samples)

    @precondition(lambda self: self.up())
    @rule(data=st.data())
    def die(self, data: st.DataObject) -> None:
        server = data.draw(st.sampled_from(self.up()))
        self.watch.restart(server.index)

    @precondition(lambda self: self.up())
    @rule(data=st.data(), action=st.sampled_from(["sleep", "wake_up", "update_weights"]))
    def fail_in_the_next_step(self, data: st.DataObject, action: str) -> None:
        server = data.draw(st.sampled_from(self.up()))
        server.faults[action] = "error"
        if action == "update_weights":
            del server.faults[action]
            self.rig.actor.fails = True
        self.version += 1
        self.rig.step(self.version)
        self.rig.actor.fails = False
        server.faults.clear()

    @precondition(lambda self: len(self.up()) < len(self.servers))
    @rule(data=st.data())
    def restart(self, data: st.DataObject) -> None:
        server = data.draw(st.sampled_from([server for server in self.servers if not server.alive]))
        with self.rig.fleet._with_memory(server.index):
            server.start()
            assert self.rig.fleet._push_to_restarted(server.index, server.endpoint) == self.version
        self.rig.client.dispatcher.unblock(server.index)

    @invariant()
    def servers_hold_the_weights_and_the_memory(self) -> None:
        if not hasattr(self, "rig"):
            return
        assert self.rig.crimes() == []
        assert self.rig.turns.turn is Turn.GENERATION
        assert self.rig.ranks.actor.on_gpu != self.moves_states
        for server in self.up():
            assert server.gpu_tags == {"weights", "kv_cache"}
            assert not server.paused
            assert server.weights == self.version


AllOrders.TestCase.settings = settings(deadline=None, max_examples=20, stateful_step_count=10)
test_any_order_of_steps_failures_and_restarts = AllOrders.TestCase
