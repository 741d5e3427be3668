"""Batch files: refused before they are written, and run as SLURM would run them."""

import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from run_kit_cluster_app import register

from plinth_testing import FinishedJob, Slurm, network_hosts
from plinth_testing.network_hosts import is_available
from run_kit.cluster.app import split_arguments
from run_kit.cluster.ray_node import address_towards, wait_for_nodes
from run_kit.cluster.slurm import SlurmConfig, main, time_limit_s

Write = Callable[..., str]


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The variables of a job, in a folder of its own; the commands toy and once exist."""
    found = register(tmp_path / "commands")
    monkeypatch.syspath_prepend(str(tmp_path / "commands"))
    monkeypatch.chdir(tmp_path)
    return {**os.environ, **found}


@pytest.fixture
def write(environment: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Write:
    """Writes job.sbatch and returns what was printed; raises AssertionError if the exit code is not `code`."""

    def run(*arguments: str, code: int = 0) -> str:
        with pytest.raises(SystemExit) as ended:
            main([*arguments, f"file={tmp_path / 'job.sbatch'}"])
        printed = capsys.readouterr()
        assert ended.value.code == code, printed
        return printed.out + printed.err

    return run


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no app is named"),
        (["nodes=2"], "no app is named"),
        (["nowhere"], "unknown command 'nowhere'"),
        (["report"], "plinth report RUN_FOLDER"),
        (["toy", "trainer.setps=3"], "trainer.setps: unknown key .*nearest: trainer.steps"),
        (["toy", "node=2"], "(?s)node: unknown key.*node: the nearest key of the job is nodes"),
        (["toy", "nodes=0"], "nodes: is 0; allowed: 1 or more"),
        (["toy", "time=soon"], "time: is 'soon'; allowed: minutes, HH:MM:SS or D-HH:MM:SS"),
        (["toy", "time=10"], "stop_before_s: is 600; allowed: less than time \\(10\\)"),
        (["toy", "temp_dir=/a/folder/with/a/long/path"], "temp_dir: .* at most 20 characters"),
        (["toy", "sbatch=[constraint=h100]"], "sbatch: has 'constraint=h100'; allowed: options .* begin with -"),
        (["toy", "job_name=a b"], "job_name: is 'a b'"),
        (["toy", "trainer.resume=never"], "trainer.resume is never; allowed: auto"),
        (["toy", "trainer.resume=auto", "trainer.resume_from=x"], "give trainer.experiment of that run instead"),
        (["toy", "nodes=2", "trainer.ray_address=auto"], "trainer.ray_address is auto, but the job starts Ray"),
        (["once", "nodes=2"], "nodes is 2, but once runs on one node"),
    ],
)
def test_mistakes_are_refused_before_anything_is_written(
    write: Write, tmp_path: Path, arguments: list[str], message: str
) -> None:
    assert re.search(message, write(*arguments, code=2))
    assert not (tmp_path / "job.sbatch").exists()


def test_keys_of_the_job_and_of_the_app_come_in_any_order(write: Write, tmp_path: Path) -> None:
    printed = write("toy", "nodes=3", "trainer.steps=7", "time=1-00:00:00", "gpus_per_node=4", "setup=[module load x]")
    assert "submit it with sbatch" in printed
    assert "trainer.save_freq is 0" in printed
    text = (tmp_path / "job.sbatch").read_text()
    for line in (
        "#SBATCH --nodes=3",
        "#SBATCH --cpus-per-task=36",
        "#SBATCH --gpus-per-node=4",
        "#SBATCH --time=1-00:00:00",
        "#SBATCH --requeue",
        "module load x",
        "    trainer.steps=7",
        "    trainer.resume=auto",
        '    trainer.experiment=toy-"$SLURM_JOB_ID"',
    ):
        assert f"{line}\n" in text
    assert "@" not in text.replace("B:USR1@600", "").replace("[@]", "")
    assert (tmp_path / "job.sbatch").stat().st_mode & 0o077 == 0


def test_inputs_that_this_host_lacks_are_named_on_stderr(
    environment: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "here.parquet").touch()

    def warnings(*arguments: str) -> list[str]:
        with pytest.raises(SystemExit) as ended:
            main(["toy", *arguments, "file=-"])
        assert ended.value.code == 0
        printed = capsys.readouterr()
        assert "warning" not in printed.out
        return [line for line in printed.err.splitlines() if line.startswith("warning")]

    assert warnings("model.path=/nope", "data.train=[here.parquet, nope.parquet]") == [
        "warning: model.path=/nope does not exist on this host",
        "warning: data.train=nope.parquet does not exist on this host",
    ]
    assert warnings("model.path=../nope", "data.train=nope.parquet") == [
        "warning: model.path=../nope does not exist on this host",
        "warning: data.train=nope.parquet does not exist on this host",
    ]
    for path in ("builtin:toy", "Qwen/Qwen3-0.6B", str(tmp_path)):
        assert warnings(f"model.path={path}", "data.train=here.parquet") == []


def test_a_name_that_is_given_is_kept_so_that_a_later_job_resumes_it(write: Write, tmp_path: Path) -> None:
    write("toy", "trainer.experiment=mine", "trainer.save_freq=1")
    assert "SLURM_JOB_ID" not in (tmp_path / "job.sbatch").read_text().partition("app_pid")[0]


def test_an_app_that_cannot_resume_is_not_queued_again(write: Write, tmp_path: Path) -> None:
    assert "once cannot resume: the job is not queued again" in write("once", "seed=2")
    text = (tmp_path / "job.sbatch").read_text()
    assert "#SBATCH --no-requeue" in text
    assert "resume=auto" not in text


def test_a_file_that_cannot_be_written_is_named(
    environment: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["toy", "file=/nowhere/job"])
    assert (ended.value.code, "file is /nowhere/job" in capsys.readouterr().err) == (2, True)


def test_values_cannot_leave_their_quotes(write: Write, environment: dict[str, str], tmp_path: Path) -> None:
    name = "a b'\"$(touch broken)`touch broken`;#"
    write("toy", f"trainer.output_dir={name}", "trainer.steps=1", f"setup=[echo '{tmp_path}']")
    done = Slurm(tmp_path).run(tmp_path / "job.sbatch", env=environment)
    assert (done.exit_code, "step 1 of toy-" in done.output) == (0, True), done.output
    assert not (tmp_path / "broken").exists()


def test_shellcheck_has_nothing_to_say(write: Write, tmp_path: Path) -> None:
    for arguments in (["toy"], ["toy", "nodes=4", "gpus_per_node=8"], ["once"]):
        write(*arguments)
        subprocess.run(["bash", "-n", "job.sbatch"], cwd=tmp_path, check=True)
        if shutil.which("shellcheck") is not None:
            done = subprocess.run(["shellcheck", "job.sbatch"], cwd=tmp_path, capture_output=True, text=True)
            assert done.returncode == 0, done.stdout


def run_job(write: Write, environment: dict[str, str], folder: Path, *arguments: str, **options: object) -> FinishedJob:
    (folder / "outputs").mkdir(exist_ok=True)
    write("toy", "time=00:20:00", *arguments)
    done = Slurm(folder).run(folder / "job.sbatch", env=environment, **options)  # type: ignore[arg-type]
    assert done.survivors == [], done.output
    assert not done.timed_out, done.output
    return done


def test_the_job_is_queued_again_until_all_steps_are_taken(
    write: Write, environment: dict[str, str], tmp_path: Path
) -> None:
    """SIGUSR1 in the second step: it is finished and saved, and the next start takes the others."""
    done = run_job(
        write, environment, tmp_path, "trainer.steps=3", "trainer.step_s=0.5", hurry=lambda out: "step 2 begins" in out
    )
    assert (done.exit_code, done.num_starts) == (0, 2), done.output
    assert re.findall(r"^step (\d) of toy-\d+ is done", done.output, re.MULTILINE) == ["1", "2", "3"]
    assert "queueing the job again" in done.output


def test_a_signal_in_the_last_step_is_no_reason_to_start_again(
    write: Write, environment: dict[str, str], tmp_path: Path
) -> None:
    arguments = ("trainer.steps=2", "trainer.step_s=0.5")
    done = run_job(write, environment, tmp_path, *arguments, hurry=lambda out: "step 2 begins" in out)
    assert (done.exit_code, done.num_starts) == (0, 1), done.output


def test_a_failed_a_cancelled_and_an_endless_job_are_not_queued_again(
    write: Write, environment: dict[str, str], tmp_path: Path
) -> None:
    failed = run_job(write, environment, tmp_path, "trainer.fail_at=2")
    assert (failed.exit_code, failed.num_starts) == (1, 1), failed.output
    slow = ("trainer.steps=100", "trainer.step_s=0.5")
    cancelled = run_job(write, environment, tmp_path, *slow, cancel=lambda out: "step 1 begins" in out)
    assert (cancelled.exit_code, cancelled.num_starts) == (143, 1), cancelled.output
    assert "step 1 of" in cancelled.output, "the step is finished"
    last = run_job(write, environment, tmp_path, *slow, "max_requeues=0", hurry=lambda out: "step 1 begins" in out)
    assert (last.exit_code, last.num_starts) == (138, 1), last.output
    assert "has been queued again 0 times" in last.output


def test_two_jobs_at_once_keep_to_their_own_runs(write: Write, environment: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "outputs").mkdir()
    write("toy", "time=00:20:00", "trainer.steps=4", "trainer.step_s=0.3")
    slurm, found = Slurm(tmp_path), []

    def submit() -> None:
        found.append(slurm.run(tmp_path / "job.sbatch", env=environment, hurry=lambda out: "step 2 begins" in out))

    threads = [threading.Thread(target=submit) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    names = set()
    for done in found:
        assert (done.exit_code, done.num_starts, done.survivors) == (0, 2, []), done.output
        steps = re.findall(r"^step (\d) of (\S+) is done", done.output, re.MULTILINE)
        assert [step for step, _ in steps] == ["1", "2", "3", "4"]
        names |= {name for _, name in steps}
    assert len(names) == 2


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.skipif(not is_available(), reason="needs root and network namespaces")
def test_two_jobs_share_two_nodes_with_a_ray_cluster_each(
    write: Write, environment: dict[str, str], tmp_path: Path
) -> None:
    pytest.importorskip("ray")
    (tmp_path / "outputs").mkdir()
    write("toy", "nodes=2", "cpus_per_node=1", "time=10:00:00", "object_store_gib=0.1", "trainer.steps=2")
    text = (tmp_path / "job.sbatch").read_text()
    with network_hosts(2) as hosts:
        slurm, found = Slurm(tmp_path, hosts=hosts), []
        threads = [
            threading.Thread(target=lambda: found.append(slurm.run(tmp_path / "job.sbatch", env=environment)))
            for _ in range(2)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for done in found:
            assert (done.exit_code, done.survivors) == (0, []), done.output + text
            assert f"tasks ran on {hosts[0].address} {hosts[1].address}" in done.output
    assert not [path for done in found for path in Path("/tmp").glob(f"plinth_{done.job_id}_*")]


def test_a_node_that_does_not_start_ends_the_job_with_the_reason(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    address = address_towards("127.0.0.1")
    assert address.startswith("127.0.0.1:")
    assert wait_for_nodes(address, 2, 0.1, [os.getpid()]) == "0 of 2 nodes have joined within 0 s: none"
    assert wait_for_nodes(address, 2, 60, [os.getpid(), dead.pid]) == (
        f"a process that starts nodes has ended (pid {dead.pid})"
    )


@given(st.integers(0, 20), st.integers(0, 23), st.integers(0, 59), st.integers(0, 59))
def test_time_limits(days: int, hours: int, minutes: int, seconds: int) -> None:
    total = ((days * 24 + hours) * 60 + minutes) * 60 + seconds
    assert time_limit_s(f"{days}-{hours:02d}:{minutes:02d}:{seconds:02d}") == total
    assert time_limit_s(f"{days * 24 + hours}:{minutes:02d}:{seconds:02d}") == total
    assert time_limit_s(f"{days}-{hours}") == (days * 24 + hours) * 3600
    assert time_limit_s(f"{minutes}:{seconds:02d}") == minutes * 60 + seconds
    assert time_limit_s(f"{minutes}") == minutes * 60


def test_help_is_for_the_job() -> None:
    assert split_arguments(["bench", "six_case", "steps=2", "nodes=1"], ["nodes"]) == (
        ["bench", "six_case", "steps=2"],
        ["nodes=1"],
    )
    assert split_arguments(["toy", "--help"], ["nodes"]) == (["toy"], ["--help"])
    assert SlurmConfig(gpus_per_node=2).cores == 20
