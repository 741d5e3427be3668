"""Runs batch files as SLURM does, on one machine: a stand-in for `sbatch`, `srun` and `scontrol`.

Nodes are network namespaces (`network_hosts`), or the machine itself. Options that the stand-in does not know are
refused, so that a test fails rather than assume their meaning.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from .network_hosts import NetworkHost
from .processes import die_with_parent

_OPTIONS = {"job-name", "output", "open-mode", "nodes", "ntasks-per-node", "cpus-per-task", "mem", "time", "signal"}
_OPTIONS |= {"requeue", "no-requeue"}
_SCONTROL = """#!/bin/sh
if [ "$1" = show ]; then echo "$3" | tr , "\n"; else touch "$SLURM_FOLDER/requeue"; fi
"""
_JOB_IDS = itertools.count(1000 * os.getpid())  # test runs side by side share /tmp


@dataclass(frozen=True, kw_only=True)
class FinishedJob:
    """A job that has left the queue."""

    job_id: int
    exit_code: int
    """Exit code of the last start; 128 + the signal's number if the file was killed."""
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
            signals: `USR1` (as before the time limit) or `TERM` (as from scancel) -> true if the job that has printed
                this text gets the signal now.
        """
        first = next(index for index, word in enumerate(command) if index and not word.startswith("-"))
        in_file = re.findall(r"^#SBATCH (.*)$", Path(command[first]).read_text(), re.MULTILINE)
        options = dict(word.removeprefix("--").partition("=")[::2] for word in (*in_file, *command[1:first]))
        assert options.keys() <= _OPTIONS, f"sbatch: unrecognized option: {options}"
        job_id = next(_JOB_IDS)
        job = self.folder / f"job_{job_id}"
        (job / "bin").mkdir(parents=True)
        nodes = [(host.address, host.command()) for host in self.hosts] or [("localhost", [])]
        nodes = nodes[: int(options.get("nodes", "1"))]
        for program, script in (("srun", _srun([prefix for _, prefix in nodes[1:]])), ("scontrol", _SCONTROL)):
            (job / "bin" / program).write_text(script)
            (job / "bin" / program).chmod(0o755)
        variables = {**os.environ, **(env or {}), "SLURM_JOB_ID": str(job_id), "SLURM_FOLDER": str(job)}
        variables |= {"PATH": f"{job / 'bin'}:{os.environ['PATH']}", "SLURM_JOB_NUM_NODES": str(len(nodes))}
        variables |= {"SLURM_JOB_NODELIST": ",".join(name for name, _ in nodes)}
        variables |= {"SLURM_CPUS_PER_TASK": options["cpus-per-task"]}
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


def _srun(nodes: Sequence[Sequence[str]]) -> str:
    """A program that runs one task on each node, which SIGTERM ends; `nodes` are prefixes of their commands."""
    lines = ["#!/bin/bash", """trap 'ended=1; kill "${pids[@]}"' TERM""", "while [[ $1 == --* ]]; do shift; done"]
    # Tasks are children of another host's daemon, not of srun.
    lines += [f'SLURM_PROCID={task} setsid {shlex.join(prefix)} "$@" & pids+=($!)' for task, prefix in enumerate(nodes)]
    # The signal may come while they are started: then those that were not there yet are ended here.
    return "\n".join([*lines, '[[ -z $ended ]] || kill "${pids[@]}"', "wait", "wait", ""])


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
