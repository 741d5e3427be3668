"""docs/rayjob.yaml: the manifest for Kubernetes that users copy."""

import contextvars
import shlex
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml

from run_kit.commands import main

MANIFEST = Path(__file__).resolve().parents[1] / "docs" / "rayjob.yaml"


def test_the_manifest_runs_an_app_on_a_ray_cluster(capsys: pytest.CaptureFixture[str]) -> None:
    job = yaml.safe_load(MANIFEST.read_text(encoding="utf-8"))
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    program, *arguments = shlex.split(job["spec"]["entrypoint"])
    assert program == "plinth"
    with pytest.raises(SystemExit) as ended:
        contextvars.copy_context().run(main, [*arguments, "--print-config"])
    assert ended.value.code == 0, "the app knows all keys"
    trainer = yaml.safe_load(capsys.readouterr().out)["trainer"]
    assert trainer["experiment"].endswith(job["metadata"]["name"])
    cluster = job["spec"]["rayClusterSpec"]
    assert cluster["rayVersion"] == version("ray")
    (workers,) = cluster["workerGroupSpecs"]
    assert workers["replicas"] == workers["minReplicas"] == workers["maxReplicas"]
    pod = cluster["headGroupSpec"]["template"]["spec"]
    assert workers["template"]["spec"] == pod
    (container,) = pod["containers"]
    assert container["resources"]["requests"] == container["resources"]["limits"]
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    assert set(mounts.values()) == {volume["name"] for volume in pod["volumes"]}
    assert "/dev/shm" in mounts
    assert Path(trainer["output_dir"]).is_relative_to("/data")
    assert "/data" in mounts
