import os
import py_compile
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from plinth_testing import raises
from rl_runtime.config import TrainerConfig
from rl_runtime.errors import PlacementError
from rl_runtime.launch.gpus import read_gpus
from rl_runtime.launch.placement import Node, Placement, Slot, plan_placement
from rl_runtime.launch.session import plan_session
from rl_runtime.ranks.environment import GpuId, cache_variables, gpu_ids, rank_env, visible_gpus
from rollout_vllm import RolloutConfig
from run_kit.machine.gpus import parse_gpus


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
        refused = str(error.allowed)
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
        with raises(PlacementError, field="trainer.num_ranks", value=num_ranks) as refused:
            plan()
        assert refused.value.allowed.startswith(f"room for {room} ranks")
    elif sum(num_cpus) < num_ranks + num_servers:
        with raises(PlacementError, field="rollout.num_servers", value=num_servers) as refused:
            plan()
        assert refused.value.allowed.startswith(f"room for {sum(num_cpus) - num_ranks} servers")
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
    ("settings", "field", "value", "room"),
    [
        ({"num_ranks": 5, "num_servers": 0}, "trainer.num_ranks", 5, "4 ranks"),
        ({"num_ranks": 4, "num_servers": 1, "colocate": False}, "rollout.num_servers", 1, "0 servers"),
        ({"num_ranks": 2, "num_servers": 2, "tensor_parallel_size": 4}, "rollout.num_servers", 2, "0 servers"),
        ({"num_ranks": 4, "num_servers": 0, "sequence_parallel": {"actor": 4}}, "trainer.num_ranks", 4, "0 ranks"),
        ({"num_ranks": 4, "num_servers": 0, "ranks_per_node": 1}, "trainer.num_ranks", 4, "2 ranks"),
        ({"num_ranks": 3, "num_servers": 0, "own_ranks": {"critic": 2}}, "trainer.num_critic_ranks", 2, "1 ranks"),
    ],
)
def test_what_does_not_fit_is_refused_with_what_every_node_has(
    settings: dict[str, Any], field: str, value: int, room: str
) -> None:
    allowed = f"room for {room}: 10.0.0.0: 2 GPU; 10.0.0.1: 2 GPU"
    with raises(PlacementError, field=field, value=value, allowed=allowed):
        plan_placement(nodes_with([2, 2]), device="cuda", **settings)


def test_a_cluster_without_gpus_is_said_to_have_none() -> None:
    with raises(PlacementError, field="trainer.device", value="cuda"):
        plan_placement(nodes_with([0, 0]), device="cuda", num_ranks=2, num_servers=1)
    assert plan_placement(nodes_with([0, 1]), device="cuda", num_ranks=1, num_servers=1).num_gpus == 1


UUIDS = ("GPU-5d5ba0d6-d33d-2b2c-524d-9e3d8d2b8a77", "GPU-5e000000-0000-0000-0000-000000000001")
MIGS = ("MIG-c6d4f1ef-42e4-5de3-91c7-45d71c87eb3f", "MIG-00000000-0000-0000-0000-000000000002")
NVIDIA_SMI = f"""#!/bin/sh
echo "0, {UUIDS[0]}, 9.0, 81920, 0, 81408, 580.82.07, NVIDIA H100 80GB HBM3"
echo "1, {UUIDS[1]}, 9.0, 81920, 0, 81408, 580.82.07, NVIDIA H100 80GB HBM3"
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
        ("2,3", 0, None),
        ("0,3", 1, None),
        ("21000,21001", 0, None),  # SLURM has set such indices
        (f"{UUIDS[0]},{UUIDS[1]}", 1, None),
        (MIGS[0], 0, None),
        ("0,0", 0, "each GPU once"),
        (f"1,{UUIDS[1]}", 1, "each GPU once"),
        (f"{UUIDS[0]},GPU-5d", 1, "each GPU once"),
        (f"{MIGS[0]},{MIGS[0]}", 1, "each GPU once"),
    ],
)
def test_the_gpus_of_cuda_visible_devices(
    two_gpus: None, monkeypatch: pytest.MonkeyPatch, listed: str | None, count: int, expected: list[GpuId] | str | None
) -> None:
    """`expected`: the GPUs, or `allowed` of the error."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    if listed is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", listed)
    if not isinstance(expected, list):  # an error instead of a silent run on the CPU, or on fewer GPUs
        with raises(PlacementError, field="CUDA_VISIBLE_DEVICES", value=listed, allowed=expected):
            visible_gpus()
    else:
        assert visible_gpus() == expected


def test_a_torch_without_cuda_finds_no_gpu_but_a_gpu_that_is_named_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """`why_cpu` reports names that are not used."""
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    for listed in ("0,1", ""):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", listed)
        assert visible_gpus() == []
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,0")
    with raises(PlacementError, field="CUDA_VISIBLE_DEVICES", value="0,0"):
        visible_gpus()


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
        with raises(PlacementError, allowed="each GPU once"):
            gpu_ids([entry for entry, _ in entries], gpus)
    else:
        assert gpu_ids([entry for entry, _ in entries], gpus) == named


def test_ranks_and_servers_get_the_ids_of_the_list(two_gpus: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the variable that SLURM sets to the variable of each process; memory is that of the same GPUs."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", f"{UUIDS[1]},{UUIDS[0]}")
    placement = plan_session(TrainerConfig(num_ranks=2, device="cuda"), RolloutConfig(num_servers=2))
    assert [rank_env(gpus, 1)["CUDA_VISIBLE_DEVICES"] for gpus in (slot.gpus for slot in placement.ranks)] == ["1", "0"]
    assert {rank_env(gpus, 1)["CUDA_DEVICE_ORDER"] for gpus in (slot.gpus for slot in placement.ranks)} == {
        "PCI_BUS_ID"
    }
    assert [slot.gpus for slot in placement.servers] == [(1,), (0,)]
    assert [gpu.total_bytes for gpu in read_gpus((1, 0))] == [80 * 2**30] * 2


def test_segments_of_gpu_ranks_grow_unless_the_user_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    assert rank_env([0], 1)["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    assert "PYTORCH_ALLOC_CONF" not in rank_env([], 1)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64")  # Ray's workers inherit it
    assert "PYTORCH_ALLOC_CONF" not in rank_env([0], 1)


def test_compiled_code_is_kept_in_one_folder_if_it_can_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    folder = tmp_path / "cache"
    kept = cache_variables({"PLINTH_CACHE_DIR": str(folder), "XDG_CACHE_HOME": "/proc/nowhere"})
    assert {name for name, value in kept.items() if not value.startswith(f"{folder}/")} == {
        "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"
    }
    assert cache_variables({"XDG_CACHE_HOME": "/proc/nowhere"}) == {}


def test_bytecode_that_python_would_not_keep_is_kept_with_the_other_compiled_code(tmp_path: Path) -> None:
    site = tmp_path / "site"
    for name in ("torch", "transformers", "vllm"):
        (site / name).mkdir(parents=True)
        (site / name / "__init__.py").write_text("")
    code = "import rl_runtime.ranks.environment as e; e.prepare_imports(); import torch; print(torch.__cached__)"
    path = os.pathsep.join([str(site), *sys.path])

    def where(**variables: str) -> Path:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        env = inherited | {"PYTHONPATH": path, "PLINTH_CACHE_DIR": str(tmp_path / "cache")} | variables
        run = subprocess.run([sys.executable, "-c", code], env=env, check=True, text=True, capture_output=True)
        return Path(run.stdout.strip())

    kept = where(PYTHONDONTWRITEBYTECODE="1")  # as in container images
    assert kept.is_file()
    assert kept.is_relative_to(tmp_path / "cache" / "bytecode")
    assert where(PYTHONDONTWRITEBYTECODE="1") == kept  # the next run reads it
    (site / "another-1.0.dist-info").mkdir()  # an upgrade may keep the time and the size of a source
    assert where(PYTHONDONTWRITEBYTECODE="1") != kept
    chosen = where(PYTHONDONTWRITEBYTECODE="1", PYTHONPYCACHEPREFIX=str(tmp_path / "own"))
    assert chosen.is_relative_to(tmp_path / "own")
    assert where(PYTHONDONTWRITEBYTECODE="").is_relative_to(site / "torch")  # Python keeps it itself
    for name in ("torch", "transformers", "vllm"):
        py_compile.compile(str(site / name / "__init__.py"))
    assert where(PYTHONDONTWRITEBYTECODE="1").is_relative_to(site / "torch")  # the image has it
    os.utime(site / "torch" / "__init__.py", (0, 0))
    assert where(PYTHONDONTWRITEBYTECODE="1").is_relative_to(tmp_path / "cache")  # what it has is out of date
