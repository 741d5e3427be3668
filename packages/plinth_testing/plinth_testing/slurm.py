"""Runs batch files as SLURM does, on one machine: a stand-in for `sbatch`, `srun` and `scontrol`.

Nodes are network namespaces (`network_hosts`), or the machine itself. Options that the stand-in does not know are
refused, so that a test fails rather than assume their meaning.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from .network_hosts import NetworkHost
from .processes import die_with_parent

_OPTIONS = {"job-name", "output", "open-mode", "nodes", "ntasks-per-node", "cpus-per-task", "mem", "time", "signal"}
_OPTIONS |= {"requeue", "no-requeue"}
_JOB_IDS = itertools.count(1000 * os.getpid())  # test runs side by side share /tmp


@dataclass(frozen=True, kw_only=True)
class FinishedJob:
    """A job that has left the queue."""

    job_id: int
    exit_code: int
    """Of its last start; 128 + the signal's number if the file was killed."""
    output: str
    """Output of all starts."""
    num_starts: int
    survivors: Sequence[str]
    """Command lines of processes that the file had left when it ended, before they were killed."""


@dataclass
class Slurm:
    """A cluster: `hosts` are its nodes (empty: this machine is the only one), `folder` holds the jobs' files."""

    folder: Path
    hosts: Sequence[NetworkHost] = ()

    def run(
        self, command: Sequence[str], *, env: Mapping[str, str] | None = None, **signals: Callable[[str], bool]
    ) -> FinishedJob:
        """Runs `sbatch [--OPTION=VALUE ...] FILE [argument ...]` and waits until its job has ended.

        Args:
            env: variables of the job in place of this process's.
            signals: name of a signal (`USR1`, as before the time limit; `TERM`, as from scancel) -> told what the job
                has printed, says whether the signal is sent now, once.
        """
        first = next(index for index, word in enumerate(command) if index and not word.startswith("-"))
        options = read_options(command[1:first], Path(command[first]).read_text())
        job_id = next(_JOB_IDS)
        job = self.folder / f"job_{job_id}"
        (job / "bin").mkdir(parents=True)
        for program in ("srun", "scontrol"):
            path = job / "bin" / program
            path.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m plinth_testing.slurm {program} "$@"\n')
            path.chmod(0o755)
        nodes = [(host.address, host.command()) for host in self.hosts] or [("localhost", [])]
        nodes = nodes[: int(options.get("nodes", "1"))]
        variables = {**os.environ, **(env or {}), "SLURM_JOB_ID": str(job_id), "SLURM_FOLDER": str(job)}
        variables |= {"PATH": f"{job / 'bin'}:{os.environ['PATH']}", "SLURM_NODES": json.dumps(nodes)}
        variables |= {"SLURM_JOB_NUM_NODES": str(len(nodes)), "SLURM_CPUS_PER_TASK": options["cpus-per-task"]}
        variables["SLURM_JOB_NODELIST"] = ",".join(name for name, _ in nodes)
        survivors: list[str] = []
        for num_starts in itertools.count(1):
            (job / "requeue").unlink(missing_ok=True)
            code = _run_file([*nodes[0][1], "bash", *command[first:]], variables, job / "output", signals)
            survivors += _kill_rest(job_id)
            if not (job / "requeue").exists():
                break
            variables["SLURM_RESTART_COUNT"] = str(num_starts)
        output = (job / "output").read_text(errors="replace")
        return FinishedJob(job_id=job_id, exit_code=code, output=output, num_starts=num_starts, survivors=survivors)


def _run_file(
    command: Sequence[str], env: Mapping[str, str], output: Path, signals: dict[str, Callable[[str], bool]]
) -> int:
    """Runs a batch file once, with the signals that are due; its exit code."""
    with output.open("ab") as out:
        process = subprocess.Popen(
            command,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
            preexec_fn=die_with_parent,
        )
    while process.poll() is None:
        printed = output.read_text(errors="replace")
        for name in [name for name, is_due in signals.items() if is_due(printed)]:
            process.send_signal(signal.Signals[f"SIG{name}"])  # to the batch file alone
            del signals[name]
        time.sleep(0.02)
    return 128 - process.returncode if process.returncode < 0 else process.returncode


def read_options(words: Sequence[str], text: str) -> dict[str, str]:
    """Options of the `#SBATCH` lines before the first command, and of the command line, which wins."""
    head = re.split(r"^(?!#|\s*$)", text, maxsplit=1, flags=re.MULTILINE)[0]
    lines = re.findall(r"^#SBATCH (.*)$", head, re.MULTILINE)
    options = {}
    for word in (*lines, *words):
        name, _, value = word.removeprefix("--").partition("=")
        if not word.startswith("--") or name not in _OPTIONS:
            raise ValueError(f"sbatch: unrecognized option {word!r}")
        options[name] = value
    return options


def _kill_rest(job_id: int) -> list[str]:
    """Kills the processes of a job that its file has left, as SLURM does; their command lines."""
    mark = ("SLURM_JOB_ID", str(job_id))
    processes = [one for one in psutil.process_iter(["environ"]) if mark in (one.info["environ"] or {}).items()]
    _, rest = psutil.wait_procs(processes, timeout=2)  # Python's resource tracker ends a moment after its parent
    lines = []
    for process in rest:
        with contextlib.suppress(psutil.NoSuchProcess):
            lines.append(" ".join(process.cmdline()))
            process.kill()
    return lines


def srun(arguments: Sequence[str]) -> int:
    """One task on each node that is not excluded; SIGTERM goes to all tasks."""
    options = dict(word.removeprefix("--").split("=", 1) for word in arguments if word.startswith("--"))
    command = arguments[len(options) :]
    nodes = [node for node in json.loads(os.environ["SLURM_NODES"]) if node[0] != options.get("exclude")]
    assert options["nodes"] == options["ntasks"] == str(len(nodes)), options
    tasks = [
        # Tasks are children of another host's daemon, not of srun.
        subprocess.Popen([*prefix, *command], env={**os.environ, "SLURM_PROCID": str(task)}, start_new_session=True)
        for task, (_, prefix) in enumerate(nodes)
    ]

    def pass_on(number: int, _: object) -> None:
        for task in tasks:
            task.send_signal(number)

    signal.signal(signal.SIGTERM, pass_on)
    return max(abs(task.wait()) for task in tasks)


def scontrol(arguments: Sequence[str]) -> int:
    """`scontrol show hostnames LIST` and `scontrol requeue JOB`."""
    if list(arguments[:2]) == ["show", "hostnames"]:
        print(*arguments[2].split(","), sep="\n")
    else:
        assert list(arguments) == ["requeue", os.environ["SLURM_JOB_ID"]], arguments
        (Path(os.environ["SLURM_FOLDER"]) / "requeue").touch()
    return 0


if __name__ == "__main__":
    sys.exit({"srun": srun, "scontrol": scontrol}[sys.argv[1]](sys.argv[2:]))
