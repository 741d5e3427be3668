"""Hosts that share no folder: checkpoints go from each local disk to `trainer.checkpoint_url` and back.

Every host is a network namespace with a Ray node; all but the first have an empty disk of their own at the output
folder (a mount namespace with a tmpfs), which is gone when the host is killed.
"""

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckpt import RemoteCheckpoints
from tests.run_folders import assert_equal_runs, comparable, exact_metrics, only
from tests.test_restarts import ARGUMENTS

pytestmark = [pytest.mark.e2e, pytest.mark.thorough]

STEPS = 6
TOTAL = (*ARGUMENTS, f"trainer.total_training_steps={STEPS}", "trainer.experiment=job")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder for the uninterrupted run on one host."""
    return tmp_path_factory.mktemp("whole")


def uninterrupted(whole: Path, start_app: Callable[..., Any]) -> Path:
    """The folder of a run on one host that was left alone."""
    if not any(whole.iterdir()):
        app = start_app(whole, *TOTAL)
        assert app.finish() == 0, app.output
    return only(whole.iterdir())


def on_local_disks(url: str) -> tuple[str, ...]:
    limits = ("trainer.ranks_per_node=1", "trainer.max_server_restarts=1")
    return (*TOTAL, *limits, "trainer.local_disks=true", f"trainer.checkpoint_url={url}")


def test_a_lost_host_is_replaced_by_one_that_downloads_its_checkpoint(
    tmp_path: Path, whole: Path, start_app: Callable[..., Any], start_cluster: Callable[..., Any]
) -> None:
    local, url = tmp_path / "local", f"file://{tmp_path}/storage"
    local.mkdir()
    cluster = start_cluster(3, local_folder=local)
    app = start_app(local, *on_local_disks(url), cluster=cluster)
    app.wait_for(f"step 3/{STEPS}")
    cluster.kill_host(1)
    assert app.finish() == 0, app.output
    assert "trainer.local_disks: each host uploads the files of its ranks" in app.output
    assert "nodes with 1 ranks were lost; 1 found room on other nodes: as many ranks as before" in app.output
    assert re.search(r"step \d of file://\S+ is on all 2 hosts of ranks; downloaded now: [\d.e-]+ GB", app.output), (
        app.output
    )
    run = only(path for path in local.iterdir() if path.name.startswith("job_"))
    assert_equal_runs(run, uninterrupted(whole, start_app))
    assert RemoteCheckpoints(f"{url}/{run.name}").steps() == [STEPS - 1, STEPS]
    here = [path.name[: len(".part_step_00000000")] for path in (run / "checkpoints").iterdir()]
    assert here == [f".part_step_{STEPS:08d}"], "the files of this host's rank, and no others"


def test_a_stopped_run_resumes_on_new_hosts_bit_for_bit(
    tmp_path: Path, whole: Path, start_app: Callable[..., Any], start_cluster: Callable[..., Any]
) -> None:
    local, url = tmp_path / "local", f"file://{tmp_path}/storage"
    local.mkdir()
    first = start_app(local, *on_local_disks(url), cluster=start_cluster(2, local_folder=local))
    first.wait_for(f"step 2/{STEPS}")
    first.press_ctrl_c()
    assert first.finish() == 130, first.output
    name = only(path for path in local.iterdir() if path.name.startswith("job_")).name
    assert f"trainer.resume=auto trainer.resume_from={url}/{name}" in first.output
    shutil.rmtree(local)
    local.mkdir()

    arguments = (*on_local_disks(url), "trainer.resume=auto")
    second = start_app(local, *arguments, cluster=start_cluster(2, local_folder=local))
    assert second.finish() == 0, second.output
    assert f"was downloaded from {url}/{name} to {local}/.downloads/{name}" in second.output
    run = only(path for path in local.iterdir() if path.name.startswith("job_"))
    expected = uninterrupted(whole, start_app)
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
