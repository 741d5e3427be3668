"""The fence around other packages: every private part exists, docs/upstream.md lists it, and versions are stated once."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import ckpt.upstream
import ds_engine.upstream
from run_kit import doctor

REPO = Path(__file__).resolve().parents[1]


def test_every_private_part_exists_upstream_and_is_documented(capsys: pytest.CaptureFixture[str]) -> None:
    """Also that no part is refused with the installed versions, which 3rdparty/cpu.txt pins."""
    assert doctor.main(["--markdown"]) == 0
    listed = capsys.readouterr().out
    assert doctor.main([]) == 0
    states = re.findall(r"^(\w+) +(active|stock path|refused|not installed) +\S", capsys.readouterr().out, re.M)
    assert {package for package, _ in states} == {"ckpt", "ds_engine", "rollout_vllm", "weight_sync"}
    assert {state for _, state in states} <= {"active", "not installed"}
    written = (REPO / "docs" / "upstream.md").read_text(encoding="utf-8")
    assert written.partition("## ")[2] == listed.partition("## ")[2], "run: plinth doctor --markdown"


@pytest.mark.parametrize("package", ["ckpt", "ds_engine"])
def test_tested_versions_are_those_of_pyproject(package: str) -> None:
    project = tomllib.loads((REPO / "packages" / package / "pyproject.toml").read_text())["project"]
    lists = [project["dependencies"], *project["optional-dependencies"].values()]
    stated = {each.name: each.specifier for each in map(Requirement, sum(lists, [])) if each.specifier}
    tested = {"deepspeed": ckpt.upstream.TESTED} if package == "ckpt" else ds_engine.upstream.TESTED
    assert {name: str(Requirement(f"x{bounds}").specifier) for name, bounds in tested.items()} == {
        name: str(stated[name]) for name in tested
    }
