"""Runs a command and guarantees that no process of it survives. A script that uses only the standard library.

    python _supervise.py PARENT_PID GRACE_S COMMAND...

It stops the command's whole process tree when the command exits, when SIGTERM, SIGINT or SIGHUP arrives, or when the
process PARENT_PID is gone for any reason, unless it has left the command to another one (`OWNER`). As a child subreaper
it inherits all orphaned descendants, so vLLM's engine and worker processes cannot escape. The command receives SIGTERM
first; after GRACE_S seconds all remaining processes receive SIGKILL. The exit status is that of the command, or 128 +
its signal.

If this process itself is killed, the command dies with it (parent-death signal), and the launcher kills the process
group.

At the end it removes the folder named by PLINTH_SERVER_SOCKETS, if set: vLLM leaves its sockets behind.
"""

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_WATCHED = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD}
_POLL_S = 0.25
OWNER = "owner"
"""File among the server's sockets with id and start of the process to which the launcher has left the command."""


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def _before_exec() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _WATCHED)
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _fields(pid: int) -> list[str]:
    """/proc/PID/stat from the state on; those of no process if it has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ["X", "0"]


def started(pid: int) -> str:
    """Start of a process, in ticks since the boot; empty if it has ended."""
    fields = _fields(pid)
    return "" if fields[0] in "ZX" else fields[19]


def _is_owned(launcher: int) -> bool:
    """True while the launcher lives, or the process to which it has left the command."""
    if os.getppid() == launcher:
        return True
    try:
        pid, start = Path(os.environ["PLINTH_SERVER_SOCKETS"], OWNER).read_text().split()
    except (KeyError, OSError, ValueError):
        return False
    return started(int(pid)) == start


def descendants(root: int) -> list[int]:
    """All descendants of process `root`, from /proc."""
    parents = {int(p.name): int(_fields(int(p.name))[1]) for p in Path("/proc").iterdir() if p.name.isdigit()}
    pids, frontier = [], [root]
    while frontier:
        frontier = [pid for pid, parent in parents.items() if parent in frontier]
        pids += frontier
    return pids


def _reap(child: int, status: int | None) -> int | None:
    """Reap all exited children. Returns the command's exit status once it is known."""
    while True:
        try:
            pid, raw = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return status
        if pid == 0:
            return status
        if pid == child:
            code = os.waitstatus_to_exitcode(raw)
            status = code if code >= 0 else 128 - code


def _kill_tree(child: int, status: int | None, grace_s: float) -> int | None:
    if status is None:
        os.kill(child, signal.SIGTERM)
    end = time.monotonic() + grace_s
    while time.monotonic() < end and descendants(os.getpid()):
        status = _reap(child, status)
        time.sleep(0.02)
    while remaining := descendants(os.getpid()):
        for pid in remaining:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
        status = _reap(child, status)
    return _reap(child, status)


def main() -> int:
    parent, grace_s, command = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3:]
    signal.pthread_sigmask(signal.SIG_BLOCK, _WATCHED)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    # This process has a single thread, so running code between fork and exec is safe.
    process = subprocess.Popen(command, preexec_fn=_before_exec)  # a prepared server reads stdin
    child, status = process.pid, None
    process.returncode = 0  # _reap collects it; prevents Popen from waiting for it
    while status is None and _is_owned(parent):
        info = signal.sigtimedwait(_WATCHED, _POLL_S)
        status = _reap(child, status)
        if info is not None and info.si_signo != signal.SIGCHLD:
            break
    exited = status is not None
    status = _kill_tree(child, status, 0.5 if exited else grace_s)
    if folder := os.environ.get("PLINTH_SERVER_SOCKETS"):
        shutil.rmtree(folder, ignore_errors=True)
    return 128 + signal.SIGTERM if status is None else status


if __name__ == "__main__":
    sys.exit(main())
