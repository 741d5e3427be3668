"""Runs a case in its own process, with retries, and keeps its run folder as `<folder>/<case>`."""

import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from apps.bench.config import BenchConfig
from apps.bench.plan import Case
from apps.bench.results import summary_row
from apps.tables import Row
from rl_runtime import InputError
from rl_runtime.ranks.environment import python_path
from rl_runtime.rules import check_value
from run_kit import runs_of_experiment

USER_MISTAKE = 2
"""Exit code of an app that refused its arguments."""


def app_command(app: str) -> list[str]:
    """The app, run by this Python interpreter."""
    return [sys.executable, "-m", f"apps.{app}.main"]


def earlier_folder(config: BenchConfig) -> Path | None:
    """The folder that `resume=auto` continues; None to start a new one.

    Raises InputError if `resume_from` is no folder of a benchmark.
    """
    if config.resume == "never":
        return None
    if config.resume_from is None:
        output = Path(config.output_dir)
        earlier = (output / name for name in runs_of_experiment(config.run_tag, output))
        return next((path.resolve() for path in earlier if (path / "config.yaml").is_file()), None)
    folder = Path(config.resume_from)
    check_value(config, "resume_from", (folder / "config.yaml").is_file(), "the folder of a benchmark")
    return folder.resolve()


def completed_row(case: Case, folder: Path) -> Row | None:
    """Row of a case that already completed with the same arguments, else None."""
    try:
        record = json.loads((folder / case.name / "case.json").read_text())
    except (OSError, ValueError):
        return None
    if record.pop("arguments") != list(case.arguments) or record["exit_code"] != 0:
        return None
    return summary_row(case, folder / case.name, **record)


def run_case(case: Case, folder: Path, config: BenchConfig) -> Row:
    """Run a case up to `1 + config.retries` times; the last run folder is kept as `<folder>/<case>` even if it failed.

    Raises:
        rl_runtime.InputError: the app refused its arguments; this is not retried.
    """
    started = time.monotonic()
    exit_code, attempts = -1, 0
    while exit_code != 0 and attempts <= config.retries:
        attempts += 1
        work = _new_attempt(folder, case.name)
        place = (f"trainer.output_dir={work}", f"trainer.experiment={case.name}")
        command = [*app_command(case.app), *case.arguments, *place]
        exit_code = _run(command, work / "output.log", timeout_s=config.case_timeout_s)
        if exit_code == USER_MISTAKE:
            lines = (work / "output.log").read_text(errors="replace").splitlines()
            raise InputError(f"case {case.name} was refused: " + "\n".join(lines[-5:]).removeprefix("error: "))
    record: dict[str, Any] = {"exit_code": exit_code, "attempts": attempts, "wall_s": time.monotonic() - started}
    run = next((path for path in work.iterdir() if path.is_dir()), work / "run")
    run.mkdir(exist_ok=True)
    if not (run / "train.log").exists():  # the app ended before its run
        shutil.copy(work / "output.log", run / "train.log")
    (run / "case.json").write_text(json.dumps({"arguments": case.arguments, **record}, indent=2) + "\n")
    target = folder / case.name
    if target.exists():
        target.rename(_new_attempt(folder, case.name) / "earlier")
    run.rename(target)
    if exit_code == 0:
        shutil.rmtree(work)
    return summary_row(case, target, **record)


def _run(arguments: Sequence[str], log: Path, *, timeout_s: float) -> int:
    """Run a process with output to `log` and return its exit code; it is terminated on interrupt or timeout."""
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
            return process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            output.write(f"\ntimed out after {timeout_s:.0f} s\n".encode())
            return -signal.SIGALRM
        finally:
            _end(process)


def _end(process: "subprocess.Popen[bytes]") -> None:
    # A training run finishes its step after the first SIGTERM and stops at once after the second.
    for number, patience_s in ((signal.SIGTERM, 1.0), (signal.SIGTERM, 60.0), (signal.SIGKILL, 10.0)):
        with suppress(subprocess.TimeoutExpired):
            process.send_signal(number)  # does nothing if the process has ended
            process.wait(timeout=patience_s)
            return


def _new_attempt(folder: Path, name: str) -> Path:
    numbered = (folder / "attempts" / f"{name}_{number}" for number in itertools.count(1))
    work = next(path for path in numbered if not path.exists())
    work.mkdir(parents=True)
    return work
