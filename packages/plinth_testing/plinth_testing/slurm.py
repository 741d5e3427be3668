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
    """What all starts printed."""
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
        for restarts in itertools.count():
            (job / "requeue").unlink(missing_ok=True)
            started = {**variables, **({"SLURM_RESTART_COUNT": str(restarts)} if restarts else {})}
            with (job / "output").open("ab") as output:
                process = subprocess.Popen(
                    [*nodes[0][1], "bash", *command[first:]],
                    env=started,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    preexec_fn=die_with_parent,
                )
            while process.poll() is None:
                printed = (job / "output").read_text(errors="replace")
                for name in [name for name, is_due in signals.items() if is_due(printed)]:
                    process.send_signal(signal.Signals[f"SIG{name}"])  # to the batch file alone
                    del signals[name]
                time.sleep(0.02)
            survivors += _kill_rest(job_id)
            if not (job / "requeue").exists():
                break
        code = process.returncode
        printed = (job / "output").read_text(errors="replace")
        return FinishedJob(
            job_id=job_id,
            exit_code=128 - code if code < 0 else code,
            output=printed,
            num_starts=restarts + 1,
            survivors=survivors,
        )


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
    mark = f"SLURM_JOB_ID={job_id}\0".encode()
    deadline = time.monotonic() + 2.0  # Python's resource tracker, for example, ends a moment after its parent
    rest = {}
    while time.monotonic() < deadline:
        rest = {}
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if mark in (folder / "environ").read_bytes():
                    rest[int(folder.name)] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()[:200]
        if not rest:
            break
        time.sleep(0.05)
    for pid in rest:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    return list(rest.values())


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
    signal.signal(signal.SIGTERM, lambda number, _: [task.send_signal(number) for task in tasks] and None)
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
