"""Weight transports that are refused before anything starts, by where rank 0 and the servers will be."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plinth_testing import raises
from rl_runtime.launch import servers
from rl_runtime.launch.placement import Node, Placement, Slot
from rl_runtime.launch.servers import check_transport
from rollout_vllm import RolloutConfig
from weight_sync import SyncConfig, SyncConfigError

HERE, THERE = "http://127.0.0.1:1", "http://198.51.100.7:2"  # the second is reserved for examples


def placed(*server_nodes: str, rank_node: str = "", on_gpu: bool = False) -> Placement:
    gpus = (0,) if on_gpu else ()
    return Placement(ranks=(Slot(node=rank_node, gpus=gpus),), servers=tuple(Slot(node=node) for node in server_nodes))


@given(
    nodes=st.lists(st.sampled_from(["a", "b"]), max_size=3),
    transport=st.sampled_from(["auto", "shm", "ipc", "nccl", "tcp"]),
    on_gpu=st.booleans(),
)
def test_servers_that_the_run_starts(nodes: list[str], transport: str, on_gpu: bool) -> None:
    sync = SyncConfig(transport=transport)  # type: ignore[arg-type]
    placement = placed(*nodes, rank_node="a", on_gpu=on_gpu)
    far = [index for index, node in enumerate(nodes) if node != "a"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(servers, "cluster_nodes", lambda: (Node(node_id="a"), Node(node_id="b")))
        if transport in ("ipc", "nccl") and not on_gpu:
            allowed = "auto, shm, tcp"
        elif transport in ("shm", "ipc") and far:
            allowed = "auto, nccl, tcp" if on_gpu else "auto, tcp"
        else:
            check_transport(sync, RolloutConfig(), placement)
            return
        with raises(SyncConfigError, field="sync.transport", value=transport, allowed=allowed):
            check_transport(sync, RolloutConfig(), placement)


def test_existing_servers_of_this_host_and_of_another() -> None:
    sync = SyncConfig(transport="shm")
    check_transport(sync, RolloutConfig(urls=(HERE,)), placed())
    with raises(SyncConfigError, field="sync.transport", value="shm", allowed="auto, tcp") as caught:
        check_transport(sync, RolloutConfig(urls=(HERE, THERE)), placed())
    assert THERE in caught.value.problem
    check_transport(SyncConfig(), RolloutConfig(urls=(HERE, THERE)), placed())


def test_existing_servers_are_judged_from_the_host_of_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "cluster_nodes", lambda: (Node(node_id="driver"), Node(node_id="gpus")))
    sync, rollout = SyncConfig(transport="shm"), RolloutConfig(urls=(THERE,))
    check_transport(sync, rollout, placed(rank_node="gpus"))  # the first push looks from there
    with raises(SyncConfigError, field="sync.transport"):
        check_transport(sync, rollout, placed(rank_node="driver"))
