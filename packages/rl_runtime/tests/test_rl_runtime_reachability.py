"""Which transport reaches servers here and on other hosts."""

import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_runtime.config import TrainerConfig
from rl_runtime.errors import InputError
from rl_runtime.launch.reachability import resolve_sync_transport
from rollout_vllm import RolloutConfig
from weight_sync import SyncConfig

HERE = ["http://127.0.0.1:1", "http://localhost:2/v1", "http://[::1]:3", f"http://{socket.gethostname()}:4"]
THERE = ["http://198.51.100.7:1", "https://[2001:db8::1]:2", "http://no-such-host.invalid:3"]  # reserved for examples


@given(
    urls=st.lists(st.sampled_from(HERE[:2] + THERE[:2]), max_size=3),
    transport=st.sampled_from(["auto", "shm", "ipc", "nccl", "tcp"]),
    on_gpu=st.booleans(),
)
def test_single_host_transports_are_refused_across_hosts(urls: list[str], transport: str, on_gpu: bool) -> None:
    rollout, sync = RolloutConfig(urls=tuple(urls)), SyncConfig(transport=transport, bucket_mib=3)  # type: ignore[arg-type]

    def chosen() -> SyncConfig:
        return resolve_sync_transport(sync, trainer=TrainerConfig(), rollout=rollout, on_gpu=on_gpu)

    elsewhere = [url for url in urls if url in THERE]
    if not elsewhere:
        assert chosen() == sync
    elif transport in ("shm", "ipc"):
        with pytest.raises(InputError, match=f"sync.transport is {transport}"):
            chosen()
    else:
        expected = {"auto": "nccl" if on_gpu and len(elsewhere) == len(urls) else "tcp"}.get(transport, transport)
        assert chosen() == SyncConfig(transport=expected, bucket_mib=3)  # type: ignore[arg-type]


@pytest.mark.parametrize("url", HERE)
def test_addresses_of_this_host(url: str) -> None:
    sync = SyncConfig(transport="shm")
    assert (
        resolve_sync_transport(sync, trainer=TrainerConfig(), rollout=RolloutConfig(urls=(url,)), on_gpu=False) == sync
    )


@pytest.mark.parametrize("url", THERE)
def test_addresses_of_other_hosts(url: str) -> None:
    with pytest.raises(InputError, match=r"shared memory works within one host only; allowed: auto, tcp$"):
        resolve_sync_transport(
            SyncConfig(transport="shm"), trainer=TrainerConfig(), rollout=RolloutConfig(urls=(url,)), on_gpu=False
        )


@pytest.mark.parametrize(("on_gpu", "transport"), [(False, "tcp"), (True, "nccl")])
def test_servers_over_a_cluster(on_gpu: bool, transport: str) -> None:
    trainer = TrainerConfig(ray_address="auto")
    found = resolve_sync_transport(SyncConfig(), trainer=trainer, rollout=RolloutConfig(), on_gpu=on_gpu)
    assert found.transport == transport
    with pytest.raises(InputError, match=r"ray_address=auto .*CUDA IPC"):
        resolve_sync_transport(SyncConfig(transport="ipc"), trainer=trainer, rollout=RolloutConfig(), on_gpu=on_gpu)
