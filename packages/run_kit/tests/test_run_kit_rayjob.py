"""Manifests of KubeRay: valid by its schema, and refused before they are written."""

import copy
import functools
import json
import os
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from run_kit_cluster_app import register
from run_kit_rayjob_examples import APP, EXAMPLES, FULL, SMALL
from run_kit_rayjob_schema import SCHEMA, full_schema, strict

from run_kit.cluster.rayjob import main, manifest

jsonschema = pytest.importorskip("jsonschema")


@functools.cache
def schemas() -> list[Any]:
    """The part of KubeRay's schema that is kept here; with PLINTH_RAYJOB_CRD=FILE also all of it."""
    crd = os.environ.get("PLINTH_RAYJOB_CRD")
    return [strict(json.loads(SCHEMA.read_text())), *([strict(full_schema(Path(crd)))] if crd else [])]


def test_manifests_are_valid_by_kuberays_schema() -> None:
    for schema in schemas():
        for example in EXAMPLES:
            jsonschema.Draft7Validator(schema).validate(example)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("spec.entrypiont", "plinth toy"),
        ("spec.backoffLimit", "3"),
        ("spec.rayClusterSpec.authOptions.mode", "on"),
        ("spec.rayClusterSpec.workerGroupSpecs.0.replicas", "3"),
        ("spec.rayClusterSpec.workerGroupSpecs.0.groupName", None),
        ("spec.rayClusterSpec.headGroupSpec.template.spec.containers.0.volumeMounts.0.mountpath", "/x"),
        ("spec.rayClusterSpec.headGroupSpec.template.spec.containers.0.env.0.value", 1800),
        ("spec.rayClusterSpec.headGroupSpec.template.spec.containers.0.resources.limits.memory", "a lot"),
    ],
)
def test_the_schema_refuses_a_slip(path: str, value: object) -> None:
    """`value`: None removes the field."""
    changed = copy.deepcopy(EXAMPLES[1])
    *parents, last = path.split(".")
    node: Any = changed
    for key in parents:
        node = node[int(key)] if key.isdigit() else node[key]
    if value is None:
        del node[last]
    else:
        node[last] = value
    for schema in schemas():
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.Draft7Validator(schema).validate(changed)


def test_the_app_joins_the_cluster_and_resumes() -> None:
    one, four = (example["spec"] for example in EXAMPLES)
    assert shlex.split(one["entrypoint"]) == [
        *("plinth", "toy", "trainer.output_dir=/data/outputs", "trainer.resume=auto"),
        "trainer.experiment=toy-plinth-toy",
    ]
    assert "workerGroupSpecs" not in one["rayClusterSpec"]
    assert shlex.split(four["entrypoint"])[-2:] == ["trainer.experiment=toy-math", "trainer.ray_address=auto"]
    (workers,) = four["rayClusterSpec"]["workerGroupSpecs"]
    assert (workers["replicas"], workers["minReplicas"], workers["maxReplicas"]) == (3, 3, 3)
    pods = [four["rayClusterSpec"]["headGroupSpec"]["template"]["spec"], workers["template"]["spec"]]
    for pod in pods:
        (container,) = pod["containers"]
        assert container["resources"]["requests"] == container["resources"]["limits"]
        assert container["resources"]["limits"] == {"cpu": "68", "memory": "64Gi", "nvidia.com/gpu": "8"}
        assert {mount["mountPath"] for mount in container["volumeMounts"]} == {"/dev/shm", "/data"}
    assert manifest(FULL, APP) == EXAMPLES[1]
    assert SMALL.cores == 4


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    register(tmp_path / "commands")
    monkeypatch.syspath_prepend(str(tmp_path / "commands"))
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["toy"], "image: is empty; allowed: a container image"),
        (["image=x"], "no app is named"),
        (["toy", "image=x", "mem=lots"], "mem: is 'lots'; allowed: a quantity such as 64Gi"),
        (["toy", "image=x", "name=Big_Job"], "name: is 'Big_Job'; allowed: up to 47 lowercase"),
        (["toy", "image=x", "trainer.stesp=1"], "trainer.stesp: unknown key .*nearest: trainer.steps"),
        (["toy", "image=x", "claim=models"], "trainer.output_dir is outputs, .* give trainer.output_dir=/data/outputs"),
        (["once", "image=x", "nodes=2"], "nodes is 2, but once runs on one node"),
        (["toy", "image=x", "time_limit_s=0"], "time_limit_s: is 0; allowed: 1 or more, or null"),
        (["toy", "image=x", "mount=data"], "mount: is 'data'; allowed: an absolute path"),
        (["toy", "image=x", "file=/nowhere/a.yaml"], "file is /nowhere/a.yaml, which cannot be written"),
    ],
)
def test_mistakes_are_refused(
    commands: None, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert re.search(message, capsys.readouterr().err)
    assert not list(Path().glob("*.yaml"))


def test_the_file_holds_the_manifest(commands: None, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["toy", "image=x:1", "claim=models", "trainer.output_dir=/data/outputs", "nodes=2"])
    printed = capsys.readouterr().out
    assert ended.value.code == 0
    assert "rayjob.yaml: submit it with kubectl apply -f rayjob.yaml" in printed
    assert "trainer.save_freq is 0: an attempt after a failed pod starts from the beginning" in printed
    written = yaml.safe_load(Path("rayjob.yaml").read_text())
    for schema in schemas():
        jsonschema.Draft7Validator(schema).validate(written)
    assert written["spec"]["entrypoint"].endswith("trainer.ray_address=auto")
