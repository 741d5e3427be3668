"""Processes that call users' code and leave nothing running when they end. Linux."""

import io
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import NoReturn, TypeVar

from plinth_base.namespaces import adopt_orphans, die_with_parent, kill_children

MAX_PRINTED_BYTES = 1 << 20
"""Size of a file with what functions print."""


PipeT = TypeVar("PipeT", Connection, socket.socket)


def run_kept(
    work: Callable[[PipeT], None], pipe: PipeT, launcher: int | None = None, printed: str | None = None
) -> None:
    """Main function of a process: a child of it runs `work(pipe)`.

    This process ends with the child, or with its own parent, and so does every process that the child has started,
    because it becomes a child of this one when its parent ends. Terminating this process ends them too.

    launcher: the pid of the parent, which may have ended before this process asked to end with it; None: unknown.
    printed: file for the output of the child and its processes, up to `MAX_PRINTED_BYTES`; the rest is dropped. "": all
    of it is dropped. None: the terminal.
    """
    copier: threading.Thread | None = None

    def end(*_: object) -> None:
        kill_children()
        _wait_for_copy(copier)
        os._exit(0)

    adopt_orphans()
    os.setsid()  # signals to the launcher's process group, such as Ctrl-C and those of timeout, are for the launcher
    signal.signal(signal.SIGTERM, end)
    die_with_parent(signal.SIGTERM)
    if launcher is not None and os.getppid() != launcher:
        return
    keeper = os.getpid()
    output = None if printed is None else os.pipe()
    # Until the copier runs: a fast child may have printed and answered by then, and `end` waits for the copier.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    child = os.fork()
    if child == 0:
        if output is not None:
            _print_into(*output)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        die_with_parent()
        if os.getppid() == keeper:
            work(pipe)
        return
    pipe.close()
    if output is not None:
        os.close(output[1])
        copier = threading.Thread(target=_copy_printed, args=(output[0], printed), daemon=True)
        copier.start()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    ended = status = 0
    while ended != child:
        ended, status = os.wait()
    kill_children()
    _wait_for_copy(copier)
    end_like(status)


def end_like(status: int) -> NoReturn:
    """Ends this process as another one has ended, with this status of `os.wait`."""
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        with suppress(OSError):  # SIGKILL has no handler
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def end_kept(process: BaseProcess) -> None:
    """Ends a process of `run_kept` with all that was started in it, and waits for its end."""
    process.terminate()  # it kills what the child has started, then itself
    process.join(timeout=10.0)
    process.kill()
    process.join(timeout=10.0)


def describe(error: BaseException) -> str:
    """The type and the message of an error on one line, shortened. Errors of users may have no message to show."""
    try:
        message = " ".join(str(error).split())[:300]
    except BaseException as another:
        message = f"its __str__ raised {type(another).__name__}"
    return f"{type(error).__name__}: {message}"


def _print_into(reader: int, writer: int) -> None:
    os.close(reader)
    for standard in (1, 2):
        os.dup2(writer, standard)
    os.close(writer)
    # A worker is killed in the end: what waits in a buffer of this process would be lost.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)


def _copy_printed(source: int, path: str | None) -> None:
    """Copies until every process that prints has ended. It never stops reading, because printing would block."""
    file, room = -1, MAX_PRINTED_BYTES
    while part := os.read(source, 65536):
        if not path or room < 0:
            continue
        with suppress(OSError):  # a full disk
            if file < 0:
                file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
                room -= os.fstat(file).st_size
            os.write(file, part[: max(0, room)])
            if len(part) > room >= 0:
                os.write(file, b"\n[later output is dropped]\n")
        room -= len(part)


def _wait_for_copy(copier: threading.Thread | None) -> None:
    """Waits until what the ended processes printed is in the file; at most a second, since one may have escaped."""
    if copier is not None:
        copier.join(timeout=1.0)
