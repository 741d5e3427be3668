"""Transports that reach a server, and one set of buffers for several transports. Without vLLM."""

import ctypes
import os
import socket
import threading
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from plinth_testing import network_hosts, raises
from plinth_testing.network_hosts import is_available
from weight_sync import (
    SyncConfig,
    SyncConfigError,
    TensorEntry,
    WeightManifest,
    choose_transports,
    plan_buckets,
    plan_transports,
)
from weight_sync.channel import Channel, Listener, connect
from weight_sync.config import TRANSPORTS
from weight_sync.errors import ChannelError
from weight_sync.transports.select import make_senders, transport_kind
from weight_sync.transports.shm import ShmReceiver
from weight_sync.transports.tcp import TcpReceiver, TcpSender

CPU = torch.device("cpu")
ONE_HOST = [name for name in TRANSPORTS if transport_kind(name).one_host]
HERE = ["http://127.0.0.1:1", "http://localhost:2/v1", "http://[::1]:3", f"http://{socket.gethostname()}:4"]
THERE = ["http://198.51.100.7:1", "https://[2001:db8::1]:2", "http://no-such-host.invalid:3"]  # reserved for examples
servers = st.dictionaries(st.integers(1, 99).map("http://h:{}".format), st.booleans(), min_size=1, max_size=6)


@given(servers, st.booleans())
def test_auto_reaches_every_server_in_the_shortest_way(is_here: dict[str, bool], on_gpu: bool) -> None:
    plan = plan_transports("auto", is_here, on_gpu=on_gpu)
    assert plan.keys() == is_here.keys()
    for url, transport in plan.items():
        assert (transport in ONE_HOST) == is_here[url], "nccl would meet the pusher's GPU twice"
        assert (transport in ("ipc", "nccl")) == on_gpu
    assert len(set(plan.values()) & set(ONE_HOST)) <= 1, "one sender owns the buffers"


@given(st.sampled_from(TRANSPORTS), servers, st.booleans())
def test_a_named_transport_is_used_for_all_servers_or_refused(
    transport: str, is_here: dict[str, bool], on_gpu: bool
) -> None:
    elsewhere = [url for url, local in is_here.items() if not local]
    if transport in ("ipc", "nccl") and not on_gpu:
        allowed = "auto, shm, tcp"
    elif transport in ONE_HOST and elsewhere:
        allowed = "auto, nccl, tcp" if on_gpu else "auto, tcp"
    else:
        assert plan_transports(transport, is_here, on_gpu=on_gpu) == dict.fromkeys(is_here, transport)
        return
    with raises(SyncConfigError, field="transport", value=transport, allowed=allowed):
        plan_transports(transport, is_here, on_gpu=on_gpu)


def test_bucket_size_without_a_setting_is_that_of_the_transport() -> None:
    assert {name: transport_kind(name).bucket_mib for name in TRANSPORTS} == {
        "shm": 64, "ipc": 256, "nccl": 256, "tcp": 64,
    }  # fmt: skip
    assert SyncConfig().bucket_bytes("tcp", 64) == 64 << 20
    assert SyncConfig(bucket_mib=3).bucket_bytes("ipc", 256) == 3 << 20


def test_addresses_of_this_host_and_of_others() -> None:
    chosen = choose_transports(SyncConfig(), HERE + THERE, on_gpu=False)
    assert chosen == dict.fromkeys(HERE, "shm") | dict.fromkeys(THERE, "tcp")
    assert choose_transports(SyncConfig(transport="ipc"), HERE, on_gpu=True) == dict.fromkeys(HERE, "ipc")


def move_to_network_of(pid: int) -> None:
    with open(f"/proc/{pid}/ns/net") as namespace:
        assert ctypes.CDLL(None).setns(namespace.fileno(), 0) == 0


@pytest.mark.skipif(not is_available(), reason="network namespaces need root and the kernel's permission")
def test_the_same_servers_seen_from_two_hosts() -> None:
    with network_hosts(2) as hosts:
        urls = [f"http://{address}:8000" for address in (hosts[0].machine_address, *(host.address for host in hosts))]
        seen = []
        for pid in (os.getpid(), *(host.pid for host in hosts)):
            with ProcessPoolExecutor(1, get_context("fork"), move_to_network_of, (pid,)) as pool:
                chosen = pool.submit(choose_transports, SyncConfig(), urls, on_gpu=True).result(60)
                seen.append(list(chosen.values()))
    assert seen == [["ipc", "nccl", "nccl"], ["nccl", "ipc", "nccl"], ["nccl", "nccl", "ipc"]]


@settings(max_examples=25)
@given(
    st.permutations(["shm", "tcp", "tcp"]),
    st.lists(st.integers(0, 3000), min_size=1, max_size=12),
    st.integers(1, 9000),
)
def test_all_transports_send_from_one_set_of_buffers(transports: list[str], sizes: list[int], bound: int) -> None:
    manifest = WeightManifest.of(TensorEntry(name=f"w{i}", shape=(n,), dtype="uint8") for i, n in enumerate(sizes))
    group = make_senders(transports, SyncConfig(), CPU, "127.0.0.1")
    ends = [socket.socketpair() for _ in transports]
    pushers, workers = ([Channel(pair[side], 5.0) for pair in ends] for side in range(2))
    receivers: list[ShmReceiver | TcpReceiver] = []
    with ThreadPoolExecutor(len(transports)) as pool:
        for limit in (bound, 3 * bound):  # the second plan may need larger buffers
            plan = plan_buckets(manifest, limit)
            group.prepare(plan)
            receivers = [ShmReceiver(CPU) if name == "shm" else TcpReceiver(CPU) for name in transports]
            for index, (receiver, worker) in enumerate(zip(receivers, workers, strict=True)):
                greeting, fds = group.of(index).greet({})
                receiver.attach(greeting, [socket.dup(fd) for fd in fds], plan)
                assert worker.take_fds() == []
            for bucket in plan.buckets:
                out = group.buffer(bucket)
                assert {group.of(index).buffer(bucket).data_ptr() for index in range(len(transports))} == {
                    out.data_ptr()
                }
                out[: bucket.nbytes].random_(0, 256)
                sent = out[: bucket.nbytes].clone()
                got = [pool.submit(r.receive, bucket, w) for r, w in zip(receivers, workers, strict=True)]
                group.deliver(bucket, list(enumerate(pushers)))
                assert all(torch.equal(received.result(5), sent) for received in got)
            for receiver in receivers:
                receiver.close()
    group.close()
    for channel in [*pushers, *workers]:
        channel.close()


def test_a_failed_delivery_returns_when_no_thread_sends_any_more() -> None:
    plan = plan_buckets(WeightManifest.of([TensorEntry(name="w", shape=(1 << 23,), dtype="uint8")]), 1 << 30)
    sender = TcpSender()
    sender.prepare(plan, [])
    ends = [socket.socketpair() for _ in range(2)]
    pushers, workers = ([Channel(pair[side], 30.0) for pair in ends] for side in range(2))
    with ThreadPoolExecutor(1) as pool:
        workers[0].close()
        slow = pool.submit(lambda: time.sleep(0.3) or workers[1].receive_bytes_into(memoryview(bytearray(1 << 23))))
        started = time.monotonic()
        with pytest.raises(ChannelError):
            sender.deliver(plan.buckets[0], pushers)
        assert time.monotonic() - started > 0.25
        slow.result(5)
    threads = [thread for thread in threading.enumerate() if thread.name.startswith("weight_sync_tcp")]
    assert threads
    sender.close()
    for thread in threads:
        thread.join(5)
        assert not thread.is_alive()
    for channel in [*pushers, *workers]:
        channel.close()


def test_a_listener_with_two_addresses_knows_the_workers_of_both() -> None:
    listener = Listener("127.0.0.1")
    assert listener.local_address.startswith("unix:")
    assert listener.address.startswith("tcp:")
    workers = [connect(address, 5.0) for address in (listener.local_address, listener.address)]
    for index, worker in enumerate(workers):
        worker.send({"token": listener.token, "worker": str(index)})
        accepted = listener.accept(5.0, 5.0)
        assert accepted is not None
        assert accepted[1]["worker"] == str(index)
        accepted[0].close()
    listener.close()
    for address in (listener.local_address, listener.address):
        with pytest.raises(ChannelError):
            connect(address, 1.0)
    for worker in workers:
        worker.close()
