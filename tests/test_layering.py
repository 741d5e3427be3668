"""Import rules between and inside packages, import cost, and what every package must contain.

Pants' `__dependencies_rules__` check the rules between packages too, for builds with Pants.
"""

import importlib
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from scripts.import_graph import cycles, imported_modules, rooms

REPO = Path(__file__).resolve().parents[1]
LEAVES = ("rl_core", "ds_engine", "rollout_vllm", "weight_sync", "ckpt", "rl_data", "run_kit")
LAZY = (*LEAVES, "rl_runtime", "plinth_testing")
PACKAGES = ("plinth_base", *LAZY)
# Package -> folder -> rooms (files and folders at the top of the package) that it imports; errors.py is always allowed.
NEIGHBORS: dict[str, dict[str, str]] = {
    "rl_core": {
        "advantages": "_tensors.py batching kl",
        "batching": "_tensors.py",
        "fused_log_prob": "",
        "importance": "_tensors.py batching options.py",
        "kl": "_tensors.py fused_log_prob options.py",
        "losses": "_tensors.py batching kl options.py",
    },
    "ds_engine": {
        "guard": "torch_errors.py upstream.py",
        "model": "batch.py config.py distributed.py nf4_size.py simple.py upstream.py",
        "planning": "config.py nf4_size.py optimizers.py upstream.py",
        "state": "model upstream.py",
        "zero": "config.py distributed.py model optimizers.py upstream.py",
    },
    "rollout_vllm": {
        "client": "config.py samples.py",
        "episodes": "client config.py samples.py",
        "servers": "client config.py",
    },
    "weight_sync": {
        "push": "channel.py config.py plan.py sources tensors.py transports",
        "sources": "manifest.py plan.py tensors.py",
        "transports": "channel.py config.py plan.py",
        "vllm_plugin": "channel.py config.py plan.py tensors.py transports",
    },
    "ckpt": {
        "savers": "digest.py files.py manager.py reader.py store tensor_file.py upstream.py",
        "store": "digest.py files.py manager.py manifest.py reader.py retention.py",
        "tools": "files.py hf_export.py manager.py manifest.py store tensor_file.py zero",
        "zero": "upstream.py",
    },
    "rl_data": {
        "files": "",
        "prepare": "config.py files images.py messages.py rewards rows.py",
        "rewards": "config.py package_index.py",
        "tasks": "config.py package_index.py",
    },
    "run_kit": {
        "cluster": "commands.py config",
        "config": "",
        "machine": "",
        "report": "config tracking",
        "tracking": "config signals.py terminal.py",
    },
    "rl_runtime": {
        "app": "config.py job_config.py launch ranks resolve rollout supervised_job_config.py training",
        "launch": "config.py ranks",
        "ranks": "samples.py",
        "resolve": "config.py job_config.py launch ranks rollout rules.py supervised_job_config.py training",
        "rollout": "config.py ranks rules.py samples.py",
        "training": "config.py launch ranks rollout rules.py samples.py",
    },
}
HEAVY = ("torch", "deepspeed", "vllm", "ray", "transformers")


def python_files(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.rglob("*.py")) if "build" not in path.relative_to(folder).parts]


def forbidden_imports(folder: Path, forbidden: tuple[str, ...]) -> list[str]:
    imports = []
    for path in python_files(folder):
        for line, module in imported_modules(path.read_text(encoding="utf-8")):
            if any(module == name or module.startswith(name + ".") for name in forbidden):
                imports.append(f"{path.relative_to(REPO)}:{line} imports {module}")
    return imports


@pytest.mark.parametrize("package", LEAVES)
def test_leaf_imports_no_other_package(package: str) -> None:
    base = () if package == "rl_core" else ("plinth_base",)  # rl_core needs torch and numpy alone
    others = tuple(name for name in PACKAGES if name not in (package, "plinth_testing", *base))
    folder = REPO / "packages" / package
    # Its tests too, but for plinth_testing: they run where only the leaf is installed.
    assert not forbidden_imports(folder, (*others, "apps"))
    assert not forbidden_imports(folder / package, ("plinth_testing",))


def test_plinth_testing_imports_no_other_package() -> None:
    assert not forbidden_imports(REPO / "packages" / "plinth_testing", ("plinth_base", *LEAVES, "rl_runtime", "apps"))


def test_plinth_base_imports_the_standard_library_alone() -> None:
    imported = {
        module.partition(".")[0]
        for path in python_files(REPO / "packages" / "plinth_base" / "plinth_base")
        for _, module in imported_modules(path.read_text(encoding="utf-8"))
    }
    # huggingface_hub only to find a download, which nobody has without it
    assert imported - sys.stdlib_module_names <= {"huggingface_hub"}
    assert not forbidden_imports(REPO / "packages" / "plinth_base" / "tests", (*LEAVES, "rl_runtime", "apps"))


def test_runtime_imports_no_app() -> None:
    folder = REPO / "packages" / "rl_runtime"
    assert not forbidden_imports(folder, ("apps",))
    assert not forbidden_imports(folder / "rl_runtime", ("plinth_testing",))


def test_apps_import_no_other_app() -> None:
    apps = [path.name for path in (REPO / "apps").iterdir() if (path / "__init__.py").is_file()]
    assert apps
    for app in apps:
        assert not forbidden_imports(REPO / "apps" / app, tuple(f"apps.{other}" for other in apps if other != app))


def test_benchmarks_import_no_app() -> None:
    assert not forbidden_imports(REPO / "benchmarks", ("apps",))


@pytest.mark.parametrize("package", PACKAGES)
def test_folders_import_only_their_neighbors(package: str) -> None:
    folder = REPO / "packages" / package / package
    graph, allowed = rooms(folder), NEIGHBORS.get(package, {})
    folders = {path.name for path in folder.iterdir() if (path / "__init__.py").is_file()}
    imported = {name: " ".join(sorted(graph.get(name, set()))) for name in folders}
    assert imported == allowed, "a folder imports only its neighbors, and each neighbor listed here is imported"
    assert cycles(graph) == []


def test_a_module_imported_by_a_relative_name_counts(tmp_path: Path) -> None:
    """Otherwise import_module(".b") would hide a cycle."""
    for name, other in (("a", "b"), ("b", "a")):
        line = f'from importlib import import_module\nimport_module(".{other}", __package__)\n'
        (tmp_path / f"{name}.py").write_text(line)
    assert cycles(rooms(tmp_path)) == [("a.py", "b.py")]


def test_importing_packages_and_apps_loads_nothing_heavy() -> None:
    light = dict.fromkeys(PACKAGES, (*HEAVY, "numpy", "aiohttp", "triton"))
    light |= {f"apps.{path.parent.name}.main": HEAVY for path in sorted((REPO / "apps").glob("*/main.py"))}
    # A run's driver imports the engine's class and starts neither: 2 s of CPU.
    light["ds_engine.engine"] = ("torch._dynamo", "deepspeed")
    program = f"""
import importlib, json, sys
loaded = {{}}
for name, heavy in {light!r}.items():
    importlib.import_module(name)
    loaded[name] = [each for each in heavy if each in sys.modules]
print(json.dumps(loaded))
"""
    result = subprocess.run(
        [sys.executable, "-c", program], cwd=REPO, capture_output=True, text=True, timeout=60, check=False
    )
    assert result.returncode == 0, result.stderr
    assert {name: heavy for name, heavy in json.loads(result.stdout).items() if heavy} == {}


@pytest.mark.parametrize("package", PACKAGES)
def test_every_package_has_its_files_and_tests(package: str) -> None:
    folder = REPO / "packages" / package
    expected = ["pyproject.toml", "README.md", "CHANGELOG.md", "BUILD", f"{package}/__init__.py", f"{package}/py.typed"]
    assert [name for name in expected if not (folder / name).is_file()] == []
    assert list(folder.glob("tests/**/test_*.py")), "no tests"


def test_plinth_base_exports_its_names() -> None:
    module = importlib.import_module("plinth_base")
    assert [name for name in module.__all__ if getattr(module, name, None) is None] == []


@pytest.mark.parametrize("package", LAZY)
def test_public_names_are_lines_of_the_stub_and_the_wheel_has_it(package: str) -> None:
    folder = REPO / "packages" / package
    exports = (folder / package / "__init__.pyi").read_text().splitlines()
    # Without `as`, the name would be public at run time and hidden from type checkers.
    names = [match[1] for line in exports if (match := re.fullmatch(r"from \.[\w.]+ import (\w+) as \1", line))]
    assert len(names) == len(exports)
    module = importlib.import_module(package)
    assert module.__all__ == sorted(names) == sorted(dir(module))
    assert [name for name in names if getattr(module, name, None) is None] == []
    with pytest.raises(AttributeError, match="nothing"):
        _ = module.nothing
    setuptools = tomllib.loads((folder / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert set(setuptools["package-data"][package]) >= {"py.typed", "__init__.pyi"}


@pytest.mark.parametrize("package", PACKAGES)
def test_package_is_released_on_its_own(package: str) -> None:
    folder = REPO / "packages" / package
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    assert project["name"] == "plinth-" + package.removeprefix("plinth_").replace("_", "-")
    assert re.fullmatch(r"\d+\.\d+\.\d+", project["version"])
    assert f"## {project['version']}" in (folder / "CHANGELOG.md").read_text(), "CHANGELOG.md lacks this version"
    if package in LEAVES:
        siblings = {re.split(r"[^\w-]", name)[0] for name in project["dependencies"] if name.startswith("plinth-")}
        assert siblings <= ({"plinth-base"} if package != "rl_core" else set())


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
    named = []
    for path in tracked_files():
        try:
            text = path.read_text(encoding="utf-8")
        except (UnicodeDecodeError, FileNotFoundError):  # binary, or deleted and not yet committed
            continue
        named += [f"{path.relative_to(REPO)}: {match.group()}" for match in pattern.finditer(text)]
    assert named == []


def pins(path: Path) -> dict[str, str]:
    lines = [line.split("#")[0].strip() for line in path.read_text().splitlines()]
    return dict(line.split()[0].split("==") for line in lines if line)


def test_pinned_lists_are_plain_and_agree() -> None:
    lists = [path for path in tracked_files() if path.parent.name in ("3rdparty", "pants") and path.suffix == ".txt"]
    others = (
        "cpu-overrides.txt",
        "cuda-overrides.txt",
        "cpu.txt",
        "cuda.txt",
    )  # tests/test_setup.py reads the last two
    lists = [path for path in lists if path.name not in others]
    assert lists
    stack = pins(REPO / "3rdparty" / "cpu.txt")
    lists.remove(REPO / "3rdparty" / "docs.txt")
    for path in lists:
        for line in path.read_text().splitlines():
            assert re.fullmatch(r"[A-Za-z0-9_.-]+==[A-Za-z0-9_.!]+", line), f"{path.name}: {line!r} is no plain pin"
        if "pants-" not in path.name:  # Pants itself runs on another Python, with pins of its own
            assert {name: pin for name, pin in pins(path).items() if stack.get(name) != pin} == {}


@pytest.mark.parametrize("name", ["torchvision", "torchaudio", "torchcodec"])
def test_cuda_only_builds_stay_out(name: str) -> None:
    assert name not in pins(REPO / "3rdparty" / "cpu.txt")
