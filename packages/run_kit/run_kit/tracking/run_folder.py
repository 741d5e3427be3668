"""Run folder: its name, its files, and a log of the console output."""

import calendar
import contextlib
import itertools
import logging
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TextIO

from ..config.redaction import redact, yaml_without_secrets
from ..errors import OWN_PACKAGES, TrackingError
from ..signals import RunStopped
from ..terminal import Terminal
from .metrics_table import atomic_write
from .run_state import read_state

EXPERIMENT_PATTERN = r"[A-Za-z0-9][A-Za-z0-9._+=-]*"
"""Allowed experiment names (a run's folder starts with the name)."""

_TIME_FORMAT = "%Y%m%d_%H%M%S"
_TIME_IN_NAME = re.compile(r"_(\d{8}_\d{6})$")
_ANSI = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")


class RunFolder:
    """The folder of a run and the paths in it.

    As a context manager it also writes `train.log`: stdout, stderr and log records of the process as shown to the
    user, without control characters, and the traceback of an error that ends the run.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).resolve()
        self.config_file = self.path / "config.yaml"
        """The resolved configuration."""
        self.state_file = self.path / "run.json"
        """State of the run, its end, and its process (`plinth runs`)."""
        self.log_file = self.path / "train.log"
        """The console output."""
        self.metrics_file = self.path / "metrics.tsv"
        """One row per step."""
        self.supervised_file = self.path / "supervised.tsv"
        """One row per step of a supervised warm start."""
        self.summary_file = self.path / "summary.json"
        """Scores, accuracies, wall time and memory of the run."""
        self.curves_file = self.path / "curves.png"
        """Plots of the main metrics."""
        self.report_file = self.path / "report.html"
        """The run as one HTML page."""
        self.rollouts_dir = self.path / "rollouts"
        """Samples of each step's rollouts."""
        self.tensorboard_dir = self.path / "tensorboard"
        """TensorBoard events."""
        self._log: LogFile | None = None
        self._stack = contextlib.ExitStack()

    @classmethod
    def create(
        cls, output_dir: str | Path, experiment: str, *, private: bool = True, now: Callable[[], float] = time.time
    ) -> "RunFolder":
        """Make `<output_dir>/<experiment>_<YYYYmmdd_HHMMSS>/`, the time in UTC.

        It is a later second than that of every run of the experiment there, also if the clock was set back.

        Args:
            private: only this user can enter it (mode 0700); False: as the umask allows.
            now: seconds since the epoch; for tests.

        Raises:
            TrackingError: an invalid name, or a folder that cannot be created.
        """
        if not re.fullmatch(EXPERIMENT_PATTERN, experiment):
            allowed = "letters, digits and . _ + = -, with a letter or digit first"
            raise TrackingError(field="experiment", value=experiment, allowed=allowed)
        parent = Path(output_dir)
        begun = now()
        for name in runs_of_experiment(experiment, parent)[:1]:
            begun = max(begun, begun_s(parent / name) + 1)
        return cls(_make_new(parent, experiment, begun, 0o700 if private else 0o777))

    @property
    def name(self) -> str:
        """Name of the folder: experiment and time in UTC."""
        return self.path.name

    def write_config(self, config: Any, comment: str = "") -> Path:
        """Write the resolved configuration without secrets; `config=<this file>` repeats the run.

        Args:
            comment: lines for the top of the file.
        """
        head = "".join(f"# {line}\n" for line in comment.splitlines())
        atomic_write(self.config_file, head + yaml_without_secrets(config))
        return self.config_file

    def __enter__(self) -> "RunFolder":
        log = self._log = LogFile(self.log_file)
        self._stack.callback(log.close)
        self._stack.enter_context(_copied_to(log))
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        is_orderly = isinstance(error, RunStopped) or (isinstance(error, SystemExit) and error.code in (0, None))
        if self._log and error is not None and not is_orderly:
            self._log.write_text("".join(traceback.format_exception(error)))
            if not self._log.is_closed and self.log_file.exists():
                error.add_note(f"The traceback is in {self.log_file}")
        self._log = None
        self._stack.close()


def begun_s(folder: Path) -> float:
    """Seconds since the epoch when a run began: by its `run.json`, else by the time in its name, else 0."""
    state = read_state(folder / "run.json")
    return state.begun if state is not None and 0 <= state.begun < 2**36 else name_s(folder.name)


def name_s(name: str) -> float:
    """Seconds since the epoch of the time in a run's name; 0 if it has none."""
    time_in_name = _TIME_IN_NAME.search(name)
    try:
        return calendar.timegm(time.strptime(time_in_name[1], _TIME_FORMAT)) if time_in_name else 0
    except ValueError:  # digits that are no time
        return 0


def runs_of_experiment(experiment: str, folder: Path, further: Iterable[str] = ()) -> list[str]:
    """Names of the runs of an experiment in `folder` and of `further` ones (in a storage), the newest first.

    The time of a run is that of its `run.json`, which no change of the time zone moves, else the one in its name.
    """
    here = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    names = {name for name in (*here, *further) if _TIME_IN_NAME.sub("", name) == experiment != name}
    return sorted(names, key=lambda name: (begun_s(folder / name), name), reverse=True)


def _make_new(parent: Path, experiment: str, begun: float, mode: int) -> Path:
    try:
        parent.mkdir(parents=True, exist_ok=True)
        for second in itertools.count():
            path = parent / f"{experiment}_{time.strftime(_TIME_FORMAT, time.gmtime(begun + second))}"
            with contextlib.suppress(FileExistsError):
                path.mkdir(mode)
                break
    except OSError as error:
        problem = f"cannot make a run folder: {error.strerror or error}"
        raise TrackingError(problem, field="output_dir", value=str(parent)) from None
    return path.resolve()


class LogFile:
    """Merges several streams into a log of whole lines without control characters. Thread-safe."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8", errors="backslashreplace")
        self._lock = threading.RLock()
        self._open_lines: dict[str, str] = {}

    @property
    def is_closed(self) -> bool:
        """True once `close` was called or the file could not be written."""
        return self._file.closed

    def feed(self, stream: str, text: str) -> None:
        """Append text written to a stream; only complete lines go to the file, in their final form on the terminal."""
        with self._lock:
            *lines, rest = (self._open_lines.get(stream, "") + text).split("\n")
            for line in lines:
                self._write_line(line)
            # A progress bar rewrites one line for minutes: keep only its visible part.
            self._open_lines[stream] = rest[max(rest.rstrip("\r").rfind("\r"), 0) :]

    def write_text(self, text: str) -> None:
        """Add whole lines."""
        with self._lock:
            for line in text.splitlines():
                self._write_line(line)

    def close(self) -> None:
        """Write unfinished lines and close."""
        with self._lock:
            for rest in self._open_lines.values():
                if visible_line(rest):
                    self._write_line(rest)
            self._open_lines.clear()
            with contextlib.suppress(OSError):  # text that did not fit before
                self._file.close()

    def _write_line(self, line: str) -> None:
        if self._file.closed:
            return
        try:
            self._file.write(redact(visible_line(line)) + "\n")
            self._file.flush()
        except OSError as error:
            # No error from a print: the run ends where it next saves what it computed, with that file's name.
            with contextlib.suppress(OSError):
                self._file.close()
            Terminal(sys.__stderr__).write(f"warning: {self._file.name} ends here: {error.strerror}\n")


def visible_line(line: str) -> str:
    """A terminal line as plain text: the part after the last carriage return, without escape sequences."""
    visible = line.rstrip("\r").rpartition("\r")[2]
    return _CONTROL.sub("", _ANSI.sub("", visible)).rstrip()


class _Tee(Terminal):
    """A terminal without secrets. The log comes first: what happens to the terminal does not change it."""

    def __init__(self, original: TextIO, log: LogFile, name: str) -> None:
        super().__init__(original)
        self._log, self._name = log, name
        self.log()

    def write(self, text: str) -> int:
        self._log.feed(self._name, text)
        super().write(redact(text))
        return len(text)


@contextlib.contextmanager
def _copied_to(log: LogFile) -> Iterator[None]:
    """Copies stdout, stderr and log records of this process to the log."""
    stdout, stderr = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = _Tee(stdout, log, "stdout"), _Tee(stderr, log, "stderr")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s", "%H:%M:%S"))
    handler.addFilter(_is_of_interest)
    root = logging.getLogger()
    level = root.level
    root.addHandler(handler)
    root.setLevel(min(level or logging.WARNING, logging.INFO))
    try:
        yield
    finally:
        root.removeHandler(handler)
        root.setLevel(level)
        # If other code wrapped the streams later, leave its wrappers in place; the tee still passes text through.
        if isinstance(sys.stdout, _Tee):
            sys.stdout = stdout
        if isinstance(sys.stderr, _Tee):
            sys.stderr = stderr


def _is_of_interest(record: logging.LogRecord) -> bool:
    own = record.name.partition(".")[0] in OWN_PACKAGES
    return record.levelno >= (logging.INFO if own else logging.WARNING)
