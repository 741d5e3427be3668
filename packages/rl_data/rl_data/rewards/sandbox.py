"""Runs untrusted Python programs in their own process tree, with limits on time, memory, output and reach.

    finished = run_program("print(input())", "hello", Limits(timeout_s=2.0))

A launcher process (`_launcher.py`) shuts the program in as far as the kernel allows, and ends its whole process tree.
`isolation()` says what holds on this machine.
"""

import json
import os
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Any, Literal

from plinth_base import namespaces

_LAUNCHER = Path(__file__).with_name("_launcher.py")
_NAMESPACES = Path(namespaces.__file__).parent
_END_GRACE_S = 10.0
"""Seconds that the launcher has to kill its process tree."""
_START_GRACE_S = 0.5
"""Seconds after the deadline for a launcher whose program has ended."""
_KINDS = {"network": "network", "files": "files outside their folder", "processes": "processes of this user"}


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of one program. Memory and CPU time are those of one process; the others hold for all together."""

    timeout_s: float = 5.0
    """Wall-clock seconds; CPU seconds of a process are limited to one more."""
    memory_bytes: int = 1 << 30
    """Address space of a process."""
    disk_bytes: int = 64 << 20
    """Size of the temporary folder (of one file where the kernel allows no mount)."""
    output_bytes: int = 1 << 20
    """Standard output; a program that prints more is ended."""
    num_processes: int = 1
    """1: the program can start threads, no processes. More: processes and threads (RLIMIT_NPROC; without a user
    namespace all of this user's count, and for root there is no limit)."""


@dataclass(frozen=True, kw_only=True)
class Finished:
    """stdout: at most `output_bytes` of it. exit_code: None if a limit of time or output ended the program."""

    stdout: bytes
    exit_code: int | None
    reason: Literal["", "timeout", "output"] = ""


def run_program(program: str, stdin: str = "", limits: Limits | None = None) -> Finished:
    """Runs a Python program with text on its standard input. Its standard error is dropped.

    When this returns, no process of the program is left and its temporary folder is gone.

    Raises:
        RuntimeError: the launcher failed, so nothing is known about the program.
    """
    limits = limits or Limits()
    with TemporaryDirectory(prefix="plinth-sandbox-", ignore_cleanup_errors=True) as folder:
        spec = {"program": program, "stdin": stdin, "folder": folder, **asdict(limits)}
        with _launched(spec) as launcher:
            assert launcher.stdout is not None
            deadline = time.monotonic() + limits.timeout_s
            output, reason = _read(launcher.stdout, deadline, limits.output_bytes)
            if not reason and not _has_ended(launcher, deadline):  # it closed its output and goes on
                reason = "timeout"
            exit_code = _end(launcher)
    if exit_code == _LAUNCHER_FAILED:
        raise RuntimeError(f"the sandbox's launcher failed: {output.decode('utf-8', 'replace')[-300:]}")
    return Finished(stdout=output, exit_code=None if reason else exit_code, reason=reason)


def isolation() -> dict[str, bool]:
    """True for what programs cannot reach on this machine: "network", "files" (to write), "processes"."""
    with _launched({"probe": True}) as launcher:
        output, _ = launcher.communicate(timeout=60)
    reached: dict[str, bool] = json.loads(output)
    return reached


def describe_isolation() -> str:
    """One line for the log: what programs can and cannot reach on this machine."""
    closed = isolation()
    opened = [words for kind, words in _KINDS.items() if not closed[kind]]
    if not opened:
        return "programs run without network, and without reach of files (to write) and processes outside"
    return f"warning: the kernel lets programs of the code reward reach {', '.join(opened)}: it denies namespaces"


_LAUNCHER_FAILED = 199


def _launched(spec: dict[str, Any]) -> subprocess.Popen[bytes]:
    launcher = subprocess.Popen(
        [sys.executable, "-I", "-S", str(_LAUNCHER), str(os.getpid()), str(_NAMESPACES)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    assert launcher.stdin is not None
    with suppress(BrokenPipeError), launcher.stdin as stdin:
        stdin.write(json.dumps(spec).encode())
    launcher.stdin = None
    return launcher


def _read(stdout: IO[bytes], deadline: float, limit: int) -> tuple[bytes, Literal["", "timeout", "output"]]:
    """Output until all writers are gone, the deadline or the limit; and which of these two ended it."""
    output, readable = b"", select.poll()  # select.select takes no descriptor above 1023
    readable.register(stdout, select.POLLIN)
    while True:
        left = deadline - time.monotonic()
        if left <= 0 or not readable.poll(left * 1000):
            return output, "timeout"
        if not (part := os.read(stdout.fileno(), 65536)):
            return output, ""
        output += part
        if len(output) > limit:
            return output[:limit], "output"


def _has_ended(launcher: subprocess.Popen[bytes], deadline: float) -> bool:
    with suppress(subprocess.TimeoutExpired):
        launcher.wait(max(0.0, deadline - time.monotonic()) + _START_GRACE_S)
    return launcher.returncode is not None


def _end(launcher: subprocess.Popen[bytes]) -> int:
    """Ends the launcher, which ends its tree; returns the exit code, as a shell counts signals (128 + number)."""
    if launcher.poll() is None:
        launcher.send_signal(signal.SIGTERM)
    try:
        return launcher.wait(_END_GRACE_S)
    except subprocess.TimeoutExpired:
        launcher.kill()
        return launcher.wait()
