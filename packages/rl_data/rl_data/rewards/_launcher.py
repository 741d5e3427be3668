"""Shuts one Python program in and ends its whole process tree. Run as a script by `sandbox`; standard library only.

It reads a JSON object from standard input, and enters namespaces as far as the kernel allows. A seccomp filter refuses
new processes, since RLIMIT_NPROC does not hold for root and counts all processes of other users.

Arguments: the pid of its parent, and the folder of plinth_base.namespaces, since this process has no site-packages.
"""

import errno
import json
import math
import os
import platform
import resource
import signal
import sys
import traceback
from typing import Any, NoReturn

sys.path.insert(0, sys.argv[2])

from namespaces import (  # type: ignore[import-not-found]
    ANSWER,
    EQUAL,
    HAS_BITS,
    LOAD,
    REFUSE,
    adopt_orphans,
    die_with_parent,
    filter_system_calls,
    kill_children,
    shut_in,
)

_FAILED = 199

_CLONE_THREAD, _SYS_CLONE3 = 0x00010000, 435
_SYSTEM_CALLS = {"x86_64": (56, (57, 58)), "aarch64": (220, ())}
"""Machine -> (number of clone, numbers of fork and vfork)."""


def _refuse_new_processes() -> None:
    """A filter under which this process can start threads and no processes (EPERM).

    clone3 is answered by ENOSYS, because a filter cannot read its flags; C libraries then use clone.
    """
    clone, forks = _SYSTEM_CALLS[platform.machine()]
    refuse = (ANSWER, 0, 0, REFUSE | errno.EPERM)
    rules = [(EQUAL, 0, 1, _SYS_CLONE3), (ANSWER, 0, 0, REFUSE | errno.ENOSYS)]
    for fork in forks:
        rules += [(EQUAL, 0, 1, fork), refuse]
    rules += [(EQUAL, 0, 3, clone), (LOAD, 0, 0, 16), (HAS_BITS, 1, 0, _CLONE_THREAD), refuse]  # 16: its flags
    filter_system_calls(rules)


def _end(*_: object) -> NoReturn:
    kill_children()
    os._exit(128 + signal.SIGTERM)


def _wait_for(child: int) -> int:
    """Reaps children until `child` has ended; returns its exit code, as a shell counts signals."""
    ended = status = 0
    while ended != child:
        ended, status = os.wait()
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def _run(spec: dict[str, Any]) -> NoReturn:
    """Replaces this process by the program."""
    os.chdir(spec["folder"])
    for name in ("program", "stdin"):
        with open(name, "w", encoding="utf-8", errors="surrogatepass") as file:
            file.write(spec[name])
    os.dup2(os.open("stdin", os.O_RDONLY), 0)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    cpu_s, num_processes = math.ceil(spec["timeout_s"]) + 1, spec["num_processes"]
    for limit, value in (
        *([(resource.RLIMIT_NPROC, num_processes)] if num_processes > 1 else []),
        (resource.RLIMIT_CPU, cpu_s),
        (resource.RLIMIT_AS, spec["memory_bytes"]),
        (resource.RLIMIT_FSIZE, spec["disk_bytes"]),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(limit, (value, value))
    environment = {"PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1"}
    environment |= {"OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    environment |= dict.fromkeys(("HOME", "TMPDIR"), spec["folder"])
    if num_processes == 1:
        _refuse_new_processes()
    os.execve(sys.executable, [sys.executable, "-I", "-B", "-X", "utf8", "program"], environment)


def _first_process(spec: dict[str, Any]) -> NoReturn:
    """Process 1 of the PID namespace: when it ends, the kernel kills all others. Its signals are not the program's."""
    die_with_parent()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    program = os.fork()
    if program == 0:
        try:
            _run(spec)
        except BaseException:
            os.write(1, traceback.format_exc().encode())
            os._exit(_FAILED)
    os._exit(_wait_for(program))


def main() -> None:
    parent = int(sys.argv[1])
    spec = json.load(sys.stdin.buffer)
    if spec.get("probe"):
        folder = os.environ.get("TMPDIR", "/tmp")
        os.write(1, json.dumps(shut_in(folder, 1 << 20)).encode())
        os._exit(0)
    try:
        if spec["num_processes"] == 1 and platform.machine() not in _SYSTEM_CALLS:
            raise RuntimeError(f"num_processes=1: the filter for {platform.machine()} is not known")
        shut_in(spec["folder"], spec["disk_bytes"])
        adopt_orphans()
        die_with_parent(signal.SIGTERM)
        signal.signal(signal.SIGTERM, _end)
        if os.getppid() != parent:
            os._exit(_FAILED)
        first = os.fork()
        if first == 0:
            _first_process(spec)
        os.close(1)  # the end of the output is the end of the program's processes
        exit_code = _wait_for(first)
        kill_children()
        os._exit(exit_code)
    except BaseException:
        traceback.print_exc(file=sys.stdout)
        sys.stdout.flush()
        os._exit(_FAILED)


if __name__ == "__main__":
    main()
