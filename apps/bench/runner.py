"""Runs a case in its own process, with retries, and keeps its run folder as `<folder>/<case>`."""

import contextlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from apps.bench.plan import Case
from apps.bench.results import CaseResult, read_result
from rl_runtime import InputError
from rl_runtime.ranks.environment import python_path

RECORD = "case.json"
USER_MISTAKE = 2
"""Exit code of an app that refused its arguments."""

Command = Callable[[Case], Sequence[str]]
"""Command of a case, without output folder and experiment name."""


def app_command(case: Case) -> list[str]:
    """The case's app, run by this Python interpreter."""
    return [sys.executable, "-m", f"apps.{case.app}.main", *case.arguments]


def finished(case: Case, folder: Path) -> CaseResult | None:
    """Result of the case if it already completed with the same arguments, else None."""
    try:
        record = json.loads((folder / case.name / RECORD).read_text())
    except (OSError, ValueError):
        return None
    if record["exit_code"] != 0 or record["arguments"] != list(case.arguments):
        return None
    return read_result(
        folder / case.name, status="completed", attempts=record["attempts"], wall_s=float(record["wall_s"])
    )


def run_case(
    case: Case,
    folder: Path,
    *,
    retries: int,
    timeout_s: float,
    on_progress: Callable[[CaseResult], None],
    command: Command = app_command,
) -> CaseResult:
    """Run a case up to `1 + retries` times; the last run folder is kept as `<folder>/<case>` even if it failed.

    Raises:
        rl_runtime.InputError: the app refused its arguments; this is not retried.
    """
    started = time.monotonic()
    for attempt in range(1, retries + 2):
        work = _new_attempt(folder, case.name)

        def watch(work: Path = work, attempt: int = attempt) -> None:
            run = _run_folder(work)
            wall_s = time.monotonic() - started
            on_progress(read_result(run or work, status="running", attempts=attempt, wall_s=wall_s))

        arguments = [*command(case), f"trainer.output_dir={work}", f"trainer.experiment={case.name}"]
        exit_code = _run(arguments, work / "output.log", timeout_s=timeout_s, watch=watch)
        if exit_code == USER_MISTAKE:
            lines = (work / "output.log").read_text(errors="replace").splitlines()
            raise InputError(f"case {case.name} was refused: " + "\n".join(lines[-5:]).removeprefix("error: "))
        if exit_code == 0:
            break
    wall_s = time.monotonic() - started
    record = {"arguments": list(case.arguments), "exit_code": exit_code, "attempts": attempt, "wall_s": wall_s}
    _keep(work, folder / case.name, record, failed=exit_code != 0)
    done = read_result(folder / case.name, status="completed", attempts=attempt, wall_s=wall_s)
    return replace(done, status="failed") if exit_code != 0 or done.last_step < case.steps else done


def _run(arguments: Sequence[str], log: Path, *, timeout_s: float, watch: Callable[[], None]) -> int:
    """Run a process with output to `log` and return its exit code; it is terminated on interrupt or timeout."""
    deadline = time.monotonic() + timeout_s
    with log.open("wb") as output:
        process = subprocess.Popen(
            arguments,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONPATH": python_path()},
            # Ctrl-C must reach only this process, which terminates the case; the case ends its own processes first.
            start_new_session=True,
        )
        try:
            while True:
                try:
                    return process.wait(timeout=1.0)
                except subprocess.TimeoutExpired:
                    watch()
                if time.monotonic() > deadline:
                    output.write(f"\ntimed out after {timeout_s:.0f} s\n".encode())
                    return -signal.SIGALRM
        finally:
            _end(process)


def _end(process: "subprocess.Popen[bytes]") -> None:
    # A training run finishes its step after the first SIGTERM and stops at once after the second.
    for number, patience_s in ((signal.SIGTERM, 1.0), (signal.SIGTERM, 60.0), (signal.SIGKILL, 10.0)):
        if process.poll() is not None:
            return
        process.send_signal(number)
        try:
            process.wait(timeout=patience_s)
        except subprocess.TimeoutExpired:
            continue


def _new_attempt(folder: Path, name: str) -> Path:
    numbered = (folder / "attempts" / f"{name}_{number}" for number in itertools.count(1))
    work = next(path for path in numbered if not path.exists())
    work.mkdir(parents=True)
    return work


def _run_folder(work: Path) -> Path | None:
    return next((path for path in work.iterdir() if path.is_dir()), None)


def _keep(work: Path, target: Path, record: dict[str, Any], *, failed: bool) -> None:
    """Make the attempt's run folder the case's; keep a failed attempt's output."""
    run = _run_folder(work)
    if run is None:
        run = work / "run"
        run.mkdir()
    if not (run / "train.log").exists():
        shutil.copy(work / "output.log", run / "train.log")
    (run / RECORD).write_text(json.dumps(record, indent=2) + "\n")
    if target.exists():
        target.rename(_new_attempt(target.parent, target.name) / "earlier")
    run.rename(target)
    if not failed:
        shutil.rmtree(work)
        with contextlib.suppress(OSError):  # it contains an earlier attempt
            work.parent.rmdir()
