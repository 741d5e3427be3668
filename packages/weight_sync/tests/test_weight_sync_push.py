"""A push: replies, the second pass, caches, the check of a server."""

import json
import os
import re
import time
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import weight_sync_helpers as helpers
from weight_sync_helpers import WHERE

from plinth_testing import raises
from weight_sync import (
    ModuleSource,
    ServerError,
    SyncConfig,
    SyncConfigError,
    WeightPusher,
    WeightSyncError,
    check_server,
    plan_buckets,
)
from weight_sync.errors import ChannelError
from weight_sync.push import server
from weight_sync.push.server import ServerControl
from weight_sync.push.session import Link, PushSession, Timings, _BucketFiller
from weight_sync.transports.nccl import NcclSender
from weight_sync.transports.select import SenderGroup
from weight_sync.vllm_plugin.adapters import _weights_mapper


@pytest.mark.parametrize("detail", ["CUDA out of memory", ""])
def test_error_of_a_worker_before_the_rendezvous_is_reported(rendezvous: Any, detail: str) -> None:
    store, pushers, workers = rendezvous
    sender = NcclSender.__new__(NcclSender)
    sender._comm, sender._store, sender._generation, sender._timeout_s = None, store, "5", 30.0
    sender._where = WHERE
    session = PushSession.__new__(PushSession)
    session._senders, session._config = SenderGroup([sender]), SyncConfig()
    links = [Link(channel, {"server": 0}, where) for channel, where in zip(pushers, WHERE, strict=True)]
    if detail:
        workers[1].send({"type": "error", "kind": "internal", "detail": detail})
    workers[1].close()
    push: Any = SimpleNamespace(links=links)
    bucket: Any = SimpleNamespace(index=0)
    with pytest.raises(WeightSyncError, match=detail or r"worker 0\.1: the other side closed") as caught:
        session._announce(push, bucket, None)
    assert WHERE[1] in str(caught.value)


@pytest.mark.parametrize("reply", [{"type": "taken", "value": 2}, {"type": "done", "value": 3}, {"type": "taken"}])
def test_a_reply_about_another_bucket_ends_the_push(rendezvous: Any, reply: dict[str, Any]) -> None:
    """A late reply would free a buffer that a worker still reads."""
    _, pushers, workers = rendezvous
    session = PushSession.__new__(PushSession)
    session._config = SyncConfig(timeout_s=5.0)
    push: Any = SimpleNamespace(links=[Link(*each) for each in zip(pushers, [{"server": 0}] * 2, WHERE, strict=True)])
    for worker in workers:
        worker.send({"type": "taken", "value": 3})
    session._await_replies(push, "taken", 3)
    workers[0].send({"type": "taken", "value": 3})
    workers[1].send(reply)
    with pytest.raises(ChannelError, match=re.escape(WHERE[1])):
        session._await_replies(push, "taken", 3)


@pytest.mark.parametrize(("verify", "num_passes"), [(False, 1), (True, 2)])
def test_a_rank_that_does_not_send_gathers_once_more_to_verify(verify: bool, num_passes: int, new_model: Any) -> None:
    source: Any = helpers.ServerKillingSource(ModuleSource(new_model))
    plan = plan_buckets(source.manifest(), 20_000)
    config = SyncConfig(verify=verify)
    assert WeightPusher(source, [], config, rank=1)._attempt(plan, 1) is None
    assert source.num_fills == dict.fromkeys(range(len(plan.buckets)), num_passes)
    fill: Any = SimpleNamespace(buffer=lambda bucket: torch.zeros(bucket.nbytes, dtype=torch.uint8))
    filler = _BucketFiller(source, plan, fill, Timings(), config)
    sums = [filler.fill_next() for _ in range(num_passes * len(plan.buckets))]
    assert sums == sums[: len(plan.buckets)] * num_passes
    with pytest.raises(StopIteration):
        filler.fill_next()


class Control:
    """A server that writes down what it is asked; its cache takes a while to drop, or cannot be dropped."""

    def __init__(self, done: list[str], error: Exception | None = None) -> None:
        self.done, self._error = done, error

    def drop_prefix_cache(self, _: str) -> None:
        time.sleep(0.1)
        if self._error is not None:
            raise self._error
        self.done.append("dropped")

    def drop_encoder_cache(self) -> None:
        self.drop_prefix_cache("")

    def finish(self, version: int) -> None:
        self.done.append(f"finished {version}")

    def resume(self) -> None:
        self.done.append("resumed")


def test_requests_resume_when_every_servers_cache_is_dropped() -> None:
    """Else a new request finds keys and values of the old policy."""
    done: list[str] = []
    session = PushSession.__new__(PushSession)
    session._config, session._adapter, session.timings = SyncConfig(), None, Timings()
    session._controls = [Control(done), Control(done)]  # type: ignore[list-item]
    session._publish(4)
    assert sorted(done[:6]) == ["dropped"] * 4 + ["finished 4"] * 2
    assert done[6:] == ["resumed"] * 2
    done.clear()
    failing = Control(done, ServerError("http://s", "POST /reset_prefix_cache", 500, "no"))
    session._controls = [Control(done), failing]  # type: ignore[list-item]
    with raises(ServerError, status=500):
        session._publish(5)
    assert "resumed" not in done


def test_servers_are_claimed_once_and_again_after_a_failed_push(new_model: Any) -> None:
    """A restarted server knows no pusher, and the push that finds this out fails."""
    calls: list[str] = []

    class Claimed(ServerControl):
        def claim(self, init_info: dict[str, Any]) -> None:
            calls.append(f"claim of {init_info['pid']}")

        def world_size(self) -> int:
            calls.append("size")
            return 1

    source = ModuleSource(new_model)
    plan = plan_buckets(source.manifest(), 20_000)
    session = PushSession([Claimed(URL, None, 5.0)], ["tcp"], SyncConfig(host="127.0.0.1"), torch.device("cpu"))
    failures = [None, ServerError(URL, "POST /update_weights", 500, "no owner"), None, None]
    for failure in failures:
        with patch.object(PushSession, "_transfer", side_effect=failure), patch.object(PushSession, "_publish"):
            error = session.send(source, plan, 1, must_fill_all=False)
        assert error is failure
    session.close()
    assert calls == [f"claim of {os.getpid()}", "size"] * 2


def _vllm_config(backend: str | None) -> dict[str, Any]:
    return {"weight_transfer_config": {"backend": backend} if backend else None, "model_config": {}}


URL = "http://127.0.0.1:8000"
REACHABLE: dict[str, tuple[int, Any]] = {"/get_world_size": (200, {"world_size": 1})}


def answering(answers: dict[str, tuple[int, Any]]) -> Any:
    """A server with these answers by path, and 404 for any other path."""

    def call(_: Any, __: str, path: str, *___: Any, **____: Any) -> tuple[int, str]:
        status, body = answers.get(path.partition("?")[0], (404, {"detail": "Not Found"}))
        return status, json.dumps(body)

    return patch.object(server, "call", call)


@pytest.mark.parametrize(
    "answer",
    [
        (200, {"vllm_config": _vllm_config("plinth")}),
        (404, {}),  # a release that does not report its backend
        (200, {"vllm_config": "text"}),
        (200, {}),
        (200, {"vllm_config": {"weight_transfer_config": "x"}}),
    ],
)
def test_a_server_that_may_have_the_backend_is_accepted(answer: tuple[int, Any]) -> None:
    with answering(REACHABLE | {"/server_info": answer}):
        check_server(SimpleNamespace(url=URL, api_key="k"))


@pytest.mark.parametrize(
    ("answers", "error", "fields"),
    [
        (REACHABLE | {"/server_info": (200, {"vllm_config": _vllm_config("nccl")})}, SyncConfigError, {}),
        (REACHABLE | {"/server_info": (200, {"vllm_config": _vllm_config(None)})}, SyncConfigError, {}),
        (REACHABLE | {"/server_info": (500, {})}, ServerError, {"status": 500}),
        ({"/get_world_size": (401, {})}, ServerError, {"status": 401}),
        ({}, ServerError, {"status": 404}),
        ({"/get_world_size": (200, [1])}, ServerError, {"step": "GET /get_world_size", "status": 200}),
        ({"/get_world_size": (200, {"world_size": "many"})}, ServerError, {"step": "GET /get_world_size"}),
    ],
)
def test_a_server_that_cannot_be_pushed_to_is_refused(
    answers: dict[str, tuple[int, Any]], error: type[WeightSyncError], fields: dict[str, Any]
) -> None:
    with answering(answers), raises(error, **({"value": URL} if error is SyncConfigError else fields)):
        check_server(SimpleNamespace(url=URL, api_key="k"))


@pytest.mark.parametrize("url", ["http://[::1", "http://h:99999", "http://h:x", "http://", "h:1", "", None, 7])
def test_bad_url_is_a_setting(url: Any) -> None:
    with raises(SyncConfigError, field="url", value=url):
        check_server(SimpleNamespace(url=url, api_key=None))


@pytest.mark.parametrize("method", ["get_rename_mapper", "get_unstacked_mapper"], ids=["0.29 on", "0.26 to 0.28"])
def test_adapter_names_are_mapped_without_stacking_rules(method: str) -> None:
    mapper = SimpleNamespace(**{method: lambda: "renames only"})
    assert _weights_mapper(SimpleNamespace(hf_to_vllm_mapper=mapper)) == "renames only"
    assert _weights_mapper(SimpleNamespace()) is None
