"""The stand-in runs a batch file as SLURM would, and refuses what it does not know."""

import threading
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plinth_testing import Slurm
from plinth_testing.slurm import compress, expand, read_options

HEAD = """#!/bin/bash
#SBATCH --nodes=1
#SBATCH --time=00:10:00
#SBATCH --signal=B:USR1@300
"""


def job(folder: Path, body: str, head: str = HEAD) -> Path:
    file = folder / "job.sbatch"
    file.write_text(head + body)
    return file


def test_the_variables_the_programs_and_the_exit_code(tmp_path: Path) -> None:
    body = """
    echo "$SLURM_JOB_ID $SLURM_NNODES ${SLURM_RESTART_COUNT-none} $SLURM_CPUS_ON_NODE $GIVEN"
    scontrol show hostnames "$SLURM_JOB_NODELIST"
    srun --nodes=1 --ntasks=1 --ntasks-per-node=1 --cpus-per-task=1 bash -c 'echo "task $SLURM_PROCID"'
    srun --nodes=2 --ntasks=2 --ntasks-per-node=1 --cpus-per-task=1 true || exit 3
    """
    done = Slurm(tmp_path, cpus_on_node=7).run(job(tmp_path, body), env={"GIVEN": "here"})
    first, host, task, refused = done.output.splitlines()
    assert first.split()[1:] == ["1", "none", "7", "here"]
    assert (host, task) == ("localhost", "task 0")
    assert "not available" in refused
    assert (done.exit_code, done.num_starts, done.survivors, done.timed_out) == (3, 1, [], False)


def test_the_signal_comes_before_the_limit_and_a_requeued_job_starts_again(tmp_path: Path) -> None:
    body = """
    [[ ${SLURM_RESTART_COUNT:-0} == 2 ]] && { echo done; exit 0; }
    trap 'echo asked; scontrol requeue "$SLURM_JOB_ID"; exit 5' USR1
    echo "start ${SLURM_RESTART_COUNT:-0}"
    while :; do sleep 0.05; done
    """
    begin = time.monotonic()
    done = Slurm(tmp_path, time_scale=0.002).run(job(tmp_path, body))
    assert done.output.split("\n")[:-1] == ["start 0", "asked", "start 1", "asked", "done"]
    assert (done.exit_code, done.num_starts, done.timed_out) == (0, 3, False)
    assert time.monotonic() - begin > 2 * 300 * 0.002


def test_a_job_at_its_limit_is_killed_with_what_it_left(tmp_path: Path) -> None:
    body = "trap 'echo asked' USR1 TERM\nsetsid sleep 1000 &\nwhile :; do sleep 0.02; done\n"
    done = Slurm(tmp_path, time_scale=0.005).run(job(tmp_path, body))
    assert (done.exit_code, done.timed_out) == (137, True)
    assert done.output == "asked\nasked\n"
    assert any("sleep 1000" in process for process in done.survivors)


def test_cancel_and_hurry_come_when_the_test_says(tmp_path: Path) -> None:
    body = "trap 'echo usr1' USR1; trap 'echo term; exit 9' TERM; echo ready; while :; do sleep 0.05; done\n"
    done = Slurm(tmp_path).run(job(tmp_path, body), hurry=lambda out: "ready" in out, cancel=lambda out: "usr1" in out)
    assert (done.output, done.exit_code) == ("ready\nusr1\nterm\n", 9)


def test_two_jobs_at_once_have_two_numbers(tmp_path: Path) -> None:
    slurm, found = Slurm(tmp_path), []
    file = job(tmp_path, 'echo "$SLURM_JOB_ID"; sleep 0.3\n')
    threads = [threading.Thread(target=lambda: found.append(slurm.run(file).output)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(found)) == 2


@pytest.mark.parametrize("line", ["#SBATCH --gpu=4", "#SBATCH -N 2", "#SBATCH --nodes"])
def test_an_unknown_option_is_refused(line: str) -> None:
    with pytest.raises(ValueError, match="unrecognized option"):
        read_options(f"{HEAD}{line}\necho\n")


def test_lines_after_the_first_command_are_ignored() -> None:
    options = read_options(f"{HEAD}# a comment\n\necho\n#SBATCH --nodes=5\n")
    assert (options["nodes"], options["signal"]) == ("1", "B:USR1@300")


@given(st.lists(st.integers(1, 254), min_size=1, max_size=5, unique=True))
def test_node_lists_are_written_out(numbers: list[int]) -> None:
    names = [f"10.231.7.{number}" for number in numbers]
    assert expand(compress(names)) == names
