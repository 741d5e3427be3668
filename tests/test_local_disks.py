"""Hosts that share no folder: checkpoints go from each local disk to `trainer.checkpoint_url` and back.

Every host is a network namespace with a Ray node; all but the first have an empty disk of their own at the output
folder (a mount namespace with a tmpfs), which is gone when the host is killed.
"""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckpt import RemoteCheckpoints
from tests.run_folders import comparable, exact_metrics, only
from tests.test_restarts import ARGUMENTS

pytestmark = [pytest.mark.e2e, pytest.mark.thorough, pytest.mark.timeout(1500)]

STEPS = 6
TOTAL = (*ARGUMENTS, f"trainer.total_training_steps={STEPS}", "trainer.experiment=job")


def on_local_disks(url: str) -> tuple[str, ...]:
    limits = ("trainer.ranks_per_node=1", "trainer.max_server_restarts=1")
    return (*TOTAL, *limits, "trainer.local_disks=true", f"trainer.checkpoint_url={url}")


def test_a_run_that_lost_a_host_resumes_on_new_hosts_bit_for_bit(
    tmp_path: Path, start_app: Callable[..., Any], start_cluster: Callable[..., Any]
) -> None:
    expected = start_app(tmp_path / "whole", *TOTAL).succeeded()

    local, url = tmp_path / "local", f"file://{tmp_path}/storage"
    local.mkdir()
    cluster = start_cluster(2, local_folder=local)
    first = start_app(local, *on_local_disks(url), cluster=cluster)
    first.wait_for(f"step 3/{STEPS}")
    cluster.kill_host(1)
    assert first.finish() == 1, first.output
    assert "trainer.local_disks: each host uploads the files of its ranks" in first.output
    name = only(path for path in local.iterdir() if path.name.startswith("job_")).name
    assert f"trainer.resume=auto trainer.resume_from={url}/{name}" in first.output
    shutil.rmtree(local)
    local.mkdir()

    arguments = (*on_local_disks(url), "trainer.resume=auto")
    second = start_app(local, *arguments, cluster=start_cluster(2, local_folder=local))
    assert second.finish() == 0, second.output
    assert f"was downloaded from {url}/{name} to {local}/.downloads/{name}" in second.output
    assert "is on all 2 hosts of ranks; downloaded now: " in second.output
    run = only(path for path in local.iterdir() if path.name.startswith("job_"))
    assert RemoteCheckpoints(f"{url}/{run.name}").steps() == [STEPS - 1, STEPS]
    here = [path.name[: len(".part_step_00000000")] for path in (run / "checkpoints").iterdir()]
    assert here == [f".part_step_{STEPS:08d}"], "the files of this host's rank, and no others"

    repeated = comparable(run)
    assert repeated
    assert set(repeated) < set(exact_metrics(expected)), "the resumed run did everything again"
    assert repeated == {step: comparable(expected)[step] for step in repeated}
    weights = only((expected / "model").glob("*.safetensors"))
    assert weights.read_bytes() == (run / "model" / weights.name).read_bytes()


def test_hosts_without_a_common_storage_are_refused(
    tmp_path: Path, start_app: Callable[..., Any], start_cluster: Callable[..., Any]
) -> None:
    local = tmp_path / "local"
    local.mkdir()
    cluster = start_cluster(2, local_folder=local)
    there = cluster.hosts[1].address

    def refused(*arguments: str) -> str:
        app = start_app(local, *TOTAL, "trainer.ranks_per_node=1", *arguments, cluster=cluster)
        assert app.finish() == 2, app.output
        assert "run folder" not in app.output
        return str(app.output)

    error = refused()
    assert "error: trainer.output_dir: got" in error
    assert f"Ray node {there}" in error
    assert "error: trainer.checkpoint_url: got null" in refused("trainer.local_disks=true")
    error = refused("trainer.local_disks=true", f"trainer.checkpoint_url=file://{local}/storage")
    assert "trainer.checkpoint_url: got" in error
    assert "this host does not see" in error
