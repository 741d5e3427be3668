"""The channel to a worker, shared memory, and the rendezvous before an NCCL communicator."""

import os
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import TCPStore
from weight_sync_helpers import STRANGERS, WHERE, stranger

from plinth_testing import raises
from weight_sync import (
    ModuleSource,
    SyncConfigError,
    WeightSyncError,
    plan_buckets,
)
from weight_sync.channel import Channel, Listener, connect
from weight_sync.errors import ChannelError
from weight_sync.transports.nccl import await_workers, create_store, join_rendezvous
from weight_sync.transports.shm import ShmReceiver, ShmSender


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


def test_channel_receive_times_out() -> None:
    left, right = socket.socketpair()
    with pytest.raises(ChannelError):
        Channel(left, 0.05).receive()
    right.close()
    left.close()


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
        with raises(WeightSyncError, field="http://h:1 worker 0.1"):
            await_workers(store, "4", WHERE, pushers, 0.3)
        pushers[0].close()  # as after a failed push: the workers that joined stop waiting
        with pytest.raises(ChannelError):
            join.result(5)
