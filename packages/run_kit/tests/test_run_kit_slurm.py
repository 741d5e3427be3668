"""Jobs of SLURM: refused before they are submitted, and run as SLURM would run them."""

import os
import re
import shutil
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from run_kit_cluster_app import register

from plinth_testing import FinishedJob, Slurm, network_hosts, raises
from plinth_testing.network_hosts import is_available
from run_kit.cluster.slurm import BATCH_FILE, main, submission
from run_kit.errors import ConfigError

Run = Callable[..., FinishedJob]


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The variables of a job, in a folder of its own; the commands toy and once exist."""
    commands = register(tmp_path / "commands")
    monkeypatch.syspath_prepend(str(tmp_path / "commands"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "outputs").mkdir()
    return {**os.environ, **commands}


@pytest.mark.parametrize(
    ("arguments", "fields"),
    [
        (["--nodes=2"], {"field": None}),
        (["trainer.steps=2"], {"field": None}),
        (["toy", "trainer.resume=never"], {"field": "trainer.resume", "value": "never"}),
        (["toy", "trainer.resume=auto", "trainer.resume_from=x"], {"field": "trainer.resume_from", "value": "x"}),
        (["toy", "trainer.ray_address=auto"], {"field": "trainer.ray_address", "value": "auto"}),
        (["--nodes=2", "once"], {"field": "nodes", "value": "--nodes=2"}),
    ],
)
@pytest.mark.usefixtures("environment")
def test_what_the_job_sets_itself_is_refused(arguments: list[str], fields: dict[str, Any]) -> None:
    with raises(ConfigError, **fields):
        submission(arguments)


@pytest.mark.parametrize("arguments", [["nowhere"], ["report"], ["toy", "trainer.setps=3"]])
@pytest.mark.usefixtures("environment")
def test_what_the_app_refuses_is_not_submitted(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2


def test_the_command_line_of_sbatch(environment: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    del environment
    given = ["--nodes=3", "--time=1-00:00:00", "--gpus-per-node=h100:4", "--job-name=mine"]
    assert submission([*given, "toy", "trainer.steps=7"]) == [
        *("sbatch", "--job-name=plinth-toy", "--cpus-per-task=36", "--requeue", *given),
        *(str(BATCH_FILE), sys.executable),
        *("toy", "trainer.steps=7", "trainer.resume=auto", "trainer.experiment=toy-@JOB_ID@"),
    ]
    named = submission(["toy", "trainer.experiment=mine", "trainer.resume=auto"])
    assert named[-3:] == ["toy", "trainer.experiment=mine", "trainer.resume=auto"], "a later job of this name resumes"
    once = submission(["once", "seed=2"])
    assert once[1:4] == ["--job-name=plinth-once", "--cpus-per-task=4", "--no-requeue"]
    assert once[-2:] == ["once", "seed=2"]
    assert main([]) == 0
    assert capsys.readouterr().out == BATCH_FILE.read_text()


def test_sbatch_is_called_or_its_command_line_is_printed(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    del environment
    assert main(["toy", "trainer.steps=1"]) == 1
    assert capfd.readouterr().out.startswith("sbatch --job-name=plinth-toy ")
    sbatch = Path("bin/sbatch")
    sbatch.parent.mkdir()
    sbatch.write_text('#!/bin/sh\necho "Submitted: $*"; exit 3\n')
    sbatch.chmod(sbatch.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{sbatch.parent.resolve()}:{os.environ['PATH']}")
    assert main(["--mem=1G", "toy"]) == 3
    assert re.search("Submitted: .* --mem=1G .* toy trainer.resume=auto", capfd.readouterr().out)


def test_shellcheck_has_nothing_to_say() -> None:
    subprocess.run(["bash", "-n", BATCH_FILE], check=True)
    if shutil.which("shellcheck") is not None:
        done = subprocess.run(["shellcheck", BATCH_FILE], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout


@pytest.fixture
def run(environment: dict[str, str], tmp_path: Path) -> Run:
    """Runs `plinth slurm` with these arguments; nothing survives the job."""

    def run_job(*arguments: str, env: dict[str, str] | None = None, **signals: Callable[[str], bool]) -> FinishedJob:
        done = Slurm(tmp_path).run(submission(arguments), env={**environment, **(env or {})}, **signals)
        assert done.survivors == [], done.output
        return done

    return run_job


def test_values_cannot_leave_their_quotes(run: Run, tmp_path: Path) -> None:
    name = "a b'\"$(touch broken)`touch broken`;#"
    (tmp_path / name).mkdir()
    done = run("toy", f"trainer.output_dir={name}", "trainer.steps=1", env={"PLINTH_SETUP": "echo set up"})
    assert (done.exit_code, "step 1 of toy-" in done.output, "set up" in done.output) == (0, True, True), done.output
    assert not (tmp_path / "broken").exists()


def test_the_job_is_queued_again_until_all_steps_are_taken(run: Run) -> None:
    """SIGUSR1 in the second step: it is finished and saved, and the next start takes the others."""
    done = run("toy", "trainer.steps=3", "trainer.step_s=0.5", USR1=lambda out: "step 2 begins" in out)
    assert (done.exit_code, done.num_starts) == (0, 2), done.output
    assert re.findall(r"^step (\d) of toy-\d+ is done", done.output, re.MULTILINE) == ["1", "2", "3"]
    last = run("toy", "trainer.steps=2", "trainer.step_s=0.5", USR1=lambda out: "step 2 begins" in out)
    assert (last.exit_code, last.num_starts) == (0, 1), "a signal in the last step is no reason to start again"


def test_a_failed_a_cancelled_and_an_endless_job_are_not_queued_again(run: Run) -> None:
    failed = run("toy", "trainer.fail_at=2")
    assert (failed.exit_code, failed.num_starts) == (1, 1), failed.output
    slow = ("toy", "trainer.steps=100", "trainer.step_s=0.5")
    cancelled = run(*slow, TERM=lambda out: "step 1 begins" in out)
    assert (cancelled.exit_code, cancelled.num_starts) == (143, 1), cancelled.output
    assert "step 1 of" in cancelled.output, "the step is finished"
    last = run(*slow, env={"PLINTH_MAX_REQUEUES": "0"}, USR1=lambda out: "step 1 begins" in out)
    assert (last.exit_code, last.num_starts) == (138, 1), last.output


def side_by_side(slurm: Slurm, command: list[str], environment: dict[str, str], **signals: Any) -> list[FinishedJob]:
    """Two jobs at once."""
    jobs: list[FinishedJob] = []
    threads = [
        threading.Thread(target=lambda: jobs.append(slurm.run(command, env=environment, **signals))) for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return jobs


def test_two_jobs_at_once_keep_to_their_own_runs(environment: dict[str, str], tmp_path: Path) -> None:
    command = submission(["toy", "trainer.steps=4", "trainer.step_s=0.3"])
    names = set()
    for done in side_by_side(Slurm(tmp_path), command, environment, USR1=lambda out: "step 2 begins" in out):
        assert (done.exit_code, done.num_starts, done.survivors) == (0, 2, []), done.output
        steps = re.findall(r"^step (\d) of (\S+) is done", done.output, re.MULTILINE)
        assert [step for step, _ in steps] == ["1", "2", "3", "4"]
        names |= {name for _, name in steps}
    assert len(names) == 2


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.skipif(not is_available(), reason="needs root and network namespaces")
def test_two_jobs_share_two_nodes_with_a_ray_cluster_each(environment: dict[str, str], tmp_path: Path) -> None:
    pytest.importorskip("ray")
    command = submission(["--nodes=2", "--cpus-per-task=1", "toy", "trainer.steps=2"])
    small = {**environment, "PLINTH_OBJECT_STORE_BYTES": "100000000"}
    with network_hosts(2) as hosts:
        jobs = side_by_side(Slurm(tmp_path, hosts=hosts), command, small)
        for done in jobs:
            assert (done.exit_code, done.survivors) == (0, []), done.output
            assert f"tasks ran on {hosts[0].address} {hosts[1].address}" in done.output
    assert not [path for done in jobs for path in Path("/tmp").glob(f"plinth_{done.job_id}_*")]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("timeout_s", "ray_dir", "said"), [("0", "/tmp", ""), ("60", "/proc", "cannot create directory")]
)
def test_nodes_that_do_not_join_end_the_job(
    environment: dict[str, str], tmp_path: Path, timeout_s: str, ray_dir: str, said: str
) -> None:
    pytest.importorskip("ray")
    here: Any = SimpleNamespace(address="127.0.0.1", command=list)
    variables = {**environment, "PLINTH_START_TIMEOUT_S": timeout_s, "PLINTH_RAY_DIR": ray_dir}
    done = Slurm(tmp_path, hosts=[here, here]).run(submission(["--nodes=2", "toy"]), env=variables)
    assert (done.exit_code, done.num_starts, done.survivors) == (1, 1, []), done.output
    assert "error: 0 of 2 nodes have joined Ray" in done.output
    assert said in done.output
