"""Processes that a test starts: they have process groups of their own and do not outlive the test run."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

_PR_SET_PDEATHSIG = 1
CPU_ENVIRONMENT = {
    "DS_ACCELERATOR": "cpu",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
"""Variables of every process unless the caller sets them: two cores are shared, and tests download nothing."""


def free_port() -> int:
    """A TCP port of 127.0.0.1 that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


_INTERPRETER = """
import os, runpy, sys, traceback
import torch, triton
for line in sys.stdin:
    script, *sys.path = line.rstrip("\\n").split("\\t")
    if child := os.fork():
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
        continue
    for stream, name in (1, "out"), (2, "err"):
        os.dup2(os.open(f"{script}.{name}", os.O_WRONLY | os.O_CREAT), stream)
    code = 1
    try:
        runpy.run_path(script, run_name="__main__")
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)
"""


@functools.cache
def _interpreter() -> subprocess.Popen[str]:
    """A process that has imported torch and Triton, and forks for each script: imports take longer than most scripts.

    Triton reads TRITON_INTERPRET when it is imported.
    """
    env = {**os.environ, **CPU_ENVIRONMENT, "TRITON_INTERPRET": "1"}
    command, pipes = [sys.executable, "-c", _INTERPRETER], {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    return subprocess.Popen(command, env=env, text=True, preexec_fn=die_with_parent, **pipes)  # type: ignore[call-overload, no-any-return]


def run_under_the_interpreter(code: str, *paths: str) -> str:
    """Output of `code` in a process that runs Triton's kernels on the CPU; it imports from `paths` first."""
    with tempfile.TemporaryDirectory() as folder:
        (script := Path(folder) / "cases.py").write_text(code)  # functions of a kernel need a file
        server = _interpreter()
        assert server.stdin is not None
        assert server.stdout is not None
        print(script, *paths, *filter(None, sys.path), sep="\t", file=server.stdin, flush=True)
        ended = server.stdout.readline()
        assert ended == "0\n", Path(f"{script}.err").read_text()[-4000:] if ended else "the interpreter has ended"
        return Path(f"{script}.out").read_text()


def wait_until(condition: Callable[[], object], timeout_s: float = 300.0, *, interval_s: float = 0.05) -> None:
    """Calls `condition` until it is true; an AssertionError after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not true within {timeout_s} s"
        time.sleep(interval_s)


def die_with_parent() -> None:
    """Asks Linux to kill this process when its parent ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def start_process(
    command: Sequence[str], log: Path | IO[bytes], env: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """Starts `command` in a process group of its own. Its output goes to `log`; it dies with the test run."""
    with contextlib.ExitStack() as stack:
        stream = stack.enter_context(log.open("wb")) if isinstance(log, Path) else log
        return subprocess.Popen(
            command,
            env={**os.environ, **CPU_ENVIRONMENT, **(env or {})},
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=die_with_parent,
        )


def stop_process(process: subprocess.Popen[Any], *, grace_s: float = 10.0) -> None:
    """Ends a process group with SIGTERM, after `grace_s` with SIGKILL, and waits for it."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(grace_s)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(10)


def run_script(script: Path, *arguments: object, env: Mapping[str, str] | None = None, timeout_s: float = 400.0) -> str:
    """Runs a Python file and returns what it printed; an AssertionError with the end of it when it failed.

    Whatever the script started ends with it.
    """
    with tempfile.TemporaryFile() as log:
        process = start_process([sys.executable, str(script), *map(str, arguments)], log, env)
        try:
            code: int | str = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            code = f"stopped after {timeout_s} s"
        finally:
            stop_process(process, grace_s=0.0)
        log.seek(0)
        text = log.read().decode(errors="replace")
    assert code == 0, f"{script.name}: {code}\n{text[-6000:]}"
    return text
