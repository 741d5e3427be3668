"""scripts/build.py builds distributions without warnings, and siblings require each other's present versions."""

import os
import sys
import tarfile
import tomllib
import zipfile
from importlib.metadata import packages_distributions
from itertools import chain
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from scripts.build import REPO, build, name_and_version, projects
from scripts.import_graph import imported_modules

VERSIONS = dict(map(name_and_version, projects()))


DISTRIBUTIONS = packages_distributions()
THROUGH = {
    "starlette": {"vllm"},
    "triton": {"torch", "vllm"},
    "torch": {"vllm"},
    "pydantic": {"deepspeed"},
    "markupsafe": {"jinja2"},
    "safetensors": {"transformers"},
    "fla": {"fla-core"},
    "openenv": {"openenv-core"},
    "reasoning_gym": {"pyarrow"},  # rl_data.tasks.fetched fetches it
    "namespaces": {"plinth-base"},  # its module, which the sandbox's launcher loads by its folder
    "PIL": {"vllm"},
}
"""Modules that come with a distribution that is declared."""


def requirements(folder: Path) -> list[Requirement]:
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    return list(
        map(Requirement, [*project["dependencies"], *chain(*project.get("optional-dependencies", {}).values())])
    )


def sibling_requirements(folder: Path) -> list[Requirement]:
    return [required for required in requirements(folder) if canonicalize_name(required.name).startswith("plinth")]


@pytest.mark.parametrize("folder", [each for each in projects() if each.name != "apps"], ids=lambda folder: folder.name)
def test_every_import_of_the_source_is_declared(folder: Path) -> None:
    """In functions too, which `make alone` does not call."""
    declared = {canonicalize_name(each.name) for each in requirements(folder)}
    for path in (folder / folder.name).rglob("*.py"):
        tops = {module.partition(".")[0] for _, module in imported_modules(path.read_text(encoding="utf-8"))}
        for top in tops - sys.stdlib_module_names - {folder.name, ""}:  # "": import_module(".name", __package__)
            names = {canonicalize_name(name).removesuffix("-cpu") for name in DISTRIBUTIONS.get(top, [top])}
            assert (names | THROUGH.get(top, set())) & declared, f"{path.relative_to(REPO)} imports {top}"


@pytest.mark.parametrize("folder", projects(), ids=lambda folder: folder.name)
def test_siblings_are_required_at_the_minor_version_in_the_tree(folder: Path) -> None:
    for required in sibling_requirements(folder):
        if required.name == name_and_version(folder)[0]:
            continue  # its own extras
        major, minor, _ = VERSIONS[required.name].split(".")
        assert str(required.specifier) == f"~={major}.{minor}.0", required
        assert required.specifier.contains(VERSIONS[required.name])


def test_plinth_requires_every_package_but_the_test_support() -> None:
    needed, reached = [REPO / "apps"], set[str]()
    folders = {name_and_version(folder)[0]: folder for folder in projects()}
    while needed:
        names = {required.name for required in sibling_requirements(needed.pop())} - reached
        reached |= names
        needed += [folders[name] for name in names]
    assert set(VERSIONS) - reached <= {"plinth-rl", "plinth-testing"}


@pytest.mark.parametrize("name", ["packages/run_kit", "apps"])
def test_two_builds_have_the_same_bytes_and_all_files(name: str, tmp_path: Path) -> None:
    folder, epoch = REPO / name, 1_700_000_000
    first, second = build(folder, tmp_path / "a", epoch), build(folder, tmp_path / "b", epoch)
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]
    with tarfile.open(first[0]) as sdist, zipfile.ZipFile(first[1]) as wheel:
        assert {member.mtime for member in sdist.getmembers()} == {epoch}
        in_sdist, in_wheel = {path.partition("/")[2] for path in sdist.getnames()}, set(wheel.namelist())
    tests = {str(path.relative_to(folder)) for path in folder.glob("tests/*.py")}
    assert tests <= in_sdist
    module = folder if name == "apps" else folder / folder.name
    data = {path for path in module.rglob("*") if path.suffix in (".py", ".yaml", ".sh", ".pyi", ".typed")}
    assert {os.path.relpath(path, module.parent) for path in data} <= in_wheel
    assert any(path.endswith("licenses/LICENSE") for path in in_wheel)


def test_a_warning_of_setuptools_fails_the_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scripts.build._BACKEND", "import warnings; warnings.warn('old key')")
    with pytest.raises(RuntimeError, match=r"packages/rl_core cannot be built:\n(.|\n)*old key"):
        build(REPO / "packages" / "rl_core", tmp_path, 1_700_000_000)
