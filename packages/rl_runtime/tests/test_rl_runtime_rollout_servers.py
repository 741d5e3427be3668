"""Pushes while servers die, with scripted servers and ranks; tests/ uses real ones."""

import asyncio
import threading
import time
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from plinth_testing import raises, wait_until
from rl_runtime.errors import RankError, RankLost, RlRuntimeError
from rl_runtime.rollout import servers as rollout_servers
from rl_runtime.rollout import watched_servers
from rl_runtime.rollout.servers import RolloutServers
from rl_runtime.rollout.watched_servers import WatchedServers
from rollout_vllm import ControlError, Endpoint, ServerDiedError, UnlabeledTokensError, WatchEvent
from weight_sync import ReceiverError, SyncConfig, SyncReport, WeightSyncError


@dataclass
class Server:
    alive: bool = True

    def stop(self) -> None:
        self.alive = False


@dataclass
class Servers:
    servers: list[Server]

    @property
    def endpoints(self) -> list[Endpoint]:
        return [Endpoint(f"http://{index}") for index in range(len(self.servers))]

    def check(self) -> None:
        if not all(server.alive for server in self.servers):
            raise ServerDiedError("killed", 0, None)


@dataclass
class Watch:
    """A watch that somebody else drives."""

    servers: list[Server]
    events: list[WatchEvent] = field(default_factory=list)
    aborted_restarts: bool = False

    def start(self) -> None: ...
    def stop(self, *, abort_restarts: bool) -> None:
        self.aborted_restarts = abort_restarts

    def restart(self, server: int) -> None:
        self.servers[server].stop()

    def check(self) -> None: ...


@dataclass
class Client:
    policy_version: int = -1

    def set_model(self, model: str | None) -> None:
        assert model is None

    def set_policy_version(self, version: int) -> None:
        self.policy_version = version


def report_of(version: int, transports: dict[str, str]) -> SyncReport:
    seconds = dict.fromkeys(("total_s", "pause_s", "gather_s", "transfer_s", "finish_s"), 0.0)
    return SyncReport(version=version, num_bytes=1, num_tensors=1, transports=transports, **seconds)


@dataclass
class Actor:
    """Keeps (urls, version) of every push; `on_push` may raise before it counts."""

    pushes: list[tuple[tuple[str, ...], int]] = field(default_factory=list)
    on_push: Any = None
    num_connects: int = 0
    transport: str = "shm"
    _urls: tuple[str, ...] = ()

    def connect_servers(
        self, endpoints: list[Endpoint], config: SyncConfig, adapter: str | None, version: int, *, base: bool
    ) -> None:
        self.num_connects += 1
        self._urls = tuple(endpoint.url for endpoint in endpoints)

    def push_weights(self, version: int) -> SyncReport:
        if self.on_push is not None:
            self.on_push()
        self.pushes.append((self._urls, version))
        return report_of(version, dict.fromkeys(self._urls, self.transport))


@dataclass
class Setting:
    fleet: RolloutServers
    servers: list[Server]
    watch: Watch
    actor: Actor
    client: Client
    lines: list[str]

    def note(self, server: int, event: Any) -> None:
        self.watch.events.append(WatchEvent(server, event, "it was killed", 0.0))


def fleet_of(
    servers: list[Server], client: Any, actor: Any, report: Any, *, max_restarts: int = 2, **options: Any
) -> RolloutServers:
    group: Any = Servers(servers)
    sync = SyncConfig(running_requests="keep") if options else SyncConfig()
    return RolloutServers(group, client, actor, sync, max_restarts=max_restarts, report=report, **options)


@pytest.fixture
def setting(monkeypatch: pytest.MonkeyPatch) -> Setting:
    monkeypatch.setattr(rollout_servers, "_NOTICE_S", 0.5)
    servers, actor, client, lines = [Server(), Server()], Actor(), Client(), list[str]()
    watch = Watch(servers)
    monkeypatch.setattr(watched_servers, "ServerWatch", lambda *args, **kwargs: watch)
    fleet = fleet_of(servers, client, actor, lines.append)
    return Setting(fleet, servers, watch, actor, client, lines)


BOTH, FIRST, SECOND = ("http://0", "http://1"), ("http://0",), ("http://1",)


def test_all_servers_are_pushed_to_over_one_connection(setting: Setting) -> None:
    for version in (0, 1, 2):
        assert setting.fleet.push(version) == report_of(version, dict.fromkeys(BOTH, "shm"))
    assert setting.actor.pushes == [(BOTH, 0), (BOTH, 1), (BOTH, 2)]
    assert setting.actor.num_connects == 1
    assert setting.client.policy_version == 2


def test_the_transports_are_reported_at_first_and_when_they_change(setting: Setting) -> None:
    setting.fleet.push(0)
    setting.fleet.push(1)
    setting.fleet._push_to_restarted(1, Endpoint("http://1"))
    setting.actor.transport = "tcp"
    setting.fleet._push_to_restarted(1, Endpoint("http://1"))
    assert setting.lines == ["weights: rank 0 -> http://0: shm; http://1: shm", "weights: rank 0 -> http://1: tcp"]


def test_a_dead_server_gets_no_pushes_until_it_has_the_current_weights(setting: Setting) -> None:
    setting.fleet.push(0)
    setting.servers[1].alive = False  # not noticed by the watch yet
    setting.fleet.push(1)
    setting.note(1, "died")
    setting.servers[1].alive = True  # started again; it holds the model folder's weights
    setting.fleet.push(2)
    assert setting.fleet._push_to_restarted(1, Endpoint("http://1")) == 2
    setting.fleet.push(3)
    assert setting.actor.pushes == [(BOTH, 0), (FIRST, 1), (FIRST, 2), (SECOND, 2), (BOTH, 3)]
    assert setting.fleet.num_restarts == 1


def test_without_servers_the_policy_version_still_advances(setting: Setting) -> None:
    for server in setting.servers:
        server.alive = False
    assert setting.fleet.push(1) is None
    assert setting.client.policy_version == 1
    assert setting.actor.pushes == []


def test_a_server_that_dies_in_a_push_is_left_out_of_the_next_attempt(setting: Setting) -> None:
    def die() -> None:
        setting.actor.on_push = None
        threading.Timer(0.2, lambda: setattr(setting.servers[0], "alive", False)).start()
        raise RankError("connection lost")

    setting.actor.on_push = die
    assert setting.fleet.push(4) == report_of(4, dict.fromkeys(SECOND, "shm"))
    assert setting.actor.pushes == [(SECOND, 4)]


@pytest.mark.parametrize(
    "cause", [WeightSyncError("no answer"), ReceiverError("checksum", "lm_head.weight", "altered on its way")]
)
def test_servers_that_stay_paused_after_a_push_are_restarted(setting: Setting, cause: WeightSyncError) -> None:
    def fail() -> None:
        setting.actor.on_push = None
        raise RankError("sent twice", cause)

    setting.actor.on_push = fail
    assert setting.fleet.push(4) is None
    assert [server.alive for server in setting.servers] == [False, False]
    assert setting.client.policy_version == 4
    assert "push failed: sent twice" in setting.lines[0]
    for index in (0, 1):
        setting.note(index, "died")
        setting.servers[index].alive = True
        assert setting.fleet._push_to_restarted(index, Endpoint(f"http://{index}")) == 4
    setting.fleet.push(5)
    assert setting.actor.pushes == [(FIRST, 4), (SECOND, 4), (BOTH, 5)]


@pytest.mark.parametrize("cause", [None, ValueError("a rank's own"), ReceiverError("plan", "lm_head.weight", "shape")])
def test_a_push_that_a_restart_cannot_fix_is_an_error(setting: Setting, cause: Exception | None) -> None:
    def fail() -> None:
        raise RankError("it failed", cause)

    setting.actor.on_push = fail
    with pytest.raises(RankError, match="it failed"):
        setting.fleet.push(4)
    assert setting.client.policy_version == -1
    assert all(server.alive for server in setting.servers)


def test_a_rank_that_is_lost_while_servers_restart_is_not_their_fault(setting: Setting) -> None:
    """The watch gives up both servers; the loop gets the loss of the rank, which new ranks can make good."""

    def fail() -> None:
        raise RankLost("rank 0 of 2 died in 'push_weights'")

    setting.fleet.push(0)
    setting.fleet.check()
    setting.actor.on_push = fail
    for index in (0, 1):
        setting.note(index, "died")
        with pytest.raises(RankLost):
            setting.fleet._push_to_restarted(index, Endpoint(f"http://{index}"))
        setting.note(index, "given_up")
    with pytest.raises(RankLost):
        setting.fleet.check()


def test_a_restarted_server_waits_while_weights_change(setting: Setting) -> None:
    setting.fleet.push(0)
    setting.note(0, "died")
    with setting.fleet.changing_weights():
        thread = threading.Thread(target=setting.fleet._push_to_restarted, args=(0, Endpoint("http://0")))
        thread.start()
        time.sleep(0.2)
        assert len(setting.actor.pushes) == 1, "a push went out between two updates of one step"
        setting.fleet.push(1)
    thread.join(60)
    assert setting.actor.pushes == [(BOTH, 0), (SECOND, 1), (FIRST, 1)]


def test_the_end_of_a_run_waits_for_no_restart_and_no_server_gets_weights_after_it(setting: Setting) -> None:
    with setting.fleet:
        setting.fleet.push(0)
    assert setting.watch.aborted_restarts
    with pytest.raises(RlRuntimeError):
        setting.fleet._push_to_restarted(0, Endpoint("http://0"))


def test_events_are_reported_once(setting: Setting) -> None:
    setting.note(1, "died")
    setting.fleet.check()
    setting.note(1, "given_up")
    setting.fleet.check()
    setting.fleet.check()
    assert setting.lines == ["rollout server 1 died: it was killed", "rollout server 1 given up: it was killed"]


def test_events_are_reported_while_the_loop_waits(setting: Setting) -> None:
    with setting.fleet:
        setting.note(0, "died")
        wait_until(lambda: setting.lines)
    assert setting.lines == ["rollout server 0 died: it was killed"]


@dataclass
class LabelingClient(Client):
    """Servers label tokens with the version that they got last; those in `dead` do not answer."""

    dead: list[int] = field(default_factory=list)
    asked: list[list[int]] = field(default_factory=list)
    label: int | None = None
    error: type[ControlError] = ControlError

    async def fetch_policy_versions(self, servers: list[int]) -> list[int]:
        self.asked.append(servers)
        if problems := {f"http://{i}": "no answer" for i in servers if i in self.dead}:
            raise self.error("policy versions", problems)
        return [self.policy_version if self.label is None else self.label] * len(servers)

    def run(self, coroutine: Any) -> Any:
        return asyncio.run(coroutine)


def labeled(setting: Setting, client: Any) -> RolloutServers:
    """The same servers, whose requests run through a push."""
    return fleet_of(setting.servers, client, setting.actor, setting.lines.append, holds_requests=True)


def test_a_server_that_dies_after_a_push_is_not_asked_for_its_labels(setting: Setting) -> None:
    client = LabelingClient()
    fleet = labeled(setting, client)
    fleet.push(0)
    setting.servers[0].alive = False
    fleet.push(1)
    client.dead.append(1)
    threading.Timer(0.2, lambda: setattr(setting.servers[1], "alive", False)).start()
    fleet.push(2)
    assert client.asked == [[0, 1], [1], [1]]


def test_servers_that_live_have_to_label_tokens(setting: Setting) -> None:
    client = LabelingClient()
    fleet = labeled(setting, client)
    client.label = 3
    with raises(RlRuntimeError, field="sync.running_requests", value="keep", allowed="wait"):
        fleet.push(4)
    client.dead.append(0)
    with raises(RlRuntimeError, field="sync.running_requests", value="keep", allowed="wait"):
        fleet.push(5)


def test_servers_without_labels_are_named_at_once(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollout_servers, "_NOTICE_S", 100.0)
    client = LabelingClient(dead=[1], error=UnlabeledTokensError)
    with raises(RlRuntimeError, field="sync.running_requests", value="keep", allowed="wait"):
        labeled(setting, client).push(0)
    assert client.asked == [[0, 1]], "it is not asked again"


def test_without_restarts_a_dead_server_ends_the_run(setting: Setting) -> None:
    fleet = fleet_of([Server(), Server(alive=False)], Client(), Actor(), print, max_restarts=0)
    with fleet, pytest.raises(ServerDiedError):
        fleet.check()


def test_a_report_that_fails_is_made_again_and_raised_by_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk or a closed terminal does not end the thread that reports."""
    said, full = list[str](), threading.Event()

    def report(line: str) -> None:
        if full.is_set():
            raise OSError(28, "No space left on device")
        said.append(line)

    events = [WatchEvent(0, "died", "by itself", 0.0)]
    watch = SimpleNamespace(events=events, start=lambda: None, stop=lambda **_: None, check=lambda: None)
    monkeypatch.setattr(watched_servers, "ServerWatch", lambda *_, **__: watch)
    group: Any = None
    servers = WatchedServers(group, group, kind="rollout server", max_restarts=1, report=report)
    full.set()
    servers.start()
    with pytest.raises(OSError, match="No space left"):
        servers.check()
    time.sleep(0.6)  # the thread fails as well
    full.clear()
    events.append(WatchEvent(0, "restarted", "policy version 4", 0.0))
    wait_until(lambda: len(said) == 2)
    assert said == ["rollout server 0 died: by itself", "rollout server 0 restarted: policy version 4"]
    servers.close()
