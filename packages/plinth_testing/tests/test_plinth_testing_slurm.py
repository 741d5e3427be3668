"""The stand-in runs a batch file as SLURM would, and refuses what it does not know."""

from pathlib import Path

import pytest

from plinth_testing import Slurm
from plinth_testing.slurm import read_options

HEAD = "#!/bin/bash\n#SBATCH --nodes=1\n#SBATCH --cpus-per-task=3\n"


def job(folder: Path, body: str) -> list[str]:
    file = folder / "job.sh"
    file.write_text(HEAD + body)
    return ["sbatch", "--mem=0", str(file), "an argument"]


def test_the_variables_the_programs_and_the_exit_code(tmp_path: Path) -> None:
    body = """
    echo "$SLURM_JOB_ID $SLURM_JOB_NUM_NODES ${SLURM_RESTART_COUNT-none} $SLURM_CPUS_PER_TASK $GIVEN $1"
    scontrol show hostnames "$SLURM_JOB_NODELIST"
    srun --nodes=1 --ntasks=1 bash -c 'echo "task $SLURM_PROCID"'
    exit 3
    """
    done = Slurm(tmp_path).run(job(tmp_path, body), env={"GIVEN": "here"})
    assert done.output == f"{done.job_id} 1 none 3 here an argument\nlocalhost\ntask 0\n"
    assert (done.exit_code, done.num_starts, done.survivors) == (3, 1, [])


def test_a_requeued_job_starts_again_and_each_signal_comes_once(tmp_path: Path) -> None:
    body = """
    ((${SLURM_RESTART_COUNT:-0} == 1)) && { echo done; exit 9; }
    trap 'echo usr1' USR1
    trap 'echo term; scontrol requeue "$SLURM_JOB_ID"; exit 5' TERM
    echo ready
    while :; do sleep 0.05; done
    """
    signals = {"USR1": lambda out: "ready" in out, "TERM": lambda out: "usr1" in out}
    done = Slurm(tmp_path).run(job(tmp_path, body), **signals)
    assert (done.output, done.exit_code, done.num_starts) == ("ready\nusr1\nterm\ndone\n", 9, 2)


def test_processes_that_the_file_leaves_are_killed_and_named(tmp_path: Path) -> None:
    done = Slurm(tmp_path).run(job(tmp_path, "setsid sleep 1000 &\n"))
    assert any("sleep 1000" in process for process in done.survivors)


def test_unknown_options_are_refused_and_lines_after_the_first_command_are_ignored() -> None:
    options = read_options(["--nodes=2"], f"{HEAD}# a comment\n\necho\n#SBATCH --nodes=5\n")
    assert options == {"nodes": "2", "cpus-per-task": "3"}
    for word in ("--gpu=4", "-N2"):
        with pytest.raises(ValueError, match="unrecognized option"):
            read_options([word], HEAD)
