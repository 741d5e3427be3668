"""How the processes that save one checkpoint together agree, without a collective: by small files beside it.

    root/.async_<run id>/
      00000003.open            one process publishes: the folder of save 3 is there, write into it
      00000003.rank00001       rank 1 has written and fsynced its files: their entries, or what went wrong
      00000003.outcome         published, or what went wrong: the end of save 3, for every process
      closed.rank00001         rank 1 saves no more; the last one to close deletes the folder

Saves are counted alike in all processes. Everyone waits for the outcome before it begins the next save, so a failure is
raised by the same call everywhere. Files appear by rename; waiting is polling, on threads that hold nothing up.
"""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import errors
from ..errors import CheckpointError, CheckpointUsageError
from ..files import write_text
from ..manifest import FileEntry

__all__ = ["NOTES_PREFIX", "RankNotes", "Ranks"]

NOTES_PREFIX = ".async_"
_SHORTEST_POLL_S, _LONGEST_POLL_S = 0.005, 0.2
#: A process that has ended its work waits no longer than this for the others of a save.
_PATIENCE_AT_EXIT_S = 60.0


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """Which of the processes that save together this one is."""

    num_ranks: int
    """Processes that write, at least 1."""
    rank: int | None
    """From 0; None: this process writes nothing, it publishes what the ranks write (a driver, say)."""
    run_id: str
    """The same in all processes of a run, another one at every start; letters, digits, - and _."""
    publisher: int | None = 0
    """The rank that publishes, None for a process without a rank; the same in all processes."""

    def __post_init__(self) -> None:
        if self.num_ranks < 1:
            raise CheckpointUsageError(f"num_ranks={self.num_ranks!r}: must be at least 1")
        for field in ("rank", "publisher"):
            value = getattr(self, field)
            if value is not None and not 0 <= value < self.num_ranks:
                raise CheckpointUsageError(f"{field}={value!r}: must be from 0 to {self.num_ranks - 1}, or None")
        if self.rank is None and self.publisher is not None:
            raise CheckpointUsageError(
                f"rank=None, publisher={self.publisher}: a process without a rank is there to publish; say "
                "publisher=None, in all processes"
            )
        if not self.run_id or not all(letter.isalnum() or letter in "-_" for letter in self.run_id):
            raise CheckpointUsageError(f"run_id={self.run_id!r}: give letters, digits, - and _")

    @property
    def is_publisher(self) -> bool:
        """Whether this process prepares and publishes."""
        return self.rank == self.publisher

    @property
    def num_processes(self) -> int:
        """All that take part, a publisher without a rank included."""
        return self.num_ranks + (self.publisher is None)

    @property
    def name(self) -> str:
        """This process in file names and messages."""
        return "publisher" if self.rank is None else f"rank{self.rank:05d}"


class RankNotes:
    """This process's side of the notes."""

    def __init__(self, root: Path, ranks: Ranks, *, patience_s: float) -> None:
        """`patience_s`: how long to wait for another process in one save before giving it up as dead."""
        self._root = root
        self._folder = root / f"{NOTES_PREFIX}{ranks.run_id}"
        self._ranks = ranks
        self._patience_s = patience_s
        self._cancelled = threading.Event()

    def delete_others(self) -> None:
        """Delete the notes of dead runs. For the publisher that holds the folder's lock."""
        for folder in self._root.glob(f"{NOTES_PREFIX}*"):
            if folder != self._folder:
                shutil.rmtree(folder, ignore_errors=True)

    def cancel(self) -> None:
        """Wait for nobody any more: this process is going down with an error."""
        self._cancelled.set()

    # The publisher

    def open(self, save: int, folder: Path) -> None:
        """The ranks may write into `folder`, which lies in the root."""
        self._write(f"{save:08d}.open", {"folder": folder.name})

    def collect(self, save: int) -> dict[str, FileEntry]:
        """What the other ranks wrote, when all have. Raises the first error that one reports."""
        entries: dict[str, FileEntry] = {}
        for rank in range(self._ranks.num_ranks):
            if rank == self._ranks.rank:
                continue
            note = self._await([f"{save:08d}.rank{rank:05d}"], f"rank {rank}, which writes its part of the checkpoint")
            _raise_noted(note, f"rank {rank}: ")
            entries |= {name: FileEntry(**entry) for name, entry in note["entries"].items()}
        return entries

    def conclude(self, save: int, error: BaseException | None) -> None:
        """Tell everyone how it ended."""
        self._write(f"{save:08d}.outcome", {} if error is None else _describe(error))
        if error is None:  # all have begun this save, so nobody needs the notes of earlier ones
            for path in self._folder.glob("*.*"):
                if path.name.partition(".")[0].isdigit() and int(path.name.partition(".")[0]) < save:
                    path.unlink(missing_ok=True)

    # The other ranks

    def await_folder(self, save: int) -> Path:
        """The folder to write into. Raises what kept the publisher from preparing it."""
        note = self._await([f"{save:08d}.open", f"{save:08d}.outcome"], "the process that publishes")
        _raise_noted(note, "")
        return self._root / str(note["folder"])

    def report(self, save: int, written: Mapping[str, FileEntry] | BaseException) -> None:
        """This rank's files are on the disk, or why they are not."""
        note: dict[str, Any] = (
            _describe(written)
            if isinstance(written, BaseException)
            else {"entries": {name: vars(entry) for name, entry in written.items()}}
        )
        self._write(f"{save:08d}.{self._ranks.name}", note)

    def await_outcome(self, save: int) -> None:
        """Wait for the end of a save. Raises what went wrong with it, in whatever process."""
        _raise_noted(self._await([f"{save:08d}.outcome"], "the process that publishes"), "")

    # All

    def close(self) -> None:
        """This process saves no more."""
        if not self._folder.is_dir():
            return
        self._write(f"closed.{self._ranks.name}", {})
        if len(list(self._folder.glob("closed.*"))) >= self._ranks.num_processes:
            shutil.rmtree(self._folder, ignore_errors=True)

    # Inside

    def _write(self, name: str, note: Mapping[str, Any]) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        write_text(self._folder / name, json.dumps(note))

    def _await(self, names: list[str], whom: str) -> dict[str, Any]:
        started = time.monotonic()
        pause, deadline = _SHORTEST_POLL_S, started + self._patience_s
        while True:
            for name in names:
                if (self._folder / name).exists():
                    note: dict[str, Any] = json.loads((self._folder / name).read_text(encoding="utf-8"))
                    return note
            now = time.monotonic()
            if not threading.main_thread().is_alive():
                deadline = min(deadline, now + _PATIENCE_AT_EXIT_S)
            if now > deadline:
                raise CheckpointError(
                    f"{self._ranks.name} waited {now - started:.0f} s in vain for {whom}: no {names[0]} in "
                    f"{self._folder}. That process is dead or hangs, or does not see the folder; nothing was published."
                )
            if self._cancelled.wait(pause):
                raise CheckpointError(
                    f"{self._ranks.name} stopped waiting for {whom}: this process ended with an error"
                )
            pause = min(2 * pause, _LONGEST_POLL_S)


def _describe(error: BaseException) -> dict[str, Any]:
    return {"error": str(error), "kind": type(error).__name__}


def _raise_noted(note: Mapping[str, Any], prefix: str) -> None:
    """Raise an error that another process noted: as its class if it is one of this package's."""
    if "error" not in note:
        return
    kind = getattr(errors, str(note["kind"]), None)
    if isinstance(kind, type) and issubclass(kind, CheckpointError):
        raise kind(f"{prefix}{note['error']}")
    raise CheckpointError(f"{prefix}{note['kind']}: {note['error']}")
