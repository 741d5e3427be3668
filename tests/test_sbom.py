"""scripts/sbom.py lists every pin and package once, deterministically, and as CycloneDX."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from scripts.build import REPO, name_and_version, projects
from scripts.sbom import STACKS, bill, pinned


@pytest.mark.parametrize("stack", STACKS)
def test_every_pin_and_package_is_listed_once(stack: str) -> None:
    content = bill(stack)
    parts = [content["metadata"]["component"], *content["components"]]
    found = [(part["name"], part["version"]) for part in parts]
    lines = (REPO / "3rdparty" / f"{stack}.txt").read_text().splitlines()
    pins = [tuple(line.split()[0].split("==")) for line in lines]
    assert sorted(found) == sorted([*pins, *map(name_and_version, projects())])
    digests = {part["name"]: json.dumps(part).count('"SHA-256"') for part in parts}
    assert digests == {**dict.fromkeys(digests, 0), **{line.split("==")[0]: line.count("--hash") for line in lines}}


@pytest.mark.parametrize("stack", STACKS)
def test_dependencies_name_components(stack: str) -> None:
    content = bill(stack)
    refs = {part["bom-ref"] for part in [content["metadata"]["component"], *content["components"]]}
    edges = {edge["ref"]: edge["dependsOn"] for edge in content["dependencies"]}
    assert set(edges) == refs >= set().union(*edges.values())
    (runtime,) = [ref for ref in refs if ref.startswith("pkg:pypi/plinth-rl-runtime@")]
    assert {"ray", "plinth-rl-core"} <= {ref.split("/")[1].split("@")[0] for ref in edges[runtime]}


def test_two_processes_write_the_same_bytes(tmp_path: Path) -> None:
    for name in "ab":
        command = [sys.executable, str(REPO / "scripts" / "sbom.py"), "--out", str(tmp_path / name)]
        subprocess.run(command, check=True, capture_output=True, cwd=tmp_path)
    for stack in STACKS:
        first, second = (tmp_path / name / f"sbom_{stack}.json" for name in "ab")
        assert first.read_bytes() == second.read_bytes()
    assert bill("cpu")["serialNumber"] != bill("cuda")["serialNumber"]


def test_files_of_one_version_keep_their_hashes_apart() -> None:
    one, two = (f"--hash=sha256:{digit * 64}" for digit in "ab")
    assert pinned(f"x==1 {one}")["hashes"] == [{"alg": "SHA-256", "content": "a" * 64}]
    references: list[Any] = pinned(f"x==1 {one} {two}")["externalReferences"]
    assert [reference["hashes"][0]["content"][0] for reference in references] == ["a", "b"]
    assert "hashes" not in pinned("x==1")


@pytest.mark.parametrize("stack", STACKS)
def test_the_schema_of_cyclonedx_accepts_it(stack: str) -> None:
    """With cyclonedx-python-lib[json-validation], which set-up does not install."""
    validation = pytest.importorskip(
        "cyclonedx.validation.json", reason="pip install 'cyclonedx-python-lib[json-validation]'"
    )
    schema = pytest.importorskip("cyclonedx.schema")
    validator = validation.JsonStrictValidator(schema.SchemaVersion.V1_6)
    assert validator.validate_str(json.dumps(bill(stack))) is None
