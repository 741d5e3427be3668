"""Sources, checksum, channel, transports and server check, without vLLM."""

import json
import os
import re
import socket
import struct
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import weight_sync_helpers as helpers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch._C._distributed_c10d import TCPStore
from weight_sync_helpers import STRANGERS, stranger

from plinth_testing import raises, run_script
from plinth_testing.strategies import json_values
from weight_sync import (
    HfFolderSource,
    ModuleSource,
    ServerError,
    SourceError,
    SyncConfig,
    SyncConfigError,
    TensorSource,
    WeightPusher,
    WeightSyncError,
    ZeroSource,
    check_server,
    plan_buckets,
)
from weight_sync.channel import Channel, Listener, connect
from weight_sync.errors import ChannelError
from weight_sync.push.session import Link, PushSession, Timings, _BucketFiller
from weight_sync.tensors import checksum, slot_view
from weight_sync.transports.group import SenderGroup
from weight_sync.transports.nccl import NcclSender, await_workers, create_store, join_rendezvous
from weight_sync.transports.shm import ShmReceiver, ShmSender
from weight_sync.vllm_plugin.adapters import _weights_mapper


def collect(source: TensorSource, bucket_bytes: int = 20_000) -> dict[str, torch.Tensor]:
    """All tensors of a source, by name."""
    tensors = {}
    for bucket in plan_buckets(source.manifest(), bucket_bytes).buckets:
        out = torch.empty(bucket.nbytes, dtype=torch.uint8)
        source.fill(bucket, out)
        source.fill(bucket, None)
        tensors.update({slot.name: slot_view(out, slot).clone() for slot in bucket.slots})
    return tensors


@pytest.mark.parametrize("kind", [ModuleSource, ZeroSource])
def test_source_sends_every_full_parameter_once(kind: Any, new_model: Any) -> None:
    got = collect(kind(new_model))
    assert "model.embed_tokens.weight" in got
    assert "lm_head.weight" not in got  # tied
    for name, param in new_model.named_parameters():
        assert torch.equal(got.pop(name), param.detach())
    assert not got
    cast = collect(kind(new_model, torch.bfloat16))
    for name, param in new_model.named_parameters():
        assert torch.equal(cast[name], param.detach().bfloat16())


@pytest.mark.parametrize("kind", [ModuleSource, ZeroSource])
def test_persistent_buffers_are_sent_in_their_own_dtype(kind: Any) -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, bias=False))
    module[1].register_buffer("router_bias", torch.rand(3))
    module[1].register_buffer("positions", torch.rand(3), persistent=False)
    got = collect(kind(module, torch.bfloat16))
    assert got.keys() == module.state_dict().keys()
    assert torch.equal(got["1.router_bias"], module[1].router_bias)
    assert got["1.weight"].dtype == torch.bfloat16


def test_integer_parameters_are_not_cast() -> None:
    module = nn.Module()
    module.register_parameter("scale", nn.Parameter(torch.arange(5), requires_grad=False))
    assert collect(ModuleSource(module, torch.bfloat16))["scale"].tolist() == [0, 1, 2, 3, 4]


def test_folder_source_sends_the_saved_tensors(new_model: Any, tmp_path: Path) -> None:
    helpers.save_model(new_model, tmp_path)
    got = collect(HfFolderSource(tmp_path))
    for name, param in new_model.named_parameters():
        assert torch.equal(got.pop(name), param.detach())
    assert not got


@settings(deadline=None, derandomize=True, max_examples=60)
@given(json_values())
def test_odd_safetensors_headers_are_refused_by_file(junk: object) -> None:
    good = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    odd = [{"a": good | {key: junk}} for key in good if junk != good[key]]
    odd += [{"a": good | {"data_offsets": [4, 12]}}, {"a": good | {"shape": [3]}}, {"a": junk}, [junk]]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.safetensors"
        for header in odd:
            text = json.dumps(header).encode()
            file.write_bytes(struct.pack("<Q", len(text)) + text + bytes(8))
            with raises(SourceError, value=str(file)):
                HfFolderSource(folder)
        file.write_bytes(struct.pack("<Q", 60_000) + b"[" * 60_000)
        with raises(SourceError, value=str(file)):
            HfFolderSource(folder)


def test_bad_folders_and_changed_modules_raise(tmp_path: Path) -> None:
    with raises(SourceError, value=str(tmp_path)):
        HfFolderSource(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"hello")
    with raises(SourceError, value=str(tmp_path / "model.safetensors")):
        HfFolderSource(tmp_path)
    module = nn.Linear(4, 4)
    source = ModuleSource(module)
    plan = plan_buckets(source.manifest(), 1024)
    module.weight = nn.Parameter(torch.zeros(2, 4))
    with raises(SourceError, field="weight", value=(2, 4)):
        source.fill(plan.buckets[0], torch.empty(1024, dtype=torch.uint8))


@pytest.mark.slow
@pytest.mark.long
def test_fsdp2_shards_are_gathered() -> None:
    run_script(Path(__file__).with_name("weight_sync_fsdp_worker.py"), timeout_s=90)


@settings(deadline=None, derandomize=True, max_examples=50)
@given(st.integers(1, 40), st.data())
def test_checksum_detects_a_changed_byte_and_moved_blocks(num_blocks: int, data: st.DataObject) -> None:
    generator = torch.Generator().manual_seed(num_blocks)
    bytes_N = torch.randint(0, 256, (num_blocks * 256,), dtype=torch.uint8, generator=generator)
    before = checksum(bytes_N)
    assert 0 <= before < 2**64
    assert checksum(bytes_N.clone()) == before
    position = data.draw(st.integers(0, len(bytes_N) - 1))
    changed = bytes_N.clone()
    changed[position] += data.draw(st.integers(1, 255))
    assert checksum(changed) != before
    if num_blocks > 1:
        rolled = bytes_N.roll(256 * data.draw(st.integers(1, num_blocks - 1)))
        assert checksum(rolled) != before


def test_checksum_of_an_empty_tensor() -> None:
    assert checksum(torch.empty(0, dtype=torch.uint8)) == 0


def greet(listener: Listener) -> tuple[Channel, Channel]:
    """A worker's connection: its end and the pusher's."""
    worker = connect(listener.address, 60.0)
    worker.send({"token": listener.token, "worker": "0.0"})
    accepted = listener.accept(60.0, 60.0)
    assert accepted is not None
    assert accepted[1]["worker"] == "0.0"
    return worker, accepted[0]


def test_channel_sends_messages_and_descriptors() -> None:
    listener = Listener()
    worker, pusher = greet(listener)
    read_end, write_end = os.pipe()
    sending = threading.Thread(target=pusher.send, args=({"type": "plan", "text": "é" * 700_000}, [read_end]))
    sending.start()
    assert worker.receive()["text"] == "é" * 700_000
    sending.join()
    pusher.send({"type": "next"})
    assert worker.receive() == {"type": "next"}
    (fd,) = worker.take_fds()
    os.write(write_end, b"x")
    assert os.read(fd, 1) == b"x"
    for descriptor in (fd, read_end, write_end):
        os.close(descriptor)
    pusher.close()
    with pytest.raises(ChannelError):
        worker.receive()
    listener.close()
    with pytest.raises(ChannelError):
        connect(listener.address, 1.0)


def is_closed(sock: socket.socket) -> bool:
    try:
        return sock.recv(1) == b""
    except ConnectionError:
        return True


@pytest.mark.parametrize("host", [None, "127.0.0.1"], ids=["unix", "tcp"])
def test_strangers_are_turned_away_and_delay_no_worker(host: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weight_sync.channel.HELLO_WAIT_S", 0.5)
    listener = Listener(host)
    started = time.monotonic()
    silent = [stranger(listener, b"") for _ in range(300)]  # more than are kept
    rude = {name: stranger(listener, data) for name, data in STRANGERS.items()}
    slow = stranger(listener, b"\x00\x00\x00\x02{")
    worker, pusher = greet(listener)
    assert time.monotonic() - started < 60, "300 waits of half a second"
    worker.send({"type": "ready"})
    assert pusher.receive() == {"type": "ready"}
    for sock in [*rude.values(), *silent[:40], silent[-1], slow]:
        assert is_closed(sock)
        sock.close()
    assert listener.accept(0.0, 1.0) is None
    listener.close()
    listener.close()
    for sock in silent:
        sock.close()


def test_a_listener_whose_thread_has_failed_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """A push would wait for workers until its time limit, and not name the reason."""

    def fails(_: socket.socket) -> bool:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr("weight_sync.channel._is_trusted", fails)
    listener = Listener()
    stranger(listener, b"").close()
    listener._thread.join(10)
    with pytest.raises(ChannelError) as caught:
        listener.accept(0.1, 1.0)
    assert isinstance(caught.value.__cause__, OSError)
    assert caught.value.__cause__.errno == 12
    listener.close()


def test_processes_of_other_users_are_turned_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weight_sync.channel.HELLO_WAIT_S", 60.0)
    listener = Listener()
    if os.getuid() == 0:
        if (child := os.fork()) == 0:
            os.setuid(65534)
            os._exit(0 if is_closed(stranger(listener, b"")) else 1)
        started = time.monotonic()
        assert os.waitpid(child, 0)[1] == 0
        assert time.monotonic() - started < 50  # closed at once, not after the wait for a hello
    else:
        monkeypatch.setattr("weight_sync.channel.os.getuid", lambda: os.geteuid() + 1)
        assert is_closed(stranger(listener, b""))
        with pytest.raises(ChannelError):
            connect(listener.address, 1.0)
    listener.close()


def test_nccl_store_listens_on_one_interface() -> None:
    store = create_store("127.0.0.1", 5.0)
    listening = [line.split()[1] for line in Path("/proc/net/tcp").read_text().splitlines() if line.split()[3] == "0A"]
    assert f"0100007F:{store.port:04X}" in listening
    assert f"00000000:{store.port:04X}" not in listening
    client = TCPStore("127.0.0.1", store.port, is_master=False, timeout=timedelta(seconds=60))
    client.set("a", b"1")
    assert store.get("a") == b"1"


def test_channel_receive_times_out() -> None:
    left, right = socket.socketpair()
    with pytest.raises(ChannelError):
        Channel(left, 0.05).receive()
    right.close()
    left.close()


def test_shared_memory_segments_are_reused(new_model: Any) -> None:
    source = ModuleSource(new_model)
    plan = plan_buckets(source.manifest(), 100_000)
    assert len(plan.buckets) > 2
    sender, receiver = ShmSender(), ShmReceiver(torch.device("cpu"))
    sender.prepare(plan, [])
    greeting, fds = sender.greet({"segments": receiver.id})
    receiver.attach(greeting, [os.dup(fd) for fd in fds], plan)
    sender.prepare(plan, [])
    assert sender.greet({"segments": receiver.id}) == (greeting, [])
    left, _ = socket.socketpair()
    channel = Channel(left, 1.0)
    for bucket in plan.buckets:
        source.fill(bucket, sender.buffer(bucket))
        assert torch.equal(receiver.receive(bucket, channel), sender.buffer(bucket)[: bucket.nbytes])
    larger = plan_buckets(source.manifest(), 10**7)
    sender.prepare(larger, [])
    assert sender.greet({"segments": receiver.id})[1]
    with raises(SyncConfigError):
        receiver.attach({"segments": "other", "sizes": [1]}, [], plan)
    sender.close()
    receiver.close()


# ---- rendezvous before an NCCL communicator --------------------------------------------------------------------------
@pytest.fixture
def rendezvous() -> Iterator[tuple[TCPStore, list[Channel], list[Channel]]]:
    """A store, and the pusher's and the workers' ends of two channels."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    pairs = [socket.socketpair() for _ in range(2)]
    pushers, workers = ([Channel(pair[side], 5.0) for pair in pairs] for side in range(2))
    yield store, pushers, workers
    for channel in [*pushers, *workers]:
        channel.close()


WHERE = ["http://h:1 worker 0.0", "http://h:1 worker 0.1"]


def test_rendezvous_of_all_workers(rendezvous: Any) -> None:
    store, pushers, workers = rendezvous
    with ThreadPoolExecutor(2) as pool:
        joins = [pool.submit(join_rendezvous, store, "3", rank, workers[rank - 1], 5.0) for rank in (1, 2)]
        await_workers(store, "3", WHERE, pushers, 5.0)
        for join in joins:
            join.result(5)


def test_rendezvous_timeout_names_the_missing_worker(rendezvous: Any) -> None:
    store, pushers, workers = rendezvous
    with ThreadPoolExecutor(1) as pool:
        join = pool.submit(join_rendezvous, store, "4", 1, workers[0], 30.0)
        with pytest.raises(WeightSyncError, match=r"^http://h:1 worker 0\.1: did not join .* within 0\.3 s"):
            await_workers(store, "4", WHERE, pushers, 0.3)
        pushers[0].close()  # as after a failed push: the workers that joined stop waiting
        with pytest.raises(ChannelError):
            join.result(5)


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


# ---- ZeRO-3 ----------------------------------------------------------------------------------------------------------
@settings(deadline=None, derandomize=True, max_examples=40)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=5), st.integers(1, 4), st.integers(1, 3000))
def test_shards_are_put_together_in_the_order_of_the_ranks(sizes: list[int], num_ranks: int, bound: int) -> None:
    """The root's part of the gather over gloo, with the other ranks' messages as they send them."""
    full = {f"w{index}": torch.randn(size) for index, size in enumerate(sizes)}
    shards: dict[str, list[torch.Tensor]] = {}
    for name, tensor in full.items():
        each = -(-len(tensor) // num_ranks)
        padded = nn.functional.pad(tensor, (0, each * num_ranks - len(tensor)), value=77.0)
        shards[name] = list(padded.view(num_ranks, each).clone())
        for shard in shards[name]:
            shard.ds_numel = each  # type: ignore[attr-defined]

    def parameter(name: str) -> Any:
        sharded = {"ds_tensor": shards[name][0], "ds_shape": full[name].shape, "ds_numel": full[name].numel()}
        return SimpleNamespace(**sharded, ds_process_group="group", dtype=torch.float32, shape=(0,))

    def gather(mine: torch.Tensor, parts: list[torch.Tensor], **_: Any) -> None:
        for rank, part in enumerate(parts):
            part.copy_(torch.cat([shards[slot.name][rank] for slot in bucket.slots]).view(torch.uint8))
        assert torch.equal(mine, parts[0])

    named: Any = [SimpleNamespace(name=name, parameter=parameter(name), low_rank=None, packed=None) for name in full]
    ranks = {"get_rank": 0, "get_world_size": num_ranks, "get_global_rank": 0, "get_backend": "gloo"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.distributed, "gather", gather)
        for name, value in ranks.items():
            patch.setattr(torch.distributed, name, lambda *_, value=value: value)
        source = ZeroSource(named)
        for bucket in plan_buckets(source.manifest(), bound).buckets:
            out = torch.zeros(bucket.nbytes, dtype=torch.uint8)
            source.fill(bucket, out)
            for slot in bucket.slots:
                assert torch.equal(slot_view(out, slot), full[slot.name])


# ---- a push ----------------------------------------------------------------------------------------------------------
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

    def drop_caches(self, _: str) -> None:
        time.sleep(0.1)
        if self._error is not None:
            raise self._error
        self.done.append("dropped")

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
    assert sorted(done[:4]) == ["dropped", "dropped", "finished 4", "finished 4"]
    assert done[4:] == ["resumed"] * 2
    done.clear()
    failing = Control(done, ServerError("http://s", "POST /reset_prefix_cache", 500, "no"))
    session._controls = [Control(done), failing]  # type: ignore[list-item]
    with raises(ServerError, status=500):
        session._publish(5)
    assert "resumed" not in done


# ---- check_server ----------------------------------------------------------------------------------------------------
def _vllm_config(backend: str | None) -> dict[str, Any]:
    return {"weight_transfer_config": {"backend": backend} if backend else None, "model_config": {}}


REACHABLE: dict[str, tuple[int, Any]] = {"/get_world_size": (200, {"world_size": 1})}


@contextmanager
def _http_server(answers: dict[str, tuple[int, Any]]) -> Iterator[str]:
    """A server with these answers by path, and 404 for any other path."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, body = answers.get(self.path.partition("?")[0], (404, {"detail": "Not Found"}))
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps(body).encode())

        def log_message(self, *_: Any) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


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
    with _http_server(REACHABLE | {"/server_info": answer}) as url:
        check_server(SimpleNamespace(url=url, api_key="k"))


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
    with _http_server(answers) as url, raises(error, **({"value": url} if error is SyncConfigError else fields)):
        check_server(SimpleNamespace(url=url, api_key="k"))


@pytest.mark.parametrize("url", ["http://[::1", "http://h:99999", "http://h:x", "http://", "h:1", "", None, 7])
def test_bad_url_is_a_setting(url: Any) -> None:
    with raises(SyncConfigError, field="url", value=url):
        check_server(SimpleNamespace(url=url, api_key=None))


@pytest.mark.parametrize("method", ["get_rename_mapper", "get_unstacked_mapper"], ids=["0.29 on", "0.26 to 0.28"])
def test_adapter_names_are_mapped_without_stacking_rules(method: str) -> None:
    mapper = SimpleNamespace(**{method: lambda: "renames only"})
    assert _weights_mapper(SimpleNamespace(hf_to_vllm_mapper=mapper)) == "renames only"
    assert _weights_mapper(SimpleNamespace()) is None
