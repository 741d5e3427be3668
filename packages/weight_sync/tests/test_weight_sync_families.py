"""Other architectures, and a server that dies: Llama with a head of its own, Phi-3 whose projections are fused."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import weight_sync_helpers as helpers
from weight_sync_helpers import Server, assert_serves

from weight_sync import ModuleSource, SyncConfig, WeightPusher, WeightSyncError

pytestmark = pytest.mark.slow

FAMILIES = {"llama": False, "phi3": False, "qwen2": True}


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, tuple[Server, Path]]]:
    """One server a family, started side by side."""
    running = {}
    try:
        for family, tied in FAMILIES.items():
            folder = tmp_path_factory.mktemp(family)
            helpers.save_model(helpers.tiny_model(helpers.tiny_config(family, tied=tied), seed=1), folder / "model")
            running[family] = (helpers.start_server(folder / "model", folder / "server.log"), folder)
        for server, _ in running.values():
            helpers.wait_healthy(server)
        yield running
    finally:
        for server, _ in running.values():
            helpers.stop_server(server)


@pytest.mark.parametrize("family", FAMILIES)
def test_rollout_and_trainer_agree(family: str, servers: dict[str, tuple[Server, Path]]) -> None:
    server, _ = servers[family]
    model = helpers.tiny_model(helpers.tiny_config(family, tied=FAMILIES[family]), seed=2)
    with WeightPusher(ModuleSource(model), [server], SyncConfig(verify=True)) as pusher:
        pusher.push(1)
    difference = assert_serves(server, model)
    print(f"{family}: mean absolute log-prob difference {difference:.2e}")
    assert difference <= 1e-4


def test_a_server_that_dies_in_the_middle_and_comes_back(
    servers: dict[str, tuple[Server, Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    server, folder = servers["llama"]
    model = helpers.tiny_model(helpers.tiny_config("llama", tied=False), seed=3)
    source = KillsAServer(model)
    monkeypatch.setattr(SyncConfig, "bucket_bytes", 40_000)
    with WeightPusher(source, [server]) as pusher:
        pusher.push(1)
        source.process_group = server.process.pid
        with pytest.raises(WeightSyncError, match="version 2 was not published"):
            pusher.push(2)
        source.process_group = None
        server.process.wait(20)
        port = int(server.url.rpartition(":")[2])
        again = helpers.start_server(folder / "model", folder / "again.log", port=port)
        try:
            helpers.wait_healthy(again)
            assert pusher.push(3).num_attempts == 1
            assert_serves(again, model)
        finally:
            helpers.stop_server(again)


class KillsAServer(ModuleSource):
    """Kills a process group while it is asked for the fourth bucket."""

    process_group: int | None = None

    def fill(self, bucket: Any, out: Any) -> None:
        if bucket.index == 3 and self.process_group is not None:
            os.killpg(self.process_group, signal.SIGKILL)
        super().fill(bucket, out)
