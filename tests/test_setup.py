"""scripts/setup.sh chooses the stack of the machine, and the lists that it installs."""

import os
import re
import shutil
import subprocess
import sys
from importlib.metadata import distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement

REPO = Path(__file__).resolve().parents[1]
LISTS = REPO / "3rdparty"
HEADER = "| NVIDIA-SMI {driver}    Driver Version: {driver}    CUDA Version: {cuda}     |"
HAS_GPU = any(Path("/dev").glob("nvidia[0-9]*"))


def run_setup(
    tmp_path: Path, *options: str, stack: str = "", smi: str = "exit 127"
) -> subprocess.CompletedProcess[str]:
    """The output of setup.sh in a copy of the tree, on a machine whose nvidia-smi is this shell script."""
    for folder in ("scripts", "3rdparty"):
        shutil.copytree(REPO / folder, tmp_path / folder)
    for folder in ("packages", "apps"):
        (tmp_path / folder).symlink_to(REPO / folder)
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{smi}\n")
    program.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "PLINTH_STACK": stack}
    command = [str(tmp_path / "scripts" / "setup.sh"), *options]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)


def driver(version: str, cuda: str) -> str:
    answers = f'*driver_version*) echo {version};; "") echo "{HEADER.format(driver=version, cuda=cuda)}";;'
    return f'case "$*" in --list-gpus) echo "GPU 0: NVIDIA H200";; {answers} *) exit 1;; esac'


@pytest.mark.skipif(HAS_GPU, reason="this machine has a GPU")
@pytest.mark.parametrize(
    ("smi", "said"),
    [
        ("echo NVIDIA-SMI has failed; exit 9", "CPU stack: nvidia-smi finds no GPU (NVIDIA-SMI has failed)"),
        (driver("580.65.06", "13.0"), "CUDA stack: there is an NVIDIA GPU"),
        (driver("615.10", "13.5"), "CUDA stack: there is an NVIDIA GPU"),
        (driver("570.124.06", "13.0"), "CUDA stack: there is an NVIDIA GPU"),  # with cuda-compat
    ],
)
def test_the_stack_follows_the_machine(tmp_path: Path, smi: str, said: str) -> None:
    done = run_setup(tmp_path, "--which", smi=smi)
    assert done.returncode == 0, done.stderr
    assert said in done.stdout


@pytest.mark.parametrize("stack", ["cpu", "cuda"])
def test_a_stack_chosen_by_hand_wins(tmp_path: Path, stack: str) -> None:
    done = run_setup(tmp_path, "--which", stack=stack, smi=driver("580.65.06", "13.0"))
    assert done.stdout == f"setup: {stack.upper()} stack: PLINTH_STACK={stack}\n"


@pytest.mark.parametrize("options", [["--which"], []])
@pytest.mark.parametrize("version", ["570.124.06", "580.65.05", "535.9"])
def test_an_old_driver_is_refused_before_any_download(tmp_path: Path, version: str, options: list[str]) -> None:
    done = run_setup(tmp_path, *options, stack="cuda", smi=driver(version, "12.8"))
    assert done.returncode == 1
    assert f"NVIDIA driver {version} is too old: CUDA 13.0 needs 580.65.06 or newer" in done.stderr
    assert "PLINTH_STACK=cpu" in done.stderr
    assert not (tmp_path / ".venv").exists()


def test_a_wheelhouse_does_not_mix_two_lists(tmp_path: Path) -> None:
    """pip would take any of two files of one version, and refuse the one whose hash is not in the list."""
    house = tmp_path / "wheelhouse"
    house.mkdir()
    (house / "torch-2.13.0-py3-none-any.whl").touch()
    (house / "cpu.txt").write_text("torch==2.13.0\n")
    done = run_setup(tmp_path, "--download", str(house), stack="cpu")
    assert done.returncode == 1
    assert f"{house} has files, and not those of this checkout's 3rdparty/cpu.txt" in done.stderr
    assert "Name an empty folder." in done.stderr
    assert sorted(path.name for path in house.iterdir()) == ["cpu.txt", "torch-2.13.0-py3-none-any.whl"]


def test_a_wheelhouse_without_files_for_this_python_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    house = tmp_path / "wheelhouse"
    house.mkdir()
    (house / "SHA256SUMS").touch()
    (house / "pythons.txt").write_text("3.9\n")
    shutil.copy(LISTS / "cpu.txt", house)
    monkeypatch.setenv("PLINTH_WHEELHOUSE", str(house))
    monkeypatch.setenv("PLINTH_PYTHON", sys.executable)
    done = run_setup(tmp_path, stack="cpu")
    assert done.returncode == 1
    assert f"{house} has no files for Python {sys.version_info.major}.{sys.version_info.minor}" in done.stderr
    assert "It has those for Python 3.9: PLINTH_PYTHON=/path/to/python names one." in done.stderr
    assert not (tmp_path / ".venv").exists()


def pins(name: str) -> dict[str, str]:
    lines = (LISTS / name).read_text().splitlines()
    return dict(line.split()[0].split("==") for line in lines)


def test_the_environment_of_another_checkout_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / ".venv").symlink_to(tmp_path)
    done = run_setup(tmp_path)
    assert done.returncode == 1
    assert f".venv is a link to {tmp_path}; remove it" in done.stderr


@pytest.mark.parametrize(("name", "without"), [("cpu.txt", ["torch==2.13.0"]), ("cuda.txt", [])])
def test_every_pin_has_hashes_and_no_address(name: str, without: list[str]) -> None:
    """But the CPU build of torch: it has another hash on each index."""
    lines = (LISTS / name).read_text().splitlines()
    assert [line for line in lines if "--hash" not in line] == without
    for line in set(lines) - set(without):
        assert re.fullmatch(r"[a-z0-9-]+==[a-z0-9.]+( --hash=sha256:[0-9a-f]{64})+", line), line


@pytest.mark.parametrize("name", ["cpu", "cuda"])
def test_pins_are_within_the_tested_versions_and_every_direct_requirement_has_one(name: str) -> None:
    pinned = pins(f"{name}.txt")
    stated = [
        each
        for one in distributions()
        if one.name.startswith("plinth-")
        for each in map(Requirement, one.requires or ())
    ]
    assert stated
    lines = [
        line.split("#")[0].strip()
        for file in ("requirements", name)
        for line in (LISTS / f"{file}.in").read_text().splitlines()
    ]
    direct = [Requirement(line) for line in lines if line and not line.startswith("-r")]
    assert {each.name.lower() for each in direct} <= pinned.keys()
    for requirement in (*stated, *direct):
        pin = pinned.get(requirement.name.lower().replace("_", "-"))
        assert pin is None or requirement.specifier.contains(pin, prereleases=True), requirement


def test_the_driver_fits_the_cuda_of_the_list() -> None:
    script = (REPO / "scripts" / "setup.sh").read_text()
    needed = dict(re.findall(r"^needed_(cuda|driver)=(\S+)$", script, re.MULTILINE))
    assert pins("cuda.txt")["cuda-toolkit"].startswith(needed["cuda"] + ".")
    assert needed["driver"] == "580.65.06", "NVIDIA's table of minor version compatibility for CUDA 13"
