"""Processes that call users' code and leave nothing running when they end. Linux."""

import ctypes
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol, TypeVar

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


class Closable(Protocol):
    """An end of a pipe or socket pair."""

    def close(self) -> None: ...


PipeT = TypeVar("PipeT", bound=Closable)


def run_kept(work: Callable[[PipeT], None], pipe: PipeT, launcher: int | None = None) -> None:
    """Main function of a process: a child of it runs `work(pipe)`.

    This process ends with the child, or with its own parent, and so does every process that the child has started,
    because it becomes a child of this one when its parent ends. Terminating this process ends them too.

    launcher: the pid of the parent, which may have ended before this process asked to end with it; None: unknown.
    """
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher handles Ctrl-C
    signal.signal(signal.SIGTERM, _end)
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if launcher is not None and os.getppid() != launcher:
        return
    keeper = os.getpid()
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == keeper:
            work(pipe)
        return
    pipe.close()
    ended = status = 0
    while ended != child:
        ended, status = os.wait()
    _kill_descendants()
    code = os.waitstatus_to_exitcode(status)
    if code < 0:  # by a signal: end in the same way
        with suppress(OSError):  # SIGKILL has no handler
            signal.signal(-code, signal.SIG_DFL)
        os.kill(keeper, -code)
    os._exit(code)


def describe(error: BaseException) -> str:
    """The type and the message of an error on one line, shortened."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def _prctl(option: int, value: int) -> None:
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _end(*_: object) -> None:
    _kill_descendants()
    os._exit(0)


def _kill_descendants() -> None:
    """Kills the children of this process until there is none: a subreaper gets those of a child that has ended."""
    while children := [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if _is_child(pid)]:
        for pid in children:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)


def _is_child(pid: int) -> bool:
    with suppress(OSError), open(f"/proc/{pid}/stat") as file:
        return int(file.read().rpartition(")")[2].split()[1]) == os.getpid()
    return False
