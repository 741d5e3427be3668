"""Lists runs with their states, compares runs, opens a report: `plinth runs [compare|open] [RUN ...]`.

A run is running, finished, stopped (by a signal), failed (with an error) or died (its process is gone and wrote no
end). A process of this host is looked up; one of another host is judged by its signs of life.
"""

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Literal, NoReturn

from .cli import INVOKED_AS, run_cli
from .errors import TrackingError
from .run_actions import ACTIONS, aligned, run_action
from .tracking.progress import duration_text
from .tracking.run_folder import RunFolder
from .tracking.run_state import STALE_S, RunState, lives, read_state

_TAIL_BYTES = 64 * 1024
_COLUMNS = ("run", "state", "step", "checkpoint", "age", "host", "pid", "app")


@dataclass(frozen=True, kw_only=True)
class RunsConfig:
    """The runs of a folder and their states."""

    output_dir: str = "outputs"
    """Parent of the run folders."""
    json: bool = False
    """Print JSON, one object for each run; `--json` is the same."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """The state of a run folder. Facts that it lacks are None or empty."""

    name: str
    state: Literal["running", "finished", "stopped", "failed", "died", "unknown"]
    detail: str = ""
    """The error, the signal, or how the state is known."""
    app: str = ""
    step: int | None = None
    """The last step in the metrics."""
    num_steps: int | None = None
    checkpoint: str = ""
    """The folder of the newest checkpoint."""
    host: str = ""
    pid: int | None = None
    age_s: float | None = None
    """Seconds since the run began."""


def list_runs(folder: Path) -> list[Run]:
    """The run folders (those with a config.yaml) in `folder`, the newest first.

    Raises:
        TrackingError: there is no such folder.
    """
    if not folder.is_dir():
        problem = "is a file" if folder.exists() else "does not exist, so it has no runs yet"
        remedy = "give the parent of the run folders: output_dir=FOLDER"
        raise TrackingError(problem, field="output_dir", value=str(folder), remedy=remedy)
    now = time.time()
    runs = [read_run(RunFolder(path), now) for path in sorted(folder.iterdir()) if (path / "config.yaml").is_file()]
    return sorted(runs, key=lambda run: float("inf") if run.age_s is None else run.age_s)


def read_run(folder: RunFolder, now: float) -> Run:
    """One run: its state, checked as far as that is possible here, its last step and newest checkpoint."""
    latest = _last_line(folder.path / "checkpoints" / "latest")
    cell = _last_line(folder.metrics_file).partition("\t")[0]
    step = int(cell) if cell.isdecimal() else None
    written = read_state(folder.state_file)
    if written is None:
        return Run(name=folder.name, state="unknown", detail="no run.json", step=step, checkpoint=latest)
    state, detail = _checked(written, folder, now)
    return Run(
        name=folder.name,
        state=state,
        detail=detail,
        app=written.app,
        step=step,
        num_steps=written.num_steps,
        checkpoint=latest,
        host=written.host,
        pid=written.pid,
        age_s=max(0.0, now - written.begun),
    )


def _checked(
    written: RunState, folder: RunFolder, now: float
) -> tuple[Literal["running", "finished", "stopped", "failed", "died"], str]:
    if written.state != "running":
        return written.state, written.message
    alive = lives(written)
    if alive:
        return "running", ""
    if alive is False:
        return "died", _last_line(folder.log_file)
    silent_s = max(0.0, now - folder.state_file.stat().st_mtime)
    seen = f"on {written.host} (not checked), last sign of life {duration_text(silent_s)} ago"
    return ("running" if silent_s < STALE_S else "died"), seen


def _last_line(path: Path) -> str:
    """The last line of a text file that is complete or not; empty if there is none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
            lines = file.read().decode("utf-8", "replace").splitlines()
    except OSError:
        return ""
    return next((line for line in reversed(lines) if line.strip()), "")


def to_text(runs: Sequence[Run]) -> str:
    """A table of the runs, with the reason of a run's end below its line."""
    rows = [_COLUMNS, *map(_cells, runs)]
    lines = aligned(rows)
    for number, run in reversed(list(enumerate(runs, start=1))):
        if run.detail:
            lines.insert(number + 1, f"  {run.detail}")
    return "\n".join(lines)


def _cells(run: Run) -> tuple[str, ...]:
    step = "" if run.num_steps is None and run.step is None else f"{run.step or 0}/{run.num_steps or '?'}"
    age = "" if run.age_s is None else duration_text(run.age_s)
    return run.name, run.state, step, run.checkpoint, age, run.host, "" if run.pid is None else str(run.pid), run.app


def show(config: RunsConfig) -> None:
    """Prints the runs."""
    runs = list_runs(Path(config.output_dir))
    if config.json:
        print(json.dumps([asdict(run) for run in runs], indent=2))
    else:
        print(to_text(runs) if runs else f"no runs in {config.output_dir}")


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Lists the runs, or runs `compare` or `open`; exits with 2 if there is no such folder or run."""
    arguments = ["json=true" if a == "--json" else a for a in (sys.argv[1:] if argv is None else argv)]
    name = arguments[0] if arguments else ""
    if name in ACTIONS:
        token = INVOKED_AS.set(f"plinth runs {name}")
        try:
            run_action(name, arguments[1:])
        finally:
            INVOKED_AS.reset(token)
    if name and "=" not in name and name != "help" and not name.startswith("-"):
        near = get_close_matches(name, ACTIONS, n=1)
        hint = f"nearest: {near[0]}; " if near else ""
        allowed = f"{', '.join(ACTIONS)}, or output_dir=FOLDER to list the runs of a folder"
        print(f"error: unknown action {name!r}; {hint}allowed: {allowed}", file=sys.stderr)
        raise SystemExit(2)
    run_cli(
        RunsConfig,
        show,
        app_name="plinth runs",
        argv=arguments,
        doc=(__doc__ or "").partition("\n")[0],
        examples=("output_dir=outputs --json", "compare RUN RUN", "open RUN"),
    )
