"""Runs of the apps for benchmarks: starts them on GPUs, ends them at a time limit, reads logs, metrics and memory."""

import argparse
import contextlib
import json
import math
import os
import re
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil

from benchmarks.random_model import CONFIGS
from run_kit import MetricsTable

TIMED_OUT, INTERRUPTED = 124, 130
_POLL_S = 0.5
interrupted = threading.Event()
"""Set by Ctrl-C, and by SIGTERM in a script."""


def free_port() -> int:
    """A port of the loopback that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def json_line(command: Sequence[str]) -> str:
    """The last line of JSON that a process prints; one with its exit code if there is none."""
    ran = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    lines = [line for line in ran.stdout.splitlines() if line.startswith("{")]
    return lines[-1] if lines else json.dumps({"command": command[1:], "failed_with_exit_code": ran.returncode})


def visible_gpus(number: int, *, first: int = 0) -> str:
    """Ids, comma-separated, of `number` GPUs beginning with the `first` of those that CUDA_VISIBLE_DEVICES leaves."""
    ids = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(first + number)))).split(",")
    return ",".join(ids[first : first + number])


class PeakMemory:
    """The largest memory in use on each of the given GPUs, in GiB, while it is entered; none without nvidia-smi.

    nvidia-smi asks NVML for it, so all processes on the GPU count.
    """

    def __init__(self, gpus: str) -> None:
        self.gib: list[float] = []
        self._query = ["nvidia-smi", f"--id={gpus}", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._poll, daemon=True)

    def __enter__(self) -> "PeakMemory":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _poll(self) -> None:
        while True:
            try:
                measured = subprocess.run(self._query, capture_output=True, text=True, check=True, timeout=20).stdout
            except (OSError, subprocess.SubprocessError):
                return
            now = [float(line) / 1024 for line in measured.split()]
            self.gib = [max(pair) for pair in zip(now, self.gib or now, strict=True)]
            if self._done.wait(_POLL_S):
                return


def stop(process: "subprocess.Popen[Any]", steps: Sequence[tuple[signal.Signals, float]]) -> None:
    """Sends a process the signals in turn, waiting so many seconds after each; then kills what is left below it."""
    if process.poll() is not None:
        return
    with contextlib.suppress(psutil.NoSuchProcess):
        below = psutil.Process(process.pid).children(recursive=True)
        for number, patience_s in steps:
            process.send_signal(number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(patience_s)
                break
        process.kill()
        for each in below:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        process.wait()


@dataclass
class Run:
    """A process whose output goes to a file. After an interrupt it ends, and runs that would start do not."""

    name: str
    command: Sequence[str]
    log: Path
    gpus: str
    """CUDA_VISIBLE_DEVICES."""
    signals: Sequence[tuple[signal.Signals, float]] = ((signal.SIGTERM, 1.0), (signal.SIGTERM, 12.0))
    """Signals that end it, with seconds to wait: a training run finishes its step after one SIGTERM, not after two."""
    errors: Path | None = None
    """File for stderr; None: to the log, too."""
    peaks_gib: list[float] = field(default_factory=list, init=False)
    """The largest memory in use on each of its GPUs."""
    process: "subprocess.Popen[bytes] | None" = field(default=None, init=False)
    started: float = field(default=math.nan, init=False)
    """Time of the start, in seconds of Unix time."""

    def start(self) -> None:
        """Starts it on its GPUs."""
        with self.log.open("w") as output, self.errors.open("w") if self.errors else contextlib.nullcontext() as errors:
            if interrupted.is_set():
                return
            self._memory = PeakMemory(self.gpus).__enter__()
            self.started = time.time()
            self.process = subprocess.Popen(
                self.command,
                env=os.environ | {"CUDA_VISIBLE_DEVICES": self.gpus},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=errors or subprocess.STDOUT,
                start_new_session=True,
            )

    def end(self, timeout_s: float) -> int:
        """Waits for it; its exit code, 124 if `timeout_s` ended it, and 130 if an interrupt did (Ctrl-C)."""
        if self.process is None:
            return INTERRUPTED
        limit = time.monotonic() + timeout_s
        try:
            while not interrupted.is_set() and (left := limit - time.monotonic()) > 0:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    return self.process.wait(min(left, 0.5))
        except KeyboardInterrupt:  # what was measured until now is still reported
            interrupted.set()
        finally:
            stop(self.process, self.signals)
            self._memory.__exit__()
            self.peaks_gib = self._memory.gib
        return INTERRUPTED if interrupted.is_set() else TIMED_OUT

    @property
    def peak(self) -> str:
        """The largest memory in use on its GPUs in GiB; a range if they differ by a GiB and more."""
        low, high = min(self.peaks_gib, default=0.0), max(self.peaks_gib, default=0.0)
        return f"{low:.1f} to {high:.1f}" if high - low >= 1 else f"{high:.1f}"

    @property
    def text(self) -> str:
        """Its output."""
        return self.log.read_text(errors="replace")

    def matches(self, pattern: str) -> list[Any]:
        """Text that a regular expression matches in its output, whose lines begin at `^`."""
        return re.findall(pattern, self.text, re.MULTILINE)

    def report(self, code: int) -> str:
        """A heading with its exit code, what was chosen and planned, and the end of the log of a run that failed."""
        lines = self.matches(r"^(?:chosen for|memory of|ready after|training again).*")
        end = self.text.splitlines()[-15:] if code else []
        return "\n".join([f"\n## {self.name}: exit code {code}", *lines, *end])


def app(folder: Path, name: str, gpus: str, keys: Sequence[str], *, kind: str = "grpo") -> Run:
    """A run of an app as experiment `name` below `folder`; it exports no model."""
    command = [sys.executable, "-m", f"apps.{kind}.main", *keys, f"trainer.experiment={name}"]
    command += [f"trainer.output_dir={folder}/outputs", "trainer.export_model=false"]
    return Run(name, command, folder / f"{name}.log", gpus)


def run_folder(folder: Path, name: str) -> Path | None:
    """The newest run of that name below `folder`."""
    return max(folder.glob(f"outputs/{name}_2*"), default=None)


class Steps:
    """The metrics of a run folder, a value a step; none without a folder."""

    def __init__(self, run: Path | None) -> None:
        self.table = MetricsTable(run / "metrics.tsv") if run and (run / "metrics.tsv").is_file() else None

    def __len__(self) -> int:
        return len(self.table.steps) if self.table else 0

    def series(self, metric: str, *, skip: int = 0) -> list[float]:
        """Its values after the first `skip` steps; empty if it is absent."""
        if self.table is None:
            return []
        kept = set(self.table.steps[skip:])
        return [value for step, value in zip(*self.table.series(metric), strict=True) if step in kept]

    def median(self, metric: str, *, skip: int = 1) -> float:
        """Its median after the first `skip` steps, which compile, or else of the last step; nan if it is absent."""
        return statistics.median(self.series(metric, skip=min(skip, len(self) - 1)) or [float("nan")])


def first_step_s(run: Run, made: Path | None) -> float:
    """Seconds from the command to the end of the first step of an app's run; nan if there is none.

    The name of the run folder has the local time, to the second, at which it was made; the app counts from then.
    """
    ready, first = run.matches(r"^ready after ([\d.]+) s"), Steps(made).series("timing_s/step")
    if made is None or not ready or not first:
        return math.nan
    [stamp] = re.findall(r"\d{8}_\d{6}", made.name)[-1:]
    start = datetime.strptime(stamp, "%Y%m%d_%H%M%S").astimezone().timestamp()
    return start - run.started + float(ready[0]) + first[0]


def leave(codes: Iterable[int]) -> None:
    """Ends a script whose runs had these exit codes: with 1 if one failed, so not for a time limit or an interrupt."""
    raise SystemExit(any(code not in (0, TIMED_OUT, INTERRUPTED) for code in codes))


def table_row(cells: Sequence[object]) -> str:
    """A row of a Markdown table: floats have two decimals, small ones two digits, and a dash stands for nan."""

    def text(cell: object) -> str:
        if not isinstance(cell, float):
            return str(cell)
        if cell != cell:
            return "-"
        return f"{cell:.2g}" if 0 < abs(cell) < 0.1 else f"{cell:,.2f}"

    return "| " + " | ".join(map(text, cells)) + " |"


def table_header(names: Sequence[str]) -> str:
    """The first two lines of a Markdown table."""
    return table_row(names) + "\n|" + " --- |" * len(names)


def parser(doc: str | None, *, steps: int, timeout_s: float, model: str | None = None) -> argparse.ArgumentParser:
    """The arguments of every script that starts runs: its folder, the steps and the seconds of a run, and the model."""
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("folder", type=lambda text: Path(text).absolute())
    made.add_argument("--model", choices=sorted(CONFIGS), default=model)
    made.add_argument("--steps", type=int, default=steps)
    made.add_argument("--timeout", type=float, default=timeout_s, help="seconds of one run")
    # Runs have sessions of their own, so they would survive a script that `timeout` ends, with their GPUs' memory.
    signal.signal(signal.SIGTERM, lambda *_: interrupted.set())
    return made
