"""Runs batch files as SLURM does, on one machine: a stand-in for `sbatch`, `srun` and `scontrol`.

It reads the `#SBATCH` lines, sets the `SLURM_*` variables, runs the file on the first node and the tasks of `srun` once
on each node, sends the signal before the time limit and runs a job again that was queued again. Options that it does
not know are refused, so that a test fails rather than assume their meaning. Nodes are network namespaces
(`network_hosts`), or the machine itself.
"""

from __future__ import annotations

import argparse
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
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from .network_hosts import NetworkHost
from .processes import die_with_parent

_MARK = "PLINTH_SLURM_JOB"
_KILL_WAIT_S = 30.0  # KillWait, from SIGTERM to SIGKILL at the time limit; times `time_scale`
_GRACE_S = 2.0
_BATCH_OPTIONS = {
    *("job-name", "chdir", "output", "open-mode", "nodes", "ntasks-per-node", "cpus-per-task", "mem", "gpus-per-node"),
    *("time", "signal", "partition", "account", "constraint", "mail-type"),
}

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
    timed_out: bool
    """Whether a start reached the time limit."""


@dataclass
class Slurm:
    """A cluster.

    Args:
        folder: for the programs and the jobs' files.
        hosts: the nodes; empty: this machine is the only node.
        cpus_on_node: cores of each node.
        time_scale: seconds of this machine for each second of a time limit.
    """

    folder: Path
    hosts: Sequence[NetworkHost] = ()
    cpus_on_node: int = 2
    time_scale: float = 1.0

    def run(
        self,
        file: Path,
        *,
        env: Mapping[str, str] | None = None,
        cancel: Callable[[str], bool] = lambda _: False,
        hurry: Callable[[str], bool] = lambda _: False,
    ) -> FinishedJob:
        """Submits a batch file and waits until its job has ended; threads may run several jobs at once.

        Args:
            env: further variables of the job (`sbatch --export=ALL`).
            cancel: told what the job has printed, says whether it is cancelled now, as by
                `scancel --batch --signal=TERM`.
            hurry: told what the job has printed, says whether the signal before the time limit comes now, once.
        """
        text = file.read_text()
        options = read_options(text)
        job_id = next(_JOB_IDS)
        job = self.folder / f"job_{job_id}"
        (job / "bin").mkdir(parents=True)
        for program in ("srun", "scontrol"):
            path = job / "bin" / program
            path.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m plinth_testing.slurm {program} "$@"\n')
            path.chmod(0o755)
        (job / "script").write_text(text)  # SLURM runs a copy, too
        nodes = self._nodes(int(options["nodes"]))
        variables = {**os.environ, **(env or {}), **self._variables(job, job_id, options, nodes)}
        asked = _Asked(cancel=cancel, hurry=hurry)
        survivors: list[str] = []
        codes: list[int] = []
        timed_out = False
        while not codes or (job / "requeue").exists():
            (job / "requeue").unlink(missing_ok=True)
            if codes:
                variables["SLURM_RESTART_COUNT"] = str(len(codes))
            code, late = self._start(job, options, nodes[0], variables, asked)
            codes.append(code)
            timed_out = timed_out or late
            survivors += kill_marked(variables[_MARK])
        return FinishedJob(
            job_id=job_id,
            exit_code=codes[-1],
            output=(job / "output").read_text(errors="replace"),
            num_starts=len(codes),
            survivors=survivors,
            timed_out=timed_out,
        )

    def _nodes(self, number: int) -> list[tuple[str, list[str]]]:
        """Name and command prefix of each node."""
        found = [(host.address, host.command()) for host in self.hosts] or [("localhost", [])]
        assert number <= len(found), f"the job wants {number} nodes, the cluster has {len(found)}"
        return found[:number]

    def _variables(
        self, job: Path, job_id: int, options: Mapping[str, str], nodes: Sequence[tuple[str, list[str]]]
    ) -> dict[str, str]:
        num_gpus = int(options.get("gpus-per-node", "0"))
        return {
            "PATH": f"{job / 'bin'}:{os.environ['PATH']}",
            _MARK: f"{job_id}-{uuid.uuid4().hex}",
            "PLINTH_SLURM_NODES": json.dumps(nodes),
            "PLINTH_SLURM_FOLDER": str(job),
            "SLURM_JOB_ID": str(job_id),
            "SLURM_JOB_NAME": options.get("job-name", job.name),
            "SLURM_JOB_NODELIST": compress([name for name, _ in nodes]),
            "SLURM_NNODES": str(len(nodes)),
            "SLURM_JOB_NUM_NODES": str(len(nodes)),
            "SLURM_CPUS_ON_NODE": str(self.cpus_on_node),
            "SLURM_CPUS_PER_TASK": options.get("cpus-per-task", "1"),
            "SLURM_SUBMIT_DIR": os.getcwd(),
            "SLURM_NODEID": "0",
            "SLURM_PROCID": "0",
            "SLURM_LOCALID": "0",
            "SLURMD_NODENAME": nodes[0][0],
            **({"CUDA_VISIBLE_DEVICES": ",".join(map(str, range(num_gpus)))} if num_gpus else {}),
        }

    def _start(
        self, job: Path, options: Mapping[str, str], node: tuple[str, list[str]], env: Mapping[str, str], asked: _Asked
    ) -> tuple[int, bool]:
        """Runs the file once; its exit code and whether the time limit ended it."""
        number, early_s = _signal_option(options.get("signal", ""))
        limit_s = _seconds(options["time"])
        begin = time.monotonic()
        with (job / "output").open("ab") as output:
            process = subprocess.Popen(
                [*node[1], "bash", str(job / "script")],
                env=env,
                cwd=options.get("chdir"),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=die_with_parent,
            )
        events = [(limit_s, signal.SIGTERM), (limit_s + _KILL_WAIT_S, signal.SIGKILL)]
        if number is not None:
            events.insert(0, (limit_s - early_s, number))
        late = False
        while process.poll() is None:
            printed = (job / "output").read_text(errors="replace")
            if asked.now("cancel", printed):
                process.send_signal(signal.SIGTERM)
            if asked.now("hurry", printed):
                process.send_signal(number or signal.SIGTERM)
            if time.monotonic() - begin > events[0][0] * self.time_scale:
                at_s, sent = events.pop(0)
                late = late or at_s >= limit_s
                process.send_signal(sent)  # B: to the batch file alone
            time.sleep(0.02)
        code = process.returncode
        return (128 - code if code < 0 else code), late


class _Asked:
    """What a test asks for while a job runs, each once."""

    def __init__(self, **conditions: Callable[[str], bool]) -> None:
        self._open = conditions

    def now(self, name: str, printed: str) -> bool:
        if name not in self._open or not self._open[name](printed):
            return False
        del self._open[name]
        return True


def read_options(text: str) -> dict[str, str]:
    """The `#SBATCH` lines as long options; those after the first command are ignored, as sbatch ignores them."""
    head = re.split(r"^(?!#|\s*$)", text, maxsplit=1, flags=re.MULTILINE)[0]
    options: dict[str, str] = {}
    for line in re.findall(r"^#SBATCH (.*)$", head, re.MULTILINE):
        for word in shlex.split(line):
            name, _, value = word.removeprefix("--").partition("=")
            if name in ("requeue", "no-requeue"):
                options["requeue"] = str(name == "requeue")
            elif word.startswith("--") and name in _BATCH_OPTIONS and value:
                options[name] = value
            else:
                raise ValueError(f"sbatch: unrecognized option {word!r}")
    return options


def _signal_option(text: str) -> tuple[signal.Signals | None, float]:
    """`B:USR1@600` as a signal and seconds before the time limit."""
    if not text:
        return None, 0.0
    match = re.fullmatch(r"B:(\w+)@(\d+)", text)
    assert match is not None, f"--signal={text} is not sent to the batch file alone"
    return signal.Signals[f"SIG{match[1]}"], float(match[2])


def _seconds(text: str) -> float:
    days, _, rest = text.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    assert len(parts) == 3, f"--time={text}: this stand-in reads [D-]HH:MM:SS"
    return ((int(days or 0) * 24 + parts[0]) * 60 + parts[1]) * 60 + parts[2]


def compress(names: Sequence[str]) -> str:
    """Node names as SLURM writes them, such as `10.1.2.[2-3]`; `scontrol show hostnames` writes them out."""
    stem, *others = {name.rstrip("0123456789") for name in names}
    if len(names) == 1 or others:
        return ",".join(names)
    return f"{stem}[{','.join(name.removeprefix(stem) for name in names)}]"


def expand(names: str) -> list[str]:
    """The node names in a list as `compress` writes it."""
    match = re.fullmatch(r"([^\[]*)\[([\d,]+)\]", names)
    return names.split(",") if match is None else [match[1] + number for number in match[2].split(",")]


def kill_marked(mark: str) -> list[str]:
    """Kills the processes of a job that its file has left, as SLURM does; their command lines.

    Helpers such as Python's resource tracker end by themselves a moment after their parent, and are not counted.
    """
    deadline = time.monotonic() + _GRACE_S
    while (found := list(_marked(mark))) and time.monotonic() < deadline:
        time.sleep(0.05)
    left = []
    for folder in found:
        with contextlib.suppress(OSError):
            left.append((folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:200])
            os.kill(int(folder.name), signal.SIGKILL)
    return left


def _marked(mark: str) -> Iterator[Path]:
    """The folders in /proc of the processes that a job started."""
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"{_MARK}={mark}".encode() in (folder / "environ").read_bytes():
                yield folder


def srun(arguments: Sequence[str]) -> int:
    """One task on each of the first `--nodes` nodes that are not excluded; SIGTERM goes to all tasks."""
    parser = argparse.ArgumentParser(prog="srun", allow_abbrev=False)
    for option in ("--nodes", "--ntasks", "--ntasks-per-node", "--cpus-per-task"):
        parser.add_argument(option, type=int, required=True)
    parser.add_argument("--exclude", default="")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args(arguments)
    excluded = options.exclude.split(",")
    nodes = [node for node in json.loads(os.environ["PLINTH_SLURM_NODES"]) if node[0] not in excluded]
    if len(nodes) < options.nodes or options.ntasks != options.nodes or options.ntasks_per_node != 1:
        print("srun: error: Requested node configuration is not available", file=sys.stderr)
        return 1
    tasks = []
    for number, (name, prefix) in enumerate(nodes[: options.nodes]):
        ids = {"SLURM_PROCID": str(number), "SLURM_NODEID": str(number), "SLURM_LOCALID": "0", "SLURMD_NODENAME": name}
        # Tasks are children of another host's daemon, not of srun.
        tasks.append(subprocess.Popen([*prefix, *options.command], env={**os.environ, **ids}, start_new_session=True))

    def pass_on(number: int, _: object) -> None:
        for task in tasks:
            task.send_signal(number)

    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, pass_on)
    return max(abs(task.wait()) for task in tasks)


def scontrol(arguments: Sequence[str]) -> int:
    """`scontrol show hostnames LIST` and `scontrol requeue JOB`."""
    match list(arguments):
        case ["show", "hostnames", names]:
            print(*expand(names), sep="\n")
            return 0
        case ["requeue", job] if job == os.environ["SLURM_JOB_ID"]:
            (Path(os.environ["PLINTH_SLURM_FOLDER"]) / "requeue").touch()
            return 0
    print(f"scontrol: error: {shlex.join(arguments)}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    program = {"srun": srun, "scontrol": scontrol}[sys.argv[1]]
    sys.exit(program(sys.argv[2:]))
