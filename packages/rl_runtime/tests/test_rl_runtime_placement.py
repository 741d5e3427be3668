from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rl_runtime.errors import PlacementError
from rl_runtime.launch.placement import ClusterNode, plan_placement, plan_server_nodes
from rl_runtime.ranks.environment import cache_variables, visible_gpus


@given(
    num_gpus=st.integers(1, 16),
    num_ranks=st.integers(1, 8),
    num_servers=st.integers(0, 4),
    tp=st.integers(1, 4),
    colocate=st.booleans(),
    num_critic_ranks=st.integers(0, 3),
)
def test_every_process_has_its_gpus_and_none_is_given_twice(
    num_gpus: int, num_ranks: int, num_servers: int, tp: int, colocate: bool, num_critic_ranks: int
) -> None:
    own_ranks = {"critic": num_critic_ranks} if num_critic_ranks else {}
    all_ranks = num_ranks + num_critic_ranks
    needed = max(all_ranks, num_servers * tp) if colocate else all_ranks + num_servers * tp

    def plan():  # type: ignore[no-untyped-def]
        return plan_placement(
            gpu_ids=range(num_gpus),
            device="auto",
            num_ranks=num_ranks,
            num_servers=num_servers,
            tensor_parallel_size=tp,
            colocate=colocate,
            own_ranks=own_ranks,
        )

    if needed > num_gpus:
        with pytest.raises(PlacementError, match=str(needed)):
            plan()
        return
    placement = plan()
    critic_gpus = placement.own_rank_gpus.get("critic", ())
    rank_gpus = [gpu for gpus in (*placement.rank_gpus, *critic_gpus) for gpu in gpus]
    server_gpus = [gpu for gpus in placement.server_gpus for gpu in gpus]
    assert len(rank_gpus) == len(set(rank_gpus)) == all_ranks == placement.num_ranks
    assert len(critic_gpus) == num_critic_ranks
    assert placement.num_gpus == len(set(rank_gpus + server_gpus))
    assert len(server_gpus) == len(set(server_gpus)) == num_servers * tp
    assert colocate or not set(rank_gpus) & set(server_gpus)
    assert set(rank_gpus + server_gpus) <= set(range(num_gpus))


@pytest.mark.parametrize(("gpu_ids", "device"), [([], "auto"), ([0, 1], "cpu")])
def test_without_gpus_everything_runs_on_the_cpu(gpu_ids: list[int], device: str) -> None:
    placement = plan_placement(
        gpu_ids=gpu_ids, device=device, num_ranks=2, num_servers=1, tensor_parallel_size=1, colocate=True
    )
    assert not placement.on_gpu
    assert placement.rank_gpus == ((), ())


@pytest.mark.parametrize("colocate", [True, False])
def test_servers_on_other_hosts_take_no_gpu_of_this_one(colocate: bool) -> None:
    placement = plan_placement(
        gpu_ids=[0, 1],
        device="auto",
        num_ranks=2,
        num_servers=3,
        tensor_parallel_size=4,
        colocate=colocate,
        servers_elsewhere=True,
    )
    assert placement.rank_gpus == ((0,), (1,))
    assert placement.server_gpus == ()
    assert placement.num_gpus == 2 + 12


@given(
    num_cpus=st.lists(st.integers(0, 8), min_size=1, max_size=5),
    num_gpus=st.lists(st.integers(0, 8), min_size=5, max_size=5),
    driver=st.integers(0, 4),
    num_ranks=st.integers(1, 4),
    num_servers=st.integers(1, 8),
    wanted=st.fixed_dictionaries({"CPU": st.integers(0, 2)}, optional={"GPU": st.integers(1, 4)}),
)
def test_servers_are_spread_over_the_other_nodes_or_refused(
    num_cpus: list[int],
    num_gpus: list[int],
    driver: int,
    num_ranks: int,
    num_servers: int,
    wanted: dict[str, float],
) -> None:
    driver %= len(num_cpus)
    nodes = [
        ClusterNode(node_id=f"n{i}", address=f"10.0.0.{i}", resources={"CPU": cpus, "GPU": gpus})
        for i, (cpus, gpus) in enumerate(zip(num_cpus, num_gpus, strict=False))
    ]
    room = {
        node.node_id: min((node.resources[name] // amount for name, amount in wanted.items() if amount), default=99)
        for node in nodes
        if node.node_id != f"n{driver}"
    }

    def plan() -> tuple[str, ...]:
        return plan_server_nodes(
            nodes, driver=f"n{driver}", num_ranks=num_ranks, num_servers=num_servers, resources=wanted
        )

    if num_cpus[driver] < num_ranks:
        with pytest.raises(PlacementError, match=r"trainer\.num_ranks"):
            plan()
    elif sum(room.values()) < num_servers:
        with pytest.raises(PlacementError, match=f"room for {sum(room.values()):g} "):
            plan()
    else:
        planned = plan()
        counts = {name: planned.count(name) for name in room}
        assert sum(counts.values()) == len(planned) == num_servers
        assert all(counts[name] <= room[name] for name in room)
        open_nodes = [counts[name] for name in room if counts[name] < room[name]]
        assert not open_nodes or max(counts.values()) <= min(open_nodes) + 1, "one is crowded beside an emptier one"


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
