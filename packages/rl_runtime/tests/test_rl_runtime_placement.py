from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rl_runtime.errors import PlacementError
from rl_runtime.launch.placement import Node, Placement, Slot, plan_placement
from rl_runtime.ranks.environment import cache_variables, visible_gpus


def nodes_with(num_gpus: list[int], num_cpus: int | None = None) -> list[Node]:
    return [
        Node(node_id=f"n{i}", address=f"10.0.0.{i}", gpu_ids=range(number), num_cpus=num_cpus)
        for i, number in enumerate(num_gpus)
    ]


@given(
    num_gpus=st.lists(st.integers(0, 8), min_size=1, max_size=4).filter(any),
    num_ranks=st.integers(1, 12),
    sp=st.sampled_from([1, 2, 4]),
    num_servers=st.integers(0, 6),
    tp=st.sampled_from([1, 2, 4]),
    colocate=st.booleans(),
    num_critic_ranks=st.integers(0, 3),
    ranks_per_node=st.one_of(st.none(), st.integers(1, 8)),
)
def test_every_process_has_gpus_of_one_node_and_none_is_given_twice(
    num_gpus: list[int],
    num_ranks: int,
    sp: int,
    num_servers: int,
    tp: int,
    colocate: bool,
    num_critic_ranks: int,
    ranks_per_node: int | None,
) -> None:
    num_ranks *= sp
    nodes = nodes_with(num_gpus)
    own_ranks = {"critic": num_critic_ranks} if num_critic_ranks else {}
    try:
        placement = plan_placement(
            nodes,
            device="auto",
            num_ranks=num_ranks,
            num_servers=num_servers,
            tensor_parallel_size=tp,
            colocate=colocate,
            own_ranks=own_ranks,
            sequence_parallel={"actor": sp},
            ranks_per_node=ranks_per_node,
        )
    except PlacementError as error:
        refused = str(error)
    else:
        refused = ""
    if refused:
        assert nodes[0].describe() in refused
        room = sum(min(number, ranks_per_node or number) // sp * sp for number in num_gpus)
        of_servers = sum(number // tp for number in num_gpus)
        fits_easily = colocate and not own_ranks and room >= num_ranks and of_servers >= num_servers
        assert not fits_easily, "refused although there is room"
        return
    of_ranks = [(slot.node, gpu) for slot in placement.all_ranks for gpu in slot.gpus]
    of_servers_ = [(slot.node, gpu) for slot in placement.servers for gpu in slot.gpus]
    assert len(of_ranks) == len(set(of_ranks)) == placement.num_ranks == num_ranks + num_critic_ranks
    assert len(of_servers_) == len(set(of_servers_)) == num_servers * tp
    assert all(len(slot.gpus) == tp for slot in placement.servers)
    assert colocate or not set(of_ranks) & set(of_servers_)
    assert placement.num_gpus == len({*of_ranks, *of_servers_})
    known = {(node.node_id, gpu) for node in nodes for gpu in node.gpu_ids}
    assert {*of_ranks, *of_servers_} <= known
    groups = [placement.ranks[first : first + sp] for first in range(0, num_ranks, sp)]
    assert all(len({slot.node for slot in group}) == 1 for group in groups), "a sequence-parallel group spans nodes"
    order = [slot.node for slot in placement.ranks]
    assert order == sorted(order), "ranks of a node are not neighbors"
    if ranks_per_node is not None:
        assert max(order.count(node) for node in order) <= ranks_per_node


@pytest.mark.parametrize(("num_gpus", "device"), [(0, "auto"), (2, "cpu")])
def test_without_gpus_everything_runs_on_the_cpu(num_gpus: int, device: str) -> None:
    nodes = [Node(gpu_ids=range(num_gpus))]
    placement = plan_placement(nodes, device=device, num_ranks=2, num_servers=1)
    assert not placement.on_gpu
    assert placement.ranks == (Slot(), Slot())
    assert placement.num_gpus == 0


@given(
    num_cpus=st.lists(st.integers(0, 8), min_size=1, max_size=5),
    num_ranks=st.integers(1, 8),
    num_servers=st.integers(0, 8),
    ranks_per_node=st.one_of(st.none(), st.integers(1, 4)),
)
def test_on_the_cpu_every_process_takes_one_cpu_and_servers_are_spread(
    num_cpus: list[int], num_ranks: int, num_servers: int, ranks_per_node: int | None
) -> None:
    nodes = [Node(node_id=f"n{i}", address=f"10.0.0.{i}", num_cpus=number) for i, number in enumerate(num_cpus)]
    room = sum(min(number, ranks_per_node or number) for number in num_cpus)

    def plan() -> Placement:
        return plan_placement(
            nodes, device="auto", num_ranks=num_ranks, num_servers=num_servers, ranks_per_node=ranks_per_node
        )

    if room < num_ranks:
        with pytest.raises(PlacementError, match=f"there is room for {room} ranks"):
            plan()
    elif sum(num_cpus) < num_ranks + num_servers:
        with pytest.raises(PlacementError, match=f"room for {sum(num_cpus) - num_ranks} servers"):
            plan()
    else:
        placement = plan()
        ranks = [slot.node for slot in placement.ranks]
        servers = [slot.node for slot in placement.servers]
        assert (len(ranks), len(servers)) == (num_ranks, num_servers)
        left = {f"n{i}": number - ranks.count(f"n{i}") for i, number in enumerate(num_cpus)}
        assert all(servers.count(node) <= number for node, number in left.items())
        open_nodes = [servers.count(node) for node, number in left.items() if servers.count(node) < number]
        assert not open_nodes or max(map(servers.count, servers), default=0) <= min(open_nodes) + 1


def test_two_hosts_of_two_gpus_hold_four_ranks_and_their_servers() -> None:
    placement = plan_placement(
        nodes_with([2, 2]), device="auto", num_ranks=4, num_servers=4, sequence_parallel={"actor": 2}
    )
    assert placement.ranks == placement.servers
    assert [(slot.node, slot.gpus) for slot in placement.ranks] == [
        ("n0", (0,)),
        ("n0", (1,)),
        ("n1", (0,)),
        ("n1", (1,)),
    ]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_ranks": 5, "num_servers": 0}, r"need 5 GPUs .*room for 4 ranks: 10\.0\.0\.0: 2 GPU; 10\.0\.0\.1: 2 GPU"),
        ({"num_ranks": 4, "num_servers": 1, "colocate": False}, "need 5 GPUs .*not shared.*room for 0 servers"),
        ({"num_ranks": 2, "num_servers": 2, "tensor_parallel_size": 4}, "need 8 GPUs .*room for 0 servers"),
        (
            {"num_ranks": 4, "num_servers": 0, "sequence_parallel": {"actor": 4}},
            r"each group of 4 \(sequence_parallel\) on one node; there is room for 0 ranks",
        ),
        ({"num_ranks": 4, "num_servers": 0, "ranks_per_node": 1}, "at most 1 on a node .*room for 2 ranks"),
        ({"num_ranks": 3, "num_servers": 0, "own_ranks": {"critic": 2}}, "3 ranks and 2 of the critic"),
    ],
)
def test_what_does_not_fit_is_refused_with_what_every_node_has(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(PlacementError, match=message):
        plan_placement(nodes_with([2, 2]), device="cuda", **settings)


@pytest.mark.parametrize(
    ("listed", "count", "expected"),
    [
        ("2,3", 2, [2, 3]),
        ("2,3", 1, [2]),
        ("", 0, []),
        (None, 2, [0, 1]),
        ("NoDevFiles", 0, []),
        ("2,3", 0, "no such GPU"),
    ],
)
def test_the_gpus_of_cuda_visible_devices(
    monkeypatch: pytest.MonkeyPatch, listed: str | None, count: int, expected: list[int] | str
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    if listed is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", listed)
    if isinstance(expected, str):  # an error instead of a silent run on the CPU
        with pytest.raises(PlacementError, match=expected):
            visible_gpus()
    else:
        assert visible_gpus() == expected


def test_compiled_code_is_kept_in_one_folder_if_it_can_be_written(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    kept = cache_variables({"PLINTH_CACHE_DIR": str(folder), "XDG_CACHE_HOME": "/proc/nowhere"})
    assert {name for name, value in kept.items() if not value.startswith(f"{folder}/")} == {
        "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"
    }
    assert cache_variables({"XDG_CACHE_HOME": "/proc/nowhere"}) == {}
