"""Runs that lose a host or fill a disk."""

import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.run_folders import TINY_STEPS

pytestmark = [pytest.mark.e2e, pytest.mark.thorough]

ARGUMENTS = (
    *(*TINY_STEPS, "trainer.num_ranks=2", "rollout.num_servers=2", "rollout.deterministic=true"),
    *("algorithm.kl_coef=0.01", "trainer.save_freq=1", "trainer.stall_timeout_s=30"),
)


def test_a_lost_host_ends_the_run(
    tmp_path: Path, start_app: Callable[..., Any], start_cluster: Callable[..., Any]
) -> None:
    cluster = start_cluster(2)
    app = start_app(
        tmp_path, *ARGUMENTS, "trainer.total_training_steps=50", "trainer.ranks_per_node=1", cluster=cluster
    )
    app.wait_for("step  3/50")
    cluster.kill_host(1)
    assert app.finish() == 1, app.output
    assert f"the nodes of ranks {cluster.hosts[1].address} were lost" in app.output
    assert "To resume after step" in app.output
    assert not app.survivors()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A folder with room for few checkpoints; `mount -o remount,size=…` makes it larger."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=40m", "none", disk], capture_output=True, check=False)
    if mounted.returncode != 0:
        pytest.skip("mounting needs root")
    yield disk
    subprocess.run(["umount", "--lazy", disk], check=True)


def test_a_full_disk_ends_the_run_and_it_resumes_when_there_is_room(
    small_disk: Path, start_app: Callable[..., Any]
) -> None:
    arguments = [
        *ARGUMENTS,
        "trainer.keep_checkpoints=100",
        "rollout.num_servers=1",
        "trainer.total_training_steps=200",
    ]
    app = start_app(small_disk, *arguments)
    assert app.finish() == 1, app.output
    error = next(line for line in app.output.splitlines() if line.startswith("error: "))
    assert re.search(
        r"CheckpointSpaceError: .*: a checkpoint needs about [\d,]+ bytes .* the disk has [\d,]+ free", error
    )
    assert "new ranks continue" not in app.output, "restarts do not empty a disk"
    assert not app.survivors()
    (resume,) = (line for line in app.output.splitlines() if line.startswith("To resume after step"))
    subprocess.run(["mount", "-o", "remount,size=1g", small_disk], check=True)
    command = resume.partition(": python -m apps.grpo.main ")[2].split()
    app = start_app(small_disk, *command)
    app.wait_for("tok/s")
    app.press_ctrl_c()
    assert app.finish() == 130, app.output
