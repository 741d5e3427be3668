import os
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rl_runtime.config import TrainerConfig
from rl_runtime.errors import PlacementError
from rl_runtime.launch.gpus import read_gpus
from rl_runtime.launch.placement import ClusterNode, plan_placement, plan_server_nodes
from rl_runtime.launch.session import plan_session
from rl_runtime.ranks.environment import GpuId, cache_variables, gpu_ids, rank_env, visible_gpus
from rollout_vllm import RolloutConfig
from run_kit.machine.gpus import parse_gpus


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


UUIDS = ("GPU-5d5ba0d6-d33d-2b2c-524d-9e3d8d2b8a77", "GPU-5e000000-0000-0000-0000-000000000001")
MIGS = ("MIG-c6d4f1ef-42e4-5de3-91c7-45d71c87eb3f", "MIG-00000000-0000-0000-0000-000000000002")
NVIDIA_SMI = f"""#!/bin/sh
echo "0, {UUIDS[0]}, 9.0, 81920, 0, 580.82.07, NVIDIA H100 80GB HBM3"
echo "1, {UUIDS[1]}, 9.0, 81920, 0, 580.82.07, NVIDIA H100 80GB HBM3"
"""


@pytest.fixture
def two_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A host whose nvidia-smi lists two GPUs."""
    program = tmp_path / "bin" / "nvidia-smi"
    program.parent.mkdir()
    program.write_text(NVIDIA_SMI)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    monkeypatch.setattr(torch.version, "cuda", "13.0")


@pytest.mark.parametrize(
    ("listed", "count", "expected"),
    [
        ("2,3", 2, [2, 3]),
        ("", 0, []),
        (None, 2, [0, 1]),
        ("NoDevFiles", 0, []),
        ("1,-1,0", 1, [1]),
        (f"{UUIDS[1]},{UUIDS[0]}", 2, [1, 0]),
        (f" {UUIDS[1][:6].lower()} ", 1, [1]),
        (f"0,{UUIDS[1]}", 1, [0, 1]),
        ("GPU-of-another-host", 1, ["GPU-of-another-host"]),
        (",".join(MIGS), 1, [*MIGS]),
        ("2,3", 0, "no such GPU"),
        ("0,3", 1, "CUDA finds 1"),
        ("21000,21001", 0, "no such GPU"),  # what SLURM once gave to the author of document 4
        (f"{UUIDS[0]},{UUIDS[1]}", 1, "no such GPU"),
        (MIGS[0], 0, "no such GPU"),
        ("0,0", 0, "0 and 0 are the same GPU"),
        (f"1,{UUIDS[1]}", 1, f"1 and {UUIDS[1]} are the same GPU"),
        (f"{UUIDS[0]},GPU-5d", 1, f"{UUIDS[0]} and GPU-5d are the same GPU"),
        (f"{MIGS[0]},{MIGS[0]}", 1, "are the same GPU"),
    ],
)
def test_the_gpus_of_cuda_visible_devices(
    two_gpus: None, monkeypatch: pytest.MonkeyPatch, listed: str | None, count: int, expected: list[GpuId] | str
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    if listed is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", listed)
    if isinstance(expected, str):  # an error instead of a silent run on the CPU, or on fewer GPUs
        with pytest.raises(PlacementError, match=expected):
            visible_gpus()
    else:
        assert visible_gpus() == expected


@given(
    st.lists(
        st.one_of(
            st.integers(0, 1).map(lambda index: (str(index), index)),
            st.tuples(st.integers(0, 1), st.integers(6, 40)).map(lambda one: (UUIDS[one[0]][: one[1]], one[0])),
            st.sampled_from(MIGS).map(lambda mig: (mig, mig)),
        )
    )
)
def test_no_gpu_is_named_twice_however_it_is_written(entries: list[tuple[str, GpuId]]) -> None:
    gpus = parse_gpus("\n".join(line[6:-1] for line in NVIDIA_SMI.splitlines()[1:]))
    named = [gpu for _, gpu in entries]
    if len(set(named)) < len(named):
        with pytest.raises(PlacementError, match="are the same GPU"):
            gpu_ids([entry for entry, _ in entries], gpus)
    else:
        assert gpu_ids([entry for entry, _ in entries], gpus) == named


def test_ranks_and_servers_get_the_ids_of_the_list(two_gpus: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the variable that SLURM sets to the variable of each process; memory is that of the same GPUs."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", f"{UUIDS[1]},{UUIDS[0]}")
    placement = plan_session(TrainerConfig(num_ranks=2, device="cuda"), RolloutConfig(num_servers=2))
    assert [rank_env(gpus, 1)["CUDA_VISIBLE_DEVICES"] for gpus in placement.rank_gpus] == ["1", "0"]
    assert {rank_env(gpus, 1)["CUDA_DEVICE_ORDER"] for gpus in placement.rank_gpus} == {"PCI_BUS_ID"}
    assert placement.server_gpus == ((1,), (0,))
    assert [gpu.total_bytes for gpu in read_gpus((1, 0))] == [80 * 2**30] * 2


def test_compiled_code_is_kept_in_one_folder_if_it_can_be_written(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    kept = cache_variables({"PLINTH_CACHE_DIR": str(folder), "XDG_CACHE_HOME": "/proc/nowhere"})
    assert {name for name, value in kept.items() if not value.startswith(f"{folder}/")} == {
        "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"
    }
    assert cache_variables({"XDG_CACHE_HOME": "/proc/nowhere"}) == {}
