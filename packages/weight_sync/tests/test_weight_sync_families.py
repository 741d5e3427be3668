"""Other architectures and several servers: experts on one worker and on two, Phi-3 with fused projections.

The thorough test goes through the families that vLLM's CPU build can serve, in one process.
"""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import weight_sync_helpers as helpers
from weight_sync_helpers import Server, assert_serves

from weight_sync import HfFolderSource, ModuleSource, ReceiverError, SyncConfig, WeightPusher, WeightSyncError

pytestmark = pytest.mark.slow

Servers = dict[str, tuple[Server, Path]]


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    """Three servers: two of Qwen3-MoE, the second with tensor parallelism, and one of Phi-3."""
    running: Servers = {}
    try:
        for name, family, args in (("one", "qwen3_moe", []), ("two", "qwen3_moe", TWO_RANKS), ("phi3", "phi3", [])):
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


def experts(*, seed: int, hidden: int = 64) -> Any:
    return helpers.tiny_model("qwen3_moe", tied=False, hidden=hidden, seed=seed)


def folder_of(model: Any, folder: Path) -> HfFolderSource:
    """The model's tensors under the names of its folder: transformers fuses experts after loading."""
    return HfFolderSource(helpers.save_model(model, folder))


def test_fused_projections(servers: Servers) -> None:
    model = helpers.tiny_model("phi3", tied=False, seed=2)
    with WeightPusher(ModuleSource(model), [servers["phi3"][0]], SyncConfig(verify=True)) as pusher:
        pusher.push(1)
    check_agreement("phi3", servers["phi3"][0], model)


def test_tensor_parallel_server_recovers_after_failed_pushes(
    servers: Servers, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    server = servers["two"][0]
    model = experts(seed=4)
    source = folder_of(model, tmp_path / "4")
    with monkeypatch.context() as patch, WeightPusher(source, [server]) as pusher:
        helpers.flip_bytes(patch, 1)
        assert pusher.push(1).num_attempts == 2
        other = WeightPusher(source, [server])
        with other, pytest.raises(WeightSyncError, match="owned by the live pusher"):
            other.push(2)
        check_agreement("experts on two ranks, resent", server, model)
    misfit = experts(hidden=128, seed=4)
    with (
        WeightPusher(folder_of(misfit, tmp_path / "misfit"), [server]) as pusher,
        pytest.raises(ReceiverError, match="plan"),
    ):
        pusher.push(3)
    assert helpers.is_paused(server)
    model = experts(seed=5)
    with WeightPusher(folder_of(model, tmp_path / "5"), [server]) as pusher:
        assert pusher.push(4).num_attempts == 1
    check_agreement("experts on two ranks, after a rejected plan", server, model)


@pytest.mark.parametrize("apply", ["auto", "layerwise"])
def test_experts_are_packed_again_and_verified_in_that_form(servers: Servers, apply: Any, tmp_path: Path) -> None:
    server, folder = servers["one"]
    before = [helpers.generate(server, prompt) for prompt in helpers.PROMPTS]
    config = SyncConfig(verify=True, apply=apply)
    with WeightPusher(HfFolderSource(folder / "model"), [server], config) as pusher:
        assert pusher.push(1).num_attempts == 1
    assert [helpers.generate(server, prompt) for prompt in helpers.PROMPTS] == before
    model = experts(seed=7)
    with WeightPusher(folder_of(model, tmp_path / "other"), [server], config) as pusher:
        pusher.push(2)
    check_agreement(f"experts, {apply}", server, model)
    with WeightPusher(HfFolderSource(folder / "model"), [server], config) as pusher:
        pusher.push(3)
    assert "calls of replaced parts: {'process_weights_after_loading': 1}" in server.log.read_text()


def test_all_servers_or_none_and_a_restarted_server(
    servers: Servers, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (one, _), (two, folder) = servers["one"], servers["two"]
    model = experts(seed=2)
    source = ServerKillingSource(helpers.save_model(model, tmp_path / "model"))
    with WeightPusher(source, [one, two], SyncConfig(verify=True)) as pusher:
        pusher.push(1)
        check_agreement("experts", one, model)
        check_agreement("experts on two ranks", two, model)
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


class ServerKillingSource(HfFolderSource):
    """Kills a process group when it fills the fourth bucket."""

    process_group: int | None = None

    def fill(self, bucket: Any, out: Any) -> None:
        if bucket.index == 3 and self.process_group is not None:
            os.killpg(self.process_group, signal.SIGKILL)
        super().fill(bucket, out)
