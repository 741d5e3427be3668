"""Shuts one Python program in and ends its whole process tree. Run as a script by `sandbox`; standard library only.

It reads a JSON object from standard input. Namespaces (user, network, PID, mount, IPC) are entered as far as the kernel
allows; then the file system is read-only but for a temporary folder in memory. A seccomp filter refuses new processes,
since RLIMIT_NPROC does not hold for root and counts all processes of other users.
"""

import ctypes
import errno
import json
import math
import os
import platform
import resource
import signal
import struct
import sys
import traceback
from typing import Any, NoReturn

_FAILED = 199
_INSIDE_ID = 1000
"""User and group inside the namespace. Not 0, so that the program has no capabilities after exec."""
_PR_SET_PDEATHSIG, _PR_SET_SECCOMP, _PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 1, 22, 36, 38
_NEWNS, _NEWIPC, _NEWUSER, _NEWPID, _NEWNET = 0x00020000, 0x08000000, 0x10000000, 0x20000000, 0x40000000
_MS_NOSUID, _MS_NODEV, _MS_REC, _MS_PRIVATE = 0x2, 0x4, 0x4000, 0x40000
_SYS_MOUNT_SETATTR, _AT_FDCWD, _AT_RECURSIVE, _ATTR_RDONLY = 442, -100, 0x8000, 0x1

_CLONE_THREAD, _SYS_CLONE3 = 0x00010000, 435
_SYSTEM_CALLS = {"x86_64": (0xC000003E, 56, (57, 58)), "aarch64": (0xC00000B7, 220, ())}
"""Machine -> (AUDIT_ARCH, number of clone, numbers of fork and vfork)."""

_libc = ctypes.CDLL(None, use_errno=True)


def _call(name: str, *arguments: Any) -> None:
    if getattr(_libc, name)(*arguments) == -1:
        raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")


def _prctl(option: int, value: int, argument: Any = 0) -> None:
    _call("prctl", option, ctypes.c_ulong(value), argument, 0, 0)


def _enter_namespaces() -> bool:
    user, group = os.geteuid(), os.getegid()
    try:
        _call("unshare", _NEWUSER | _NEWNS | _NEWNET | _NEWPID | _NEWIPC)
    except OSError:
        return False
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{_INSIDE_ID} {user} 1"),
        ("gid_map", f"{_INSIDE_ID} {group} 1"),
    ):
        try:
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
        except OSError:  # without a map the namespaces still hold, and mounts fail
            break
    return True


def _make_files_read_only(folder: str, disk_bytes: int) -> bool:
    """A file system in memory at `folder`; everything else read-only."""
    try:
        _call("mount", b"none", b"/", None, ctypes.c_ulong(_MS_REC | _MS_PRIVATE), None)
        options = f"size={disk_bytes},mode=0700".encode()
        flags = ctypes.c_ulong(_MS_NOSUID | _MS_NODEV)
        _call("mount", b"tmpfs", folder.encode(), b"tmpfs", flags, options)
        _set_read_only(b"/", _AT_RECURSIVE, read_only=True)
        _set_read_only(folder.encode(), 0, read_only=False)
    except OSError:
        return False
    return True


def _set_read_only(path: bytes, flags: int, *, read_only: bool) -> None:
    """`struct mount_attr`: attributes to set, to clear, propagation, user namespace."""
    change = (_ATTR_RDONLY, 0) if read_only else (0, _ATTR_RDONLY)
    attributes = (ctypes.c_uint64 * 4)(*change, 0, 0)
    size = ctypes.c_size_t(ctypes.sizeof(attributes))
    _call("syscall", ctypes.c_long(_SYS_MOUNT_SETATTR), _AT_FDCWD, path, flags, ctypes.byref(attributes), size)


def _shut_in(folder: str, disk_bytes: int) -> dict[str, bool]:
    """Shuts this process in; returns the kinds of things that the program cannot reach."""
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    entered = _enter_namespaces()
    files = entered and _make_files_read_only(folder, disk_bytes)
    return {"network": entered, "files": files, "processes": entered}


def _refuse_new_processes() -> None:
    """A seccomp filter under which this process can start threads and no processes (EPERM).

    clone3 is answered by ENOSYS, because a filter cannot read its flags; C libraries then use clone.
    """
    arch, clone, forks = _SYSTEM_CALLS[platform.machine()]
    load, equal, has_bits, answer = 0x20, 0x15, 0x45, 0x06
    allow, kill, refuse = 0x7FFF0000, 0x80000000, 0x00050000
    rules = [
        (load, 0, 0, 4),  # the architecture of the call
        (equal, 1, 0, arch),
        (answer, 0, 0, kill),
        (load, 0, 0, 0),  # its number
        (equal, 0, 1, _SYS_CLONE3),
        (answer, 0, 0, refuse | errno.ENOSYS),
    ]
    for fork in forks:
        rules += [(equal, 0, 1, fork), (answer, 0, 0, refuse | errno.EPERM)]
    rules += [
        (equal, 0, 3, clone),
        (load, 0, 0, 16),  # the flags of clone
        (has_bits, 1, 0, _CLONE_THREAD),
        (answer, 0, 0, refuse | errno.EPERM),
        (answer, 0, 0, allow),
    ]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *rule) for rule in rules))
    program = struct.pack("HxxxxxxP", len(rules), ctypes.addressof(code))
    _prctl(_PR_SET_SECCOMP, 2, ctypes.c_char_p(program))


def _kill_descendants() -> None:
    """Kills the children of this process until there is none: a subreaper gets those of a child that has ended."""
    while children := [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if _is_child(pid)]:
        for pid in children:
            os.kill(pid, signal.SIGKILL)
        for pid in children:
            os.waitpid(pid, 0)


def _end(*_: object) -> NoReturn:
    _kill_descendants()
    os._exit(128 + signal.SIGTERM)


def _is_child(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return int(file.read().rpartition(")")[2].split()[1]) == os.getpid()
    except OSError:
        return False


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
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
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
        os.write(1, json.dumps(_shut_in(folder, 1 << 20)).encode())
        os._exit(0)
    try:
        if spec["num_processes"] == 1 and platform.machine() not in _SYSTEM_CALLS:
            raise RuntimeError(f"num_processes=1: the filter for {platform.machine()} is not known")
        _shut_in(spec["folder"], spec["disk_bytes"])
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
        _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        signal.signal(signal.SIGTERM, _end)
        if os.getppid() != parent:
            os._exit(_FAILED)
        first = os.fork()
        if first == 0:
            _first_process(spec)
        os.close(1)  # the end of the output is the end of the program's processes
        exit_code = _wait_for(first)
        _kill_descendants()
        os._exit(exit_code)
    except BaseException:
        traceback.print_exc(file=sys.stdout)
        sys.stdout.flush()
        os._exit(_FAILED)


if __name__ == "__main__":
    main()
