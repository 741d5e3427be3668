"""Private parts of other packages: all exist, and tested versions are stated once."""

import ast
import re
import tomllib
from itertools import chain
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import ckpt.upstream
import ds_engine.upstream
import rollout_vllm.servers.patch as servers
import weight_sync.vllm_plugin.patch as plugin
from plinth_base.fence import missing_part
from run_kit import doctor

REPO = Path(__file__).resolve().parents[1]
MODULES = {"ckpt": ckpt.upstream, "ds_engine": ds_engine.upstream, "rollout_vllm": servers, "weight_sync": plugin}
FENCES = {package: module.FENCE for package, module in MODULES.items()}
RECORDS = {package: module.records for package, module in MODULES.items()}


@pytest.mark.slow
def test_every_private_part_exists_upstream() -> None:
    """With the versions of 3rdparty/cpu.txt: nothing is refused or left to upstream."""
    parts, failed = doctor.read_parts()
    assert (parts.keys(), failed) == (RECORDS.keys(), [])
    assert {row["state"] for rows in parts.values() for row in rows} <= {"active", "not installed"}


@pytest.mark.parametrize("package", ["ckpt", "ds_engine"])
def test_private_parts_are_declared(package: str) -> None:
    """Attributes of objects other than self that begin with an underscore, but for Python's own and the package's."""
    trees = [ast.parse(path.read_text()) for path in (REPO / "packages" / package / package).rglob("*.py")]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    used = {
        node.attr
        for node in nodes
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__")
        and not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls", "os", "sys"))
    }  # fmt: skip
    own = {node.name for node in nodes if isinstance(node, ast.FunctionDef)} | {"_replace"}  # a NamedTuple's, public
    own |= {node.attr for node in nodes if isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == "self"}
    rows = RECORDS[package]()
    declared = set(re.findall(r"\w+", " ".join(row["replaces"] + " " + row["reads"] for row in rows)))
    assert used - own <= declared
    assert used or package == "ckpt"


@pytest.mark.parametrize("package", FENCES)
def test_tested_versions_are_those_of_pyproject(package: str) -> None:
    project = tomllib.loads((REPO / "packages" / package / "pyproject.toml").read_text())["project"]
    lists = [project["dependencies"], *project["optional-dependencies"].values()]
    stated = {each.name: each.specifier for each in map(Requirement, chain(*lists)) if each.specifier}
    tested = FENCES[package].tested
    assert {name: str(Requirement(f"x{bounds}").specifier) for name, bounds in tested.items()} == {
        name: str(stated[name]) for name in tested
    }


def test_packages_that_touch_the_same_upstream_state_the_same_versions() -> None:
    bounds = {(name, tested) for fence in FENCES.values() for name, tested in fence.tested.items()}
    assert len(bounds) == len(dict(bounds))


@pytest.mark.slow
@pytest.mark.parametrize("package", FENCES)
def test_the_absence_of_every_part_would_be_found(package: str) -> None:
    """With the installed versions: no name or signature passes whatever it is."""
    RECORDS[package]()
    for patch in FENCES[package].patches:
        for owner, parts in (*patch.replaces.items(), *patch.reads.items()):
            for part in parts if "not installed" not in (patch.problem() or "") else ():
                name, opened, _ = part.partition("(")
                assert missing_part(owner, name.replace("|", "_|") + "_") is not None, (owner, part)
                if opened:
                    assert "takes" in (missing_part(owner, f"{name}(_)") or ""), (owner, part)
