"""Coordinates the processes that save one checkpoint together, through small messages and without collectives.

    root/.async_<run id>/      in the checkpoint folder, or below the URL if the hosts share no folder
      00000003.open            from the publishing process: the folder of save 3 exists, write into it
      00000003.rank00001       from rank 1: its files are written and fsynced (with their entries), or its error
      00000003.outcome         from the publishing process: save 3 is published, or its error
      closed.rank00001         from rank 1: it makes no more saves; the last process to close deletes the folder

All processes count saves alike and wait for the outcome of one before they begin the next, so an error is raised by the
same call everywhere. Waiting is polling in background threads.
"""

import json
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .. import errors
from ..digest import FileEntry
from ..errors import CheckpointError, CheckpointUsageError
from ..store.hosts import HostCheckpoints
from ..store.shared_folder import SharedFolder

COORDINATION_PREFIX = ".async_"
_SHORTEST_POLL_S = 0.005
#: A process whose main thread has ended waits at most this long for the others.
_TIMEOUT_AT_EXIT_S = 60.0


@dataclass(frozen=True, kw_only=True)
class SaverRanks:
    """This process's place among the processes that save one checkpoint together."""

    num_ranks: int
    """Number of processes that write, at least 1."""
    rank: int | None
    """From 0. None: this process writes nothing and publishes what the ranks write (a driver)."""
    run_id: str
    """The same in all processes of a run, different for every start; letters, digits, - and _."""
    publisher: int | None = 0
    """The rank that publishes, None for a process without a rank; the same in all processes."""

    def __post_init__(self) -> None:
        if self.num_ranks < 1:
            raise CheckpointUsageError(field="num_ranks", value=self.num_ranks, allowed="at least 1")
        for field in ("rank", "publisher"):
            value = getattr(self, field)
            if value is not None and not 0 <= value < self.num_ranks:
                raise CheckpointUsageError(field=field, value=value, allowed=f"from 0 to {self.num_ranks - 1}, or None")
        if self.rank is None and self.publisher is not None:
            raise CheckpointUsageError(
                "a process without a rank must be the publisher",
                field="publisher",
                value=self.publisher,
                remedy="set publisher=None in all processes",
            )
        if not self.run_id or not all(letter.isalnum() or letter in "-_" for letter in self.run_id):
            raise CheckpointUsageError(field="run_id", value=self.run_id, allowed="letters, digits, - and _")

    @property
    def is_publisher(self) -> bool:
        """True for the process that prepares and publishes."""
        return self.rank == self.publisher

    @property
    def num_processes(self) -> int:
        """Number of processes that take part, including a publisher without a rank."""
        return self.num_ranks + (self.publisher is None)

    @property
    def name(self) -> str:
        """This process's name in file names and messages."""
        return "publisher" if self.rank is None else f"rank{self.rank:05d}"


class SaveCoordinator:
    """Writes the messages of this process and waits for those of the others."""

    def __init__(self, store: SharedFolder | HostCheckpoints, ranks: SaverRanks, *, timeout_s: float) -> None:
        """`timeout_s`: how long to wait for another process in one save before raising."""
        self._storage, self._longest_poll_s = store.storage, store.longest_poll_s
        self._folder = f"{COORDINATION_PREFIX}{ranks.run_id}"
        self._ranks = ranks
        self._timeout_s = timeout_s
        self._cancelled = threading.Event()

    def cancel(self) -> None:
        """Stop waiting for other processes: this process ends with an error."""
        self._cancelled.set()

    # The publisher

    def open(self, save: int, name: str) -> None:
        """Announce that the ranks may write their parts of `name`. Deletes the messages of dead runs."""
        for folder in self._storage.names():
            if folder.startswith(COORDINATION_PREFIX) and folder != self._folder:
                self._storage.delete_path(folder)
        self._write(f"{save:08d}.open", {"name": name})

    def collect(self, save: int) -> dict[str, FileEntry]:
        """Wait for all other ranks; return the entries of their files. Raises the first error that one reports."""
        entries: dict[str, FileEntry] = {}
        for rank in range(self._ranks.num_ranks):
            if rank == self._ranks.rank:
                continue
            report = self._await([f"{save:08d}.rank{rank:05d}"], f"rank {rank} to write its part of the checkpoint")
            _raise_reported(report, f"rank {rank}: ")
            entries |= {name: FileEntry(**entry) for name, entry in report["entries"].items()}
        return entries

    def conclude(self, save: int, error: BaseException | None) -> None:
        """Announce the outcome to all processes."""
        self._write(f"{save:08d}.outcome", {} if error is None else _describe(error))
        if error is None:  # all processes have begun this save, so none needs the files of earlier ones
            for name in self._storage.names(self._folder):
                number = name.partition(".")[0]
                if number.isdigit() and int(number) < save:
                    self._storage.delete_path(f"{self._folder}/{name}")

    # The other ranks

    def await_open(self, save: int) -> str:
        """The name that `open` was given. Raises the error that kept the publisher from opening the save."""
        report = self._await([f"{save:08d}.open", f"{save:08d}.outcome"], "the process that publishes")
        _raise_reported(report, "")
        return str(report["name"])

    def report(self, save: int, written: Mapping[str, FileEntry] | BaseException) -> None:
        """Report that this rank's files are on the disk, or the error that prevented it."""
        report: dict[str, Any] = (
            _describe(written)
            if isinstance(written, BaseException)
            else {"entries": {name: vars(entry) for name, entry in written.items()}}
        )
        self._write(f"{save:08d}.{self._ranks.name}", report)

    def await_outcome(self, save: int) -> None:
        """Wait for the end of a save. Raises its error, whichever process it came from."""
        _raise_reported(self._await([f"{save:08d}.outcome"], "the process that publishes"), "")

    # All processes

    def close(self) -> None:
        """Announce that this process makes no more saves."""
        if not self._storage.names(self._folder):
            return
        self._write(f"closed.{self._ranks.name}", {})
        closed = [name for name in self._storage.names(self._folder) if name.startswith("closed.")]
        if len(closed) >= self._ranks.num_processes:
            self._storage.delete_path(self._folder)

    def _write(self, name: str, report: Mapping[str, Any]) -> None:
        self._storage.put_text(f"{self._folder}/{name}", json.dumps(report))

    def _await(self, names: list[str], whom: str) -> dict[str, Any]:
        started = time.monotonic()
        pause, deadline = _SHORTEST_POLL_S, started + self._timeout_s
        while True:
            for name in names:
                if (text := self._storage.read_text(f"{self._folder}/{name}")) is not None:
                    report: dict[str, Any] = json.loads(text)
                    return report
            now = time.monotonic()
            if not threading.main_thread().is_alive():
                deadline = min(deadline, now + _TIMEOUT_AT_EXIT_S)
            if now > deadline:
                raise CheckpointError(
                    f"{self._ranks.name} waited {now - started:.0f} s for {whom}: there is no {names[0]} in "
                    f"{self._storage.url}/{self._folder}. That process is dead, hangs, or does not see it. Nothing "
                    "was published."
                )
            if self._cancelled.wait(pause):
                raise CheckpointError(
                    f"{self._ranks.name} stopped waiting for {whom}: this process ended with an error"
                )
            pause = min(2 * pause, self._longest_poll_s)


def _describe(error: BaseException) -> dict[str, Any]:
    if isinstance(error, CheckpointError):
        return {"kind": type(error).__name__, "error": error.explanation, "field": error.field}
    return {"kind": "CheckpointError", "error": f"{type(error).__name__}: {error}", "field": None}


def _raise_reported(report: Mapping[str, Any], prefix: str) -> None:
    """Raise the error that another process reported, as its own class if that is one of this package's."""
    if "error" not in report:
        return
    kind = getattr(errors, str(report["kind"]), None)
    if not (isinstance(kind, type) and issubclass(kind, CheckpointError)):  # a subclass of another package
        kind = CheckpointError
    raise kind(f"{prefix}{report['error']}", field=report["field"])
