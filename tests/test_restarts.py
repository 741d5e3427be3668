"""Runs that lose ranks, servers and hosts, and continue by themselves."""

import os
import random
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.run_folders import assert_equal_runs, only

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.thorough]

ARGUMENTS = (
    "trainer.num_ranks=2",
    "rollout.num_servers=2",
    "rollout.deterministic=true",
    "batch.train_batch_size=4",
    "batch.mini_batch_size=2",
    "sampling.n=4",
    "algorithm.kl_coef=0.01",
    "algorithm.entropy_coef=0.05",  # a gradient even where all answers are equally wrong
    "warm_start.steps=5",
    "warm_start.optim.warmup_steps=0",
    "trainer.val_before_train=false",
    "trainer.val_after_train=false",
    "trainer.save_freq=1",
    "trainer.stall_timeout_s=30",
)


def last_step(run: Path) -> int:
    path = run / "metrics.tsv"
    return (
        max((int(line.split("\t")[0]) for line in path.read_text().splitlines()[1:]), default=0) if path.exists() else 0
    )


def processes(host: Any, name: str) -> list[int]:
    """Processes on a host whose command line has that name."""
    pids = []
    for pid in host.pids():
        try:
            if name in " ".join(psutil.Process(pid).cmdline()):
                pids.append(pid)
        except psutil.Error:
            continue
    return pids


def strike(chance: random.Random, cluster: Any) -> str:
    """Kills or stops a random rank or server on a random host."""
    victims = [
        (kind, pid)
        for host in cluster.hosts
        for kind, name in (("rank", "ray::TrainerWorker"), ("server", "_serve.py"))
        for pid in processes(host, name)[:1]
    ]
    if not victims:
        return ""
    kind, pid = chance.choice(victims)
    number = signal.SIGSTOP if kind == "rank" and chance.random() < 0.2 else signal.SIGKILL
    os.kill(pid, number)
    return f"{number.name} to a {kind}"


@pytest.mark.timeout(3600)
def test_twenty_strikes_leave_no_trace(
    tmp_path: Path, start_app: Callable[..., Any], start_cluster: Callable[..., Any]
) -> None:
    """Ranks and servers on two hosts are killed or stopped at random instants."""
    steps = 60
    total = f"trainer.total_training_steps={steps}"
    whole = start_app(tmp_path / "whole", *ARGUMENTS, total)
    whole.read_in_background()
    assert whole.process.wait(timeout=1200) == 0, whole.output

    chance = random.Random(os.environ.get("PLINTH_STRIKES_SEED", "1"))
    cluster = start_cluster(2)
    limits = ("trainer.ranks_per_node=1", "trainer.max_restarts=40", "trainer.max_server_restarts=40")
    struck = start_app(tmp_path / "struck", *ARGUMENTS, total, *limits, cluster=cluster)
    struck.wait_for("step  2/60")
    log = []
    reader = struck.read_in_background()
    run = only((tmp_path / "struck").iterdir())
    while struck.process.poll() is None and len(log) < 20:
        before = last_step(run)
        if chance.random() < 0.75:  # else the next strike may meet the recovery from the last
            while last_step(run) == before and struck.process.poll() is None:
                time.sleep(0.2)
        time.sleep(chance.uniform(0.0, 5.0))
        step = last_step(run)
        if event := strike(chance, cluster):
            log.append(f"step {step}: {event}")
    code = struck.process.wait(timeout=1200)
    reader.join(30)
    summary = "\n".join([*log, *re.findall(r".*(?:new ranks continue|training again).*", struck.output)])
    print(summary)
    assert code == 0, f"{summary}\n{struck.output[-6000:]}"
    assert len(log) == 20, summary
    assert_equal_runs(run, only((tmp_path / "whole").iterdir()))


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
