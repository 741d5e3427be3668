"""Who may import whom, what importing costs, and what every package must hold.

Pants' `__dependencies_rules__` hold the same line for whoever builds with Pants; this holds it for every test run.
"""

import ast
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[1]
LEAVES = ("rl_core", "ds_engine", "rollout_vllm", "weight_sync", "ckpt", "rl_data", "run_kit")
PACKAGES = (*LEAVES, "rl_runtime")
HEAVY = ("torch", "deepspeed", "vllm", "ray", "transformers")


def python_files(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.rglob("*.py")) if "build" not in path.relative_to(folder).parts]


def imported_modules(path: Path) -> Iterator[tuple[int, str]]:
    """(line, dotted module) of every absolute import, wherever it stands, and of import_module("literal")."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node.lineno, str(node.module)
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name | ast.Attribute)
            and (node.func.id if isinstance(node.func, ast.Name) else node.func.attr) in ("import_module", "__import__")
            and node.args
            and isinstance(node.args[0], ast.Constant)
            and isinstance(node.args[0].value, str)
        ):
            yield node.lineno, node.args[0].value


def forbidden_imports(folder: Path, forbidden: tuple[str, ...]) -> list[str]:
    found = []
    for path in python_files(folder):
        for line, module in imported_modules(path):
            if any(module == name or module.startswith(name + ".") for name in forbidden):
                found.append(f"{path.relative_to(REPO)}:{line} imports {module}")
    return found


@pytest.mark.parametrize("package", LEAVES)
def test_leaf_imports_no_other_package(package: str) -> None:
    others = tuple(name for name in PACKAGES if name != package)
    # The tests too: a leaf's tests must run where only the leaf is installed.
    assert not forbidden_imports(REPO / "packages" / package, (*others, "apps"))


def test_runtime_imports_no_app() -> None:
    assert not forbidden_imports(REPO / "packages" / "rl_runtime", ("apps",))


def test_apps_import_no_other_app() -> None:
    apps = [path.name for path in (REPO / "apps").iterdir() if (path / "__init__.py").is_file()]
    assert apps
    for app in apps:
        assert not forbidden_imports(REPO / "apps" / app, tuple(f"apps.{other}" for other in apps if other != app))


def test_benchmarks_import_no_app() -> None:
    assert not forbidden_imports(REPO / "benchmarks", ("apps",))


def test_import_scanner_sees_every_form(tmp_path: Path) -> None:
    source = tmp_path / "module.py"
    source.write_text(
        "import rl_core.kl.estimators as kl\n"
        "from ds_engine import ZeroEngine\n"
        "def later():\n"
        "    from apps import grpo\n"
        "    importlib.import_module('ckpt.manager')\n"
        "from . import rl_data\n"
    )
    found = {module for _, module in imported_modules(source)}
    assert {"rl_core.kl.estimators", "ds_engine", "ds_engine.ZeroEngine", "apps.grpo", "ckpt.manager"} <= found
    assert not any("rl_data" in module for module in found), "a relative import is the module's own"


def test_importing_packages_and_apps_loads_nothing_heavy() -> None:
    apps = [f"apps.{path.parent.name}.main" for path in sorted((REPO / "apps").glob("*/main.py"))]
    program = f"""
import importlib, json, sys
loaded = {{}}
for name in {[*PACKAGES, *apps]!r}:
    importlib.import_module(name)
    loaded[name] = [heavy for heavy in {HEAVY!r} if heavy in sys.modules]
print(json.dumps(loaded))
"""
    result = subprocess.run(
        [sys.executable, "-c", program], cwd=REPO, capture_output=True, text=True, timeout=60, check=False
    )
    assert result.returncode == 0, result.stderr
    assert {name: heavy for name, heavy in json.loads(result.stdout).items() if heavy} == {}


@pytest.mark.parametrize("package", PACKAGES)
def test_package_is_complete(package: str) -> None:
    folder = REPO / "packages" / package
    expected = ["pyproject.toml", "README.md", "CHANGELOG.md", "BUILD", f"{package}/__init__.py", f"{package}/py.typed"]
    assert [name for name in expected if not (folder / name).is_file()] == []
    assert list(folder.glob("tests/**/test_*.py")), "no tests"


@pytest.mark.parametrize("package", PACKAGES)
def test_package_is_released_on_its_own(package: str) -> None:
    folder = REPO / "packages" / package
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    assert project["name"] == "plinth-" + package.replace("_", "-")
    assert re.fullmatch(r"\d+\.\d+\.\d+", project["version"])
    assert f"## {project['version']}" in (folder / "CHANGELOG.md").read_text(), "CHANGELOG.md lacks this version"
    if package in LEAVES:
        assert not [name for name in project["dependencies"] if name.startswith("plinth-")]


def tracked_files() -> list[Path]:
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=REPO, capture_output=True, check=False, timeout=60)
    if listing.returncode != 0:
        pytest.skip("not a git checkout")
    return [REPO / name for name in listing.stdout.decode().split("\0") if name]


def test_no_tracked_file_names_a_machine_path() -> None:
    # Where this checkout stands and the user's home, unless that is a place every machine has.
    shared = {Path("/"), Path("/tmp"), Path("/usr"), Path("/usr/src"), Path("/opt"), Path("/srv"), Path("/var/tmp")}
    machine_paths = [rf"{re.escape(str(path))}/" for path in {REPO.parent, Path.home()} - shared]
    pattern = re.compile(r"(?<![\w.>)}-])(?:" + "|".join([*machine_paths, r"/home/\w+/", r"/Users/\w+/"]) + ")")
    found = []
    for path in tracked_files():
        try:
            text = path.read_text(encoding="utf-8")
        except (UnicodeDecodeError, FileNotFoundError):  # binary, or deleted and not yet committed
            continue
        found += [f"{path.relative_to(REPO)}: {match.group()}" for match in pattern.finditer(text)]
    assert found == []


def pins(path: Path) -> dict[str, str]:
    lines = [line.split("#")[0].strip() for line in path.read_text().splitlines()]
    return dict(line.split("==") for line in lines if line)


def test_pinned_lists_are_plain_and_agree() -> None:
    lists = [path for path in tracked_files() if path.parent.name in ("3rdparty", "pants") and path.suffix == ".txt"]
    lists = [path for path in lists if path.name != "overrides.txt"]
    assert REPO / "3rdparty" / "cpu.txt" in lists
    stack = pins(REPO / "3rdparty" / "cpu.txt")
    for path in lists:
        for line in path.read_text().splitlines():
            assert re.fullmatch(r"[A-Za-z0-9_.-]+==[A-Za-z0-9_.!]+", line), f"{path.name}: {line!r} is no plain pin"
        if "pants-" not in path.name:  # Pants itself runs on another Python, with pins of its own
            assert {name: pin for name, pin in pins(path).items() if stack.get(name) != pin} == {}


@pytest.mark.parametrize("name", ["torchvision", "torchaudio", "torchcodec"])
def test_cuda_only_builds_stay_out(name: str) -> None:
    assert name not in pins(REPO / "3rdparty" / "cpu.txt")
