"""Private parts of other packages: all exist, docs/upstream.md lists them, and tested versions are stated once."""

import ast
import re
import tomllib
from itertools import chain
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import ckpt.upstream
import ds_engine.upstream
from run_kit import doctor

REPO = Path(__file__).resolve().parents[1]


@pytest.mark.slow
def test_every_private_part_exists_upstream_and_is_documented(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the versions of 3rdparty/cpu.txt: nothing is refused or left to upstream."""
    documented = (REPO / "docs" / "upstream.md").read_text(encoding="utf-8")
    written = tmp_path / "upstream.md"
    written.write_text(documented, encoding="utf-8")
    assert doctor.main(["--markdown", str(written)]) == 0
    lines = re.findall(r"^(\w+) +(active|stock path|refused|not installed) +\S", capsys.readouterr().out, re.MULTILINE)
    assert {package for package, _ in lines} == {"ckpt", "ds_engine", "rollout_vllm", "weight_sync"}
    assert {state for _, state in lines} <= {"active", "not installed"}
    assert documented == written.read_text(encoding="utf-8"), "run: plinth doctor --markdown docs/upstream.md"


@pytest.mark.parametrize("package", ["ckpt", "ds_engine"])
def test_private_parts_are_declared(package: str) -> None:
    """Attributes of objects other than self that begin with an underscore, but for Python's own and the package's."""
    trees = [ast.parse(path.read_text()) for path in (REPO / "packages" / package / package).rglob("*.py")]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    found = {
        node.attr
        for node in nodes
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__")
        and not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls", "os", "sys"))
    }  # fmt: skip
    own = {node.name for node in nodes if isinstance(node, ast.FunctionDef)}
    own |= {node.attr for node in nodes if isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == "self"}
    rows = {"ckpt": ckpt.upstream, "ds_engine": ds_engine.upstream}[package].records()
    declared = set(re.findall(r"\w+", " ".join(row["replaces"] + " " + row["reads"] for row in rows)))
    assert found - own <= declared
    assert found or package == "ckpt"


@pytest.mark.parametrize("package", ["ckpt", "ds_engine"])
def test_tested_versions_are_those_of_pyproject(package: str) -> None:
    project = tomllib.loads((REPO / "packages" / package / "pyproject.toml").read_text())["project"]
    lists = [project["dependencies"], *project["optional-dependencies"].values()]
    stated = {each.name: each.specifier for each in map(Requirement, chain(*lists)) if each.specifier}
    tested = {"deepspeed": ckpt.upstream.TESTED} if package == "ckpt" else ds_engine.upstream.TESTED
    assert {name: str(Requirement(f"x{bounds}").specifier) for name, bounds in tested.items()} == {
        name: str(stated[name]) for name in tested
    }


def test_packages_that_touch_the_same_upstream_state_the_same_versions() -> None:
    """Packages share no code, so these bounds stand twice."""
    from rollout_vllm.servers import patch as servers
    from weight_sync.vllm_plugin import patch as plugin

    assert ds_engine.upstream.TESTED["deepspeed"] == ckpt.upstream.TESTED
    assert servers.TESTED == plugin.TESTED
