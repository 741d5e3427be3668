"""A real vLLM server on the CPU: correct weights after a push, and recovery after every kind of failure."""

import dataclasses
import signal
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import weight_sync_helpers as helpers
from torch import nn
from weight_sync_helpers import ChangedSource, Server, assert_serves, flip_bytes, is_paused

from plinth_testing import raises, start_process
from weight_sync import (
    ModuleSource,
    ReceiverError,
    ServerError,
    SyncConfig,
    WeightPusher,
    WeightSyncError,
    check_server,
)

pytestmark = pytest.mark.slow


@pytest.fixture
def recovered(server: Server, new_model: Any) -> Iterator[Server]:
    """The server; after the test a plain push must recover it."""
    yield server
    with WeightPusher(ModuleSource(new_model), [server]) as pusher:
        assert pusher.push(1).num_attempts == 1
    assert_serves(server, new_model)


def test_greedy_output_and_log_probs_match_the_pushed_model(server: Server, old_model: Any, new_model: Any) -> None:
    with WeightPusher(ModuleSource(new_model), [server]) as pusher:
        report = pusher.push(7)
        assert assert_serves(server, new_model) <= 1e-4
        assert report.version == 7
        assert report.num_bytes == sum(p.numel() * 4 for p in new_model.parameters())
        helpers.assert_reports_version(server, 7)
    with WeightPusher(ModuleSource(old_model), [server], SyncConfig(checksum=False)) as pusher:
        pusher.push(13)
    assert assert_serves(server, old_model) <= 1e-4


def test_push_drops_the_prefix_cache(server: Server, old_model: Any, new_model: Any) -> None:
    prompt = [7] * 64
    for model in (old_model, new_model, old_model):
        with WeightPusher(ModuleSource(model), [server]) as pusher:
            pusher.push(1)
        for _ in range(2):
            assert helpers.generate(server, prompt)[0] == helpers.expected(model, prompt)


def test_running_requests_finish_with_the_old_policy(server: Server, old_model: Any, new_model: Any) -> None:
    num_tokens = 100
    with WeightPusher(ModuleSource(old_model), [server]) as pusher:
        pusher.push(1)
    with ThreadPoolExecutor(len(helpers.PROMPTS)) as pool, WeightPusher(ModuleSource(new_model), [server]) as pusher:
        running = [pool.submit(helpers.generate, server, prompt, num_tokens) for prompt in helpers.PROMPTS]
        time.sleep(0.1)
        pusher.push(2)
        for prompt, future in zip(helpers.PROMPTS, running, strict=True):
            expected = [helpers.expected(model, prompt, num_tokens) for model in (old_model, new_model)]
            assert future.result()[0] in expected  # from one policy, never a mix of both
    assert_serves(server, new_model)


def test_repeated_corruption_leaves_the_server_paused(
    recovered: Server, old_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    flip_bytes(monkeypatch, 100)
    with WeightPusher(ModuleSource(old_model), [recovered]) as pusher, pytest.raises(ReceiverError) as caught:
        pusher.push(3)
    assert caught.value.kind == "checksum"
    assert "model.embed_tokens.weight" in str(caught.value)
    assert is_paused(recovered)
    with pytest.raises(OSError):
        helpers.generate(recovered, [5, 6, 7], timeout_s=1.0)


def test_mismatched_plan_is_rejected_by_tensor_name(recovered: Server, new_model: Any) -> None:
    upper = "model.layers.1.mlp.upper_proj.weight"
    cases: list[tuple[str, dict[str, Any] | None, str]] = [
        ("model.layers.0.self_attn.v_proj.weight", None, "model.layers.0.self_attn.qkv_proj.weight"),
        ("model.layers.0.self_attn.k_proj.weight", {"shape": (128, 64)}, ""),
        ("model.norm.weight", {"shape": (32,)}, ""),
        ("model.layers.1.mlp.up_proj.weight", {"name": upper}, upper),
    ]
    for name, changes, named in cases:
        source = ChangedSource(ModuleSource(new_model), name, changes)
        with WeightPusher(source, [recovered]) as pusher, raises(ReceiverError, kind="plan", tensor=named or name):
            pusher.push(2)
        assert is_paused(recovered)


def test_check_server_on_a_real_server(server: Server) -> None:
    check_server(server)
    with raises(ServerError, step="GET /get_world_size", status=0):
        check_server(SimpleNamespace(url="http://127.0.0.1:9", api_key=None))


def test_second_pusher_is_rejected_while_the_first_is_open(server: Server, old_model: Any, new_model: Any) -> None:
    with WeightPusher(ModuleSource(new_model), [server]) as first:
        first.push(1)
        second = WeightPusher(ModuleSource(old_model), [server])
        with second, pytest.raises(WeightSyncError) as caught:
            second.push(1)
        helpers.assert_not_claimed(caught.value)
        assert not is_paused(server)
        assert_serves(server, new_model)
        first.push(2)
    with WeightPusher(ModuleSource(old_model), [server]) as second:
        second.push(3)
    assert_serves(server, old_model)
    models = [old_model, new_model]
    pushers = [WeightPusher(ModuleSource(model), [server]) for model in models]
    with ThreadPoolExecutor(2) as pool, pushers[0], pushers[1]:
        futures = [pool.submit(pusher.push, 4) for pusher in pushers]
        errors = [future.exception() for future in futures]
        (winner,) = [model for model, error in zip(models, errors, strict=True) if error is None]
        (error,) = [error for error in errors if error is not None]
        helpers.assert_not_claimed(error)
    assert_serves(server, winner)


def test_unreachable_server_is_named_before_any_server_is_paused(server: Server, new_model: Any) -> None:
    gone = dataclasses.replace(server, url=f"http://127.0.0.1:{helpers.free_port()}")
    with WeightPusher(ModuleSource(new_model), [server, gone]) as pusher:
        with pytest.raises(WeightSyncError) as caught:
            pusher.push(1)
        assert isinstance(caught.value.__cause__, ServerError)
        assert (caught.value.__cause__.url, caught.value.__cause__.status) == (gone.url, 0)
    assert not is_paused(server)


def test_push_over_tcp_in_buckets_that_divide_layers(
    recovered: Server, old_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SyncConfig, "bucket_bytes", lambda *_: 10_000)
    with WeightPusher(ModuleSource(old_model), [recovered], SyncConfig(transport="tcp")) as pusher:
        for version in (1, 2):
            assert pusher.push(version).num_attempts == 1
        assert pusher._plan is not None
        assert len(pusher._plan.buckets) > 15
        assert_serves(recovered, old_model)
        flip_bytes(monkeypatch, 1)
        assert pusher.push(3).num_attempts == 2
    assert_serves(recovered, old_model)


def test_push_through_layerwise_reload(
    recovered: Server, old_model: Any, new_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SyncConfig, "bucket_bytes", lambda *_: 30_000)
    with WeightPusher(ModuleSource(old_model), [recovered], SyncConfig(apply="layerwise", verify=True)) as pusher:
        assert pusher.push(1).num_attempts == 1
        assert_serves(recovered, old_model)
    with WeightPusher(ModuleSource(new_model), [recovered], SyncConfig(apply="layerwise")) as pusher:
        flip_bytes(monkeypatch, 1, from_index=5)
        assert pusher.push(2).num_attempts == 2
    assert_serves(recovered, new_model)
    # a plan that is new to the server, after a layerwise reload has wrapped its weight loaders
    monkeypatch.setattr(SyncConfig, "bucket_bytes", lambda *_: 33_000)
    with WeightPusher(ModuleSource(old_model), [recovered]) as pusher:
        assert pusher.push(3).num_attempts == 1
    assert_serves(recovered, old_model)


def test_server_keeps_no_reference_to_shared_memory(server: Server, new_model: Any) -> None:
    with WeightPusher(ModuleSource(new_model), [server]) as pusher:
        pusher.push(1)
        assert pusher._session is not None
        for segment in pusher._session._senders.of(0)._memory:
            segment.bytes_N.fill_(0xAB)
        assert_serves(server, new_model)


class ChangingSource:
    """Writes different bytes for one tensor in every pass."""

    def __init__(self, model: nn.Module, name: str) -> None:
        self._source = ModuleSource(model)
        self._name, self._num_fills = name, 0

    def manifest(self) -> Any:
        return self._source.manifest()

    def fill(self, bucket: Any, out: torch.Tensor) -> None:
        self._source.fill(bucket, out)
        for slot in bucket.slots:
            if slot.name == self._name:
                self._num_fills += 1
                out[slot.offset + 5] += self._num_fills


def test_verify_compares_every_byte(recovered: Server, new_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SyncConfig, "bucket_bytes", lambda *_: 60_000)
    config = SyncConfig(verify=True)
    with WeightPusher(ModuleSource(new_model), [recovered], config) as pusher:
        assert pusher.push(1).num_attempts == 1
    assert_serves(recovered, new_model)
    gate = "model.layers.1.mlp.gate_up_proj.weight"
    for name, named in (("model.layers.1.mlp.up_proj.weight", gate), ("model.norm.weight", "model.norm.weight")):
        pusher = WeightPusher(ChangingSource(new_model, name), [recovered], config)
        with pusher, raises(ReceiverError, tensor=named):
            pusher.push(2)
        assert is_paused(recovered)


def test_pusher_killed_during_a_push_leaves_the_server_paused(
    recovered: Server, old_model: Any, tmp_path: Path
) -> None:
    helpers.save_model(old_model, tmp_path / "model")
    script = Path(__file__).with_name("weight_sync_killed_pusher.py")
    command = [sys.executable, str(script), str(tmp_path / "model"), recovered.url]
    pusher = start_process(command, tmp_path / "pusher.log")
    assert pusher.wait(120) == -signal.SIGKILL, (tmp_path / "pusher.log").read_text()
    assert is_paused(recovered)
