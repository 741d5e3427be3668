"""One writing process a folder, held by the kernel, so that a dead process never holds anything.

A POSIX record lock belongs to a process: it ends with it, however it ends, and a forked child does not inherit it. The
file's text says who holds it, for the message to whoever is refused. Two traps shape the code: closing any descriptor
of the file drops the process's lock, so a process opens the file once and shares it among its managers; and the file
is never deleted, for a lock on a deleted file excludes nobody.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import sys
import threading
from collections import deque
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from .errors import CheckpointLockedError, CheckpointUsageError

__all__ = ["LOCK_NAME", "WriterLock"]

LOCK_NAME = ".lock"


@dataclass
class _Held:
    """One process-wide lock and the number of its users."""

    descriptor: int
    pid: int
    num_users: int = 0

    def is_for(self, path: Path) -> bool:
        """Whether this process still holds the file that bears the name now."""
        try:
            there, ours = os.stat(path), os.fstat(self.descriptor)
        except OSError:
            return False
        return self.pid == os.getpid() and (there.st_dev, there.st_ino) == (ours.st_dev, ours.st_ino)


_held: dict[Path, _Held] = {}
_forgotten: deque[WriterLock] = deque()
_guard = threading.Lock()


class WriterLock:
    """This process's right to write in `root`; several of these in one process share it."""

    def __init__(self, root: Path) -> None:
        self._path = (root / LOCK_NAME).absolute()
        self._entry: _Held | None = None

    def acquire(self) -> None:
        """Take the lock unless this object has it. `root` must exist.

        Raises CheckpointLockedError, naming the process that has it, or CheckpointUsageError where the file system
        has no locks.
        """
        with _guard:
            entry = _held.get(self._path)
            if entry is None or not entry.is_for(self._path):
                entry = _held[self._path] = _Held(descriptor=_lock_file(self._path), pid=os.getpid())
            if self._entry is not entry:
                self._entry = entry
                entry.num_users += 1
        self._release_forgotten()

    def release(self) -> None:
        """Give it back; the last user in the process unlocks. Does nothing when it is not held."""
        with _guard:
            self._release()

    def release_when_collected(self) -> None:
        """As `release`, for the garbage collector, which may run in the middle of any of these methods."""
        _forgotten.append(self)
        self._release_forgotten()

    @staticmethod
    def _release_forgotten() -> None:
        if _guard.acquire(blocking=False):  # else the thread inside does it when it is through
            try:
                while _forgotten:
                    _forgotten.pop()._release()
            finally:
                _guard.release()

    def _release(self) -> None:
        entry, self._entry = self._entry, None
        if entry is None or entry.pid != os.getpid():
            return
        entry.num_users -= 1
        if entry.num_users == 0:
            os.close(entry.descriptor)
            if _held.get(self._path) is entry:
                del _held[self._path]


def _lock_file(path: Path) -> int:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, _describe_self().encode(), 0)
    except OSError as error:
        holder = _read_holder(descriptor) if error.errno in (errno.EACCES, errno.EAGAIN) else None
        os.close(descriptor)
        if holder is not None:
            raise CheckpointLockedError(
                f"{path.parent}: {holder} is writing checkpoints here, and only one process may. Stop it, or save to "
                "another folder."
            ) from None
        if error.errno in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
            raise CheckpointUsageError(
                f"{path.parent}: this file system has no locks ({error.strerror}). Pass lock=False and make sure "
                "yourself that one process alone writes here."
            ) from None
        raise
    return descriptor


def _describe_self() -> str:
    started = datetime.now(UTC).isoformat(timespec="seconds")
    command = " ".join(sys.argv)[:200]
    return json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "since": started, "command": command}) + "\n"


def _read_holder(descriptor: int) -> str:
    try:
        holder = json.loads(os.pread(descriptor, 4096, 0))
        return f"process {holder['pid']} on {holder['host']} (since {holder['since']}: {holder['command']})"
    except (ValueError, KeyError, TypeError):
        return "another process"
