"""`run.json`: the state of a run. Written by the run; the reader checks that its process still lives."""

import json
import os
import socket
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from ..config.redaction import redact
from ..errors import RunFolderError
from ..signals import stopping_signal
from .metrics_table import atomic_write, naming_file

HEARTBEAT_S = 30.0
"""Seconds between two signs of life of a run: it sets the file's modification time."""
STALE_S = 10 * HEARTBEAT_S
"""Seconds without a sign of life after which a run on another host counts as dead."""
_MAX_MESSAGE = 300


@dataclass(frozen=True, kw_only=True)
class RunState:
    """The content of `run.json`."""

    state: Literal["running", "finished", "stopped", "failed"]
    message: str = ""
    """The first line of the error, or the signal that stopped the run."""
    app: str
    """The command that started the run, without its arguments."""
    num_steps: int
    host: str
    pid: int
    namespace: str
    """The boot and the process namespace in which `pid` counts; two containers have two."""
    started: str
    """The process's start, in clock ticks after the boot: another process with this pid has another one."""
    begun: float
    """Seconds since the epoch."""
    ended: float | None = None


def process_start(pid: int) -> str:
    """The start of a living process in clock ticks after the boot; empty if there is none."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if state in "ZX" else fields[18]


def process_namespace() -> str:
    """Identifies the boot of this host and the process namespace of this process; empty where /proc is missing."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


class StateFile:
    """Writes a run's state into its folder, and a sign of life every `HEARTBEAT_S` seconds until `close`.

    Args:
        not_before: seconds since the epoch; a clock that was set back does not make the run older than this.
    """

    def __init__(self, path: Path, *, app: str, num_steps: int, not_before: float = 0.0) -> None:
        self._path = path
        self._facts: dict[str, Any] = {
            "app": app,
            "num_steps": num_steps,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "namespace": process_namespace(),
            "started": process_start(os.getpid()),
            "begun": max(time.time(), not_before),
        }
        self._closed = threading.Event()
        self._write(RunState(state="running", **self._facts))
        self._thread = threading.Thread(target=self._beat, name="run state", daemon=True)
        self._thread.start()

    def expect(self, num_steps: int) -> None:
        """Writes another number of steps."""
        self._facts["num_steps"] = num_steps
        self._write(RunState(state="running", **self._facts))

    def close(self, error: BaseException | None) -> None:
        """Writes how the run ended: with `error`, or finished.

        Raises:
            RunFolderError: the file cannot be written; it still says that the run is running.
        """
        self._closed.set()
        self._thread.join()
        self._write(state_after(error, {**self._facts, "ended": time.time()}))

    def _write(self, state: RunState) -> None:
        text = json.dumps(asdict(state), indent=2) + "\n"
        try:
            atomic_write(self._path, text)
        except RunFolderError:  # in a folder that has become read-only the file itself can still be written
            if not self._path.exists():
                raise
            with naming_file(self._path):
                self._path.write_text(text)

    def _beat(self) -> None:
        while not self._closed.wait(HEARTBEAT_S):
            with suppress(OSError):  # the folder was moved or removed, or is out of reach for a while
                os.utime(self._path)


def state_after(error: BaseException | None, facts: dict[str, Any]) -> RunState:
    """End of a run: by `error`, or finished without one."""
    if number := stopping_signal(error):
        return RunState(state="stopped", message=f"by {number.name}", **facts)
    if error is None or (isinstance(error, SystemExit) and error.code in (0, None)):
        return RunState(state="finished", **facts)
    first = next(iter(redact(str(error)).splitlines()), "") or type(error).__name__
    first = f"exit code {first}" if isinstance(error, SystemExit) and isinstance(error.code, int) else first
    return RunState(state="failed", message=first[:_MAX_MESSAGE], **facts)


def read_state(path: Path) -> RunState | None:
    """The state as it was written; None if there is no such file, or one that says something else."""
    from pydantic import TypeAdapter

    try:
        return TypeAdapter(RunState).validate_json(path.read_bytes())
    except (OSError, ValueError):
        return None


def lives(state: RunState) -> bool | None:
    """True if the process of a run lives; None if it is a process of another host or container."""
    if not state.namespace or state.namespace != process_namespace():
        return None
    return process_start(state.pid) == state.started
