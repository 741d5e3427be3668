"""Other architectures and several servers: Llama on one worker and on two, Phi-3 with fused projections."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import weight_sync_helpers as helpers
from weight_sync_helpers import Server, assert_serves

from weight_sync import ModuleSource, ReceiverError, SyncConfig, WeightPusher, WeightSyncError

pytestmark = pytest.mark.slow

Servers = dict[str, tuple[Server, Path]]


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    """Three servers: two of Llama, the second with tensor parallelism, and one of Phi-3."""
    running: Servers = {}
    try:
        for name, family, args in (("one", "llama", []), ("two", "llama", TWO_RANKS), ("phi3", "phi3", [])):
            folder = tmp_path_factory.mktemp(name)
            helpers.save_model(helpers.tiny_model(family, tied=False, seed=1), folder / "model")
            server = helpers.start_server(folder / "model", folder / "server.log", extra_args=args)
            running[name] = (server, folder)
        for server, _ in running.values():
            helpers.wait_healthy(server)
        yield running
    finally:
        for server, _ in running.values():
            helpers.stop_server(server)


TWO_RANKS = ["--tensor-parallel-size", "2"]


def check_agreement(name: str, server: Server, model: Any) -> None:
    difference = assert_serves(server, model)
    print(f"{name}: mean absolute log-prob difference {difference:.2e}")
    assert difference <= 1e-4


def test_fused_projections(servers: Servers) -> None:
    model = helpers.tiny_model("phi3", tied=False, seed=2)
    with WeightPusher(ModuleSource(model), [servers["phi3"][0]], SyncConfig(verify=True)) as pusher:
        pusher.push(1)
    check_agreement("phi3", servers["phi3"][0], model)


def test_tensor_parallel_server_recovers_after_failed_pushes(servers: Servers, monkeypatch: pytest.MonkeyPatch) -> None:
    server = servers["two"][0]
    model = helpers.tiny_model("llama", tied=False, seed=4)
    with monkeypatch.context() as patch, WeightPusher(ModuleSource(model), [server]) as pusher:
        helpers.flip_bytes(patch, 1)
        assert pusher.push(1).num_attempts == 2
        other = WeightPusher(ModuleSource(model), [server])
        with other, pytest.raises(WeightSyncError, match="owned by the live pusher"):
            other.push(2)
        check_agreement("llama on two ranks, resent", server, model)
    misfit = helpers.tiny_model("llama", tied=False, hidden=32, seed=4)
    with WeightPusher(ModuleSource(misfit), [server]) as pusher, pytest.raises(ReceiverError, match="plan"):
        pusher.push(3)
    assert helpers.is_paused(server)
    model = helpers.tiny_model("llama", tied=False, seed=5)
    with WeightPusher(ModuleSource(model), [server]) as pusher:
        assert pusher.push(4).num_attempts == 1
    check_agreement("llama on two ranks, after a rejected plan", server, model)


def test_all_servers_or_none_and_a_restarted_server(servers: Servers, monkeypatch: pytest.MonkeyPatch) -> None:
    (one, _), (two, folder) = servers["one"], servers["two"]
    model = helpers.tiny_model("llama", tied=False, seed=2)
    source = ServerKillingSource(model)
    with WeightPusher(source, [one, two], SyncConfig(verify=True)) as pusher:
        pusher.push(1)
        check_agreement("llama", one, model)
        check_agreement("llama on two ranks", two, model)
    monkeypatch.setattr(SyncConfig, "bucket_bytes", lambda *_: 40_000)
    with WeightPusher(source, [one, two]) as pusher:
        source.process_group = two.process.pid
        with pytest.raises(WeightSyncError, match="version 2 was not published"):
            pusher.push(2)
        source.process_group = None
        two.process.wait(20)
        assert helpers.call(one, "GET", "/is_paused")[1] == {"is_paused": True}
        assert helpers.call(one, "GET", "/weight_info")[1] == {"weight_version": "1"}
        port = int(two.url.rpartition(":")[2])
        again = helpers.start_server(folder / "model", folder / "again.log", port=port)
        try:
            helpers.wait_healthy(again)
            assert pusher.push(3).num_attempts == 1
            for server in (one, again):
                assert_serves(server, model)
        finally:
            helpers.stop_server(again)


class ServerKillingSource(ModuleSource):
    """Kills a process group when it fills the fourth bucket."""

    process_group: int | None = None

    def fill(self, bucket: Any, out: Any) -> None:
        if bucket.index == 3 and self.process_group is not None:
            os.killpg(self.process_group, signal.SIGKILL)
        super().fill(bucket, out)
