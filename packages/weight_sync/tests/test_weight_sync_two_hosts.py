"""One push into a server on this host over shared memory and into one on another host over TCP: all or nothing."""

import json
import os
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import weight_sync_helpers as helpers
from weight_sync_helpers import Server, ServerKillingSource, assert_serves, flip_bytes, is_paused

from plinth_testing import NetworkHost, free_port, network_hosts, raises, start_process, stop_process, wait_until
from plinth_testing.network_hosts import is_available
from weight_sync import ModuleSource, ReceiverError, SyncConfig, SyncConfigError, WeightPusher
from weight_sync.channel import Channel

pytestmark = [
    pytest.mark.slow,
    pytest.mark.long,
    pytest.mark.skipif(not is_available(), reason="network namespaces need root and the kernel's permission"),
]


@pytest.fixture(scope="module")
def host() -> Iterator[NetworkHost]:
    """The other host."""
    with network_hosts(1) as (host,):
        yield host


@pytest.fixture(scope="module")
def starting(host: NetworkHost, old_model: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server on the other host, which starts while the one on this host does."""
    folder = tmp_path_factory.mktemp("weight_sync_far")
    helpers.save_model(old_model, folder / "model")
    server = helpers.start_server(folder / "model", folder / "server.log", host=host)
    yield server
    helpers.stop_server(server)


@pytest.fixture(scope="module")
def servers(starting: Server, server: Server) -> list[Server]:
    """The server on this host, and the one on the other."""
    helpers.wait_healthy(starting)
    return [server, starting]


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SyncConfig, "bucket_bytes", lambda *_: 60_000)


@dataclass
class Resources:
    """Threads and descriptors that a pusher may leave behind in this process."""

    threads: set[str]
    descriptors: list[str]

    @classmethod
    def now(cls) -> "Resources":
        threads = {thread.name for thread in threading.enumerate() if thread.name.startswith("weight_sync")}
        links = (f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd"))
        return cls(threads, sorted(os.readlink(link) for link in links if os.path.islink(link)))


def transports_of(servers: list[Server]) -> dict[str, str]:
    return {servers[0].url: "shm", servers[1].url: "tcp"}


def assert_all_serve(servers: list[Server], model: Any, version: int) -> None:
    for server in servers:
        helpers.assert_reports_version(server, version)
        assert assert_serves(server, model) <= 1e-4


def corrupt_tcp(monkeypatch: pytest.MonkeyPatch, times: int) -> None:
    """Changes a byte of the first ``times`` buckets on their way over TCP; shared memory has the right ones."""
    send_bytes = Channel.send_bytes
    left = [times]

    def send_changed(self: Channel, view: memoryview) -> None:
        if left[0]:
            left[0] -= 1
            view = memoryview(view.tobytes()[:-1] + bytes([view[-1] ^ 1]))
        send_bytes(self, view)

    monkeypatch.setattr(Channel, "send_bytes", send_changed)


def test_each_server_gets_the_weights_over_its_own_transport(servers: list[Server], new_model: Any) -> None:
    before = Resources.now()
    source = ServerKillingSource(ModuleSource(new_model))
    with WeightPusher(source, servers, SyncConfig(verify=True)) as pusher:
        report = pusher.push(1)
        assert report.transports == transports_of(servers)
        assert report.num_attempts == 1
        assert len(source.num_fills) > 5
        assert set(source.num_fills.values()) == {2}, "each bucket is filled once to load it and once to verify it"
        assert pusher.push(2).transports == report.transports
    assert_all_serve(servers, new_model, 2)
    wait_until(lambda: Resources.now() == before, 10)


def test_a_bucket_that_one_transport_corrupts_is_resent_to_all(
    servers: list[Server], old_model: Any, new_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with WeightPusher(ModuleSource(old_model), servers) as pusher:
        pusher.push(1)
    before = Resources.now()
    with monkeypatch.context() as patch, WeightPusher(ModuleSource(new_model), servers) as pusher:
        corrupt_tcp(patch, 1)
        assert pusher.push(2).num_attempts == 2
        assert_all_serve(servers, new_model, 2)
        corrupt_tcp(patch, 100)
        with raises(ReceiverError, kind="checksum") as caught:
            pusher.push(3)
        assert caught.value.where.startswith(f"{servers[1].url} worker")
        assert [is_paused(server) for server in servers] == [True, True]
    wait_until(lambda: Resources.now() == before, 10)
    with monkeypatch.context() as patch, WeightPusher(ModuleSource(old_model), servers) as pusher:
        flip_bytes(patch, 1, from_index=4)  # in the buffer that both transports send from
        assert pusher.push(4).num_attempts == 2
    assert_all_serve(servers, old_model, 4)


def test_a_transport_that_does_not_reach_one_server_is_refused_before_any_is_claimed(
    servers: list[Server], old_model: Any
) -> None:
    with WeightPusher(ModuleSource(old_model), servers) as pusher:
        pusher.push(1)
        with raises(SyncConfigError, field="transport", value="shm"):
            WeightPusher(ModuleSource(old_model), servers, SyncConfig(transport="shm"))
        assert [is_paused(server) for server in servers] == [False, False]
        pusher.push(2)
    with WeightPusher(ModuleSource(old_model), servers, SyncConfig(transport="tcp")) as pusher:
        assert set(pusher.push(3).transports.values()) == {"tcp"}
    assert_all_serve(servers, old_model, 3)


def test_ranks_on_two_hosts_push_by_the_plan_of_rank_0(
    host: NetworkHost, servers: list[Server], new_model: Any, tmp_path: Path
) -> None:
    """Seen from rank 1's host, the transports would be the other way round."""
    folder = helpers.save_model(new_model, tmp_path / "model")
    arguments = [json.dumps({"url": server.url, "api_key": server.api_key}) for server in servers]
    command = [
        sys.executable,
        str(Path(__file__).with_name("weight_sync_two_hosts_worker.py")),
        str(folder),
        *arguments,
    ]
    shared = {"MASTER_ADDR": host.machine_address, "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    logs = [tmp_path / f"rank_{rank}" for rank in range(2)]
    here = {"RANK": "0", "GLOO_SOCKET_IFNAME": host.machine_interface}
    there = {"RANK": "1", "GLOO_SOCKET_IFNAME": "eth0"}
    ranks = [
        start_process(command, logs[0], shared | here),
        start_process(host.command(*command), logs[1], shared | there),
    ]
    codes = [rank.wait(120) for rank in ranks]
    for rank in ranks:
        stop_process(rank, grace_s=0.0)
    texts = [log.read_text() for log in logs]
    assert codes == [0, 0], "".join(texts)
    (*reports, refused), (*reports_there, accepted) = (text.splitlines()[-4:] for text in texts)
    assert reports_there == reports
    assert (refused, accepted) == ("refused", "accepted"), "only rank 0 talks to servers"
    transports, attempts, num_buckets = zip(*map(json.loads, reports), strict=True)
    both = transports_of(servers)
    assert list(transports) == [{servers[0].url: "shm"}, {servers[1].url: "tcp"}, both]
    assert attempts == (1, 1, 1)
    assert num_buckets[0] == num_buckets[2] > num_buckets[1], "one plan, with the smallest bound"
    assert_all_serve(servers, new_model, 9)
