"""One writing process per checkpoint folder, by a file lock that the kernel drops when its holder dies.

The lock file's text names the holder, for the error message of a process that is refused. The file is never deleted: a
lock on a deleted file excludes nobody. `filelock` closes the descriptor in forked children, so they do not hold it.
"""

import errno
import json
import os
import socket
import sys
import threading
from datetime import UTC, datetime
from pathlib import Path
from weakref import WeakValueDictionary

from filelock import BaseFileLock, FileLock, SoftFileLock, Timeout

from .errors import CheckpointLockedError, CheckpointUsageError

LOCK_NAME = ".lock"


class _ProcessLock:
    """The lock of this process, shared by its managers. It is released when the last reference to it is dropped."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._pid = os.getpid()
        self._inode: tuple[int, int] | None = None
        self._file = FileLock(path, thread_local=False, mode=0o600)
        try:
            self._file.acquire(blocking=False)
        except Timeout:
            raise CheckpointLockedError(
                f"{_read_holder(path)} is writing checkpoints here, and only one process may",
                field="root",
                value=str(path.parent),
                remedy="stop it, or save to another folder",
            ) from None
        except (OSError, NotImplementedError) as error:
            if not isinstance(error, OSError) or error.errno in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
                raise _no_locks(path) from None
            raise
        if _is_soft(self._file):
            self._file.release(force=True)
            raise _no_locks(path)
        path.chmod(0o600)  # an earlier version may have created it readable for all
        path.write_text(_describe_self(), encoding="utf-8")
        self._inode = _inode(path)

    def is_valid(self) -> bool:
        """True while this process holds the file at the path; a fork or a deleted folder ends that."""
        return self._pid == os.getpid() and self._inode == _inode(self._path)


_locks: WeakValueDictionary[Path, _ProcessLock] = WeakValueDictionary()
_guard = threading.Lock()


def lock_folder(root: Path) -> object:
    """This process's right to write in `root`, which must exist; all callers in the process get the same object.

    The last one to drop it unlocks the folder. Raises CheckpointLockedError, naming the process that has the lock, or
    CheckpointUsageError where the file system has no locks.
    """
    path = (root / LOCK_NAME).absolute()
    with _guard:
        lock = _locks.get(path)
        if lock is None or not lock.is_valid():
            lock = _locks[path] = _ProcessLock(path)
        return lock


def _is_soft(lock: BaseFileLock) -> bool:
    """True if filelock has fallen back to a marker file, which would outlive a killed process."""
    return isinstance(lock, SoftFileLock)


def _inode(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _no_locks(path: Path) -> CheckpointUsageError:
    return CheckpointUsageError(
        "this file system has no locks",
        field="root",
        value=str(path.parent),
        remedy="pass lock=False and let only one process write here",
    )


def _describe_self() -> str:
    started = datetime.now(UTC).isoformat(timespec="seconds")
    program = Path(sys.argv[0]).name  # arguments may hold secrets
    return json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "since": started, "command": program}) + "\n"


def _read_holder(path: Path) -> str:
    try:
        holder = json.loads(path.read_text(encoding="utf-8"))
        return f"process {holder['pid']} on {holder['host']} (since {holder['since']}: {holder['command']})"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"
