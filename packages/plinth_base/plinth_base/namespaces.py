"""Namespaces of Linux, in which a process reaches neither network nor other processes, and files only to read.

Standard library only, and no import of this package: `rl_data`'s sandbox loads this file alone.
"""

import ctypes
import errno
import os
import platform
import signal
import struct
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

_INSIDE_ID = 1000
"""User and group inside the namespace. Not 0, so that a program has no capabilities after exec."""
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_SECCOMP, _PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 1, 4, 22, 36, 38
_CAPABILITY_VERSION = 0x20080522
_NEWNS, _NEWIPC, _NEWUSER, _NEWPID, _NEWNET = 0x00020000, 0x08000000, 0x10000000, 0x20000000, 0x40000000
_MS_NOSUID, _MS_NODEV, _MS_REC, _MS_PRIVATE = 0x2, 0x4, 0x4000, 0x40000
_SYS_MOUNT_SETATTR, _AT_FDCWD, _AT_RECURSIVE, _ATTR_RDONLY = 442, -100, 0x8000, 0x1
_SYS_IO_URING_SETUP, _AF_INET, _AF_INET6, _AF_NETLINK, _SOCK_STREAM, _SOCK_SEQPACKET = 425, 2, 10, 16, 1, 5
LOAD, EQUAL, AT_LEAST, HAS_BITS, AND, ANSWER = 0x20, 0x15, 0x35, 0x45, 0x54, 0x06
ALLOW, KILL, REFUSE = 0x7FFF0000, 0x80000000, 0x00050000
"""Operations of a filter, and its answers; that to refuse takes an error number."""
_MACHINES = {"x86_64": (0xC000003E, 41, 53), "aarch64": (0xC00000B7, 198, 199)}
"""Machine -> (AUDIT_ARCH, number of socket, number of socketpair)."""

_libc = ctypes.CDLL(None, use_errno=True)


def _call(name: str, *arguments: Any) -> None:
    if getattr(_libc, name)(*arguments) == -1:
        raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")


def prctl(option: int, value: int, argument: Any = 0) -> None:
    """prctl(2). Raises OSError."""
    _call("prctl", option, ctypes.c_ulong(value), argument, 0, 0)


def die_with_parent(number: int = signal.SIGKILL) -> None:
    """Makes the kernel send this process a signal when its parent ends. Raises OSError."""
    prctl(_PR_SET_PDEATHSIG, number)


def end_with(parent: int) -> None:
    """Makes the kernel kill this process when its parent, `parent`, ends, which may have happened. Raises OSError."""
    die_with_parent()
    if os.getppid() != parent:
        os._exit(1)


def end_forks_with_parent() -> None:
    """Makes every process that this one and its forks fork end with its parent.

    Forks of other threads than the main one are left alone: to the kernel, a parent ends with the forking thread.
    """
    import threading  # the sandbox loads this module for each program

    forking: list[int] = []

    def before() -> None:
        forking[:] = [os.getpid()] if threading.current_thread() is threading.main_thread() else []

    def in_child() -> None:
        if forking:
            end_with(forking[0])

    os.register_at_fork(before=before, after_in_child=in_child)


def adopt_orphans() -> None:
    """Makes this process the parent of those below it whose parent ends. Raises OSError."""
    prctl(_PR_SET_CHILD_SUBREAPER, 1)


def filter_system_calls(rules: Sequence[tuple[int, int, int, int]]) -> None:
    """Answers system calls of this process, and of those that it starts, by BPF rules that begin with a call's number.

    Calls of other architectures end the process; those of none of the rules are allowed. Raises OSError.
    """
    if platform.machine() not in _MACHINES:
        raise OSError(errno.ENOSYS, f"the filter for {platform.machine()} is not known")
    whole = [
        (LOAD, 0, 0, 4),  # the architecture of the call
        (EQUAL, 1, 0, _MACHINES[platform.machine()][0]),
        (ANSWER, 0, 0, KILL),
        (LOAD, 0, 0, 0),  # its number
        (AT_LEAST, 0, 1, 1 << 30),  # x32's numbers
        (ANSWER, 0, 0, REFUSE | errno.ENOSYS),
        *rules,
        (ANSWER, 0, 0, ALLOW),
    ]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *rule) for rule in whole))
    prctl(_PR_SET_SECCOMP, 2, ctypes.c_char_p(struct.pack("HxxxxxxP", len(whole), ctypes.addressof(code))))


def _refuse_sockets() -> bool:
    """Leaves the sockets that a network namespace holds, and pairs that cannot connect to anything else.

    It does not hold Unix sockets of the file system, which can be connected to although files are read-only, nor vsock.
    io_uring would open sockets past a filter.
    """
    _, socket, pair = _MACHINES.get(platform.machine(), (0, 0, 0))
    refuse = (ANSWER, 0, 0, REFUSE | errno.EACCES)
    rules = [
        (EQUAL, 0, 1, _SYS_IO_URING_SETUP),
        (ANSWER, 0, 0, REFUSE | errno.ENOSYS),
        (EQUAL, 0, 6, socket),
        (LOAD, 0, 0, 16),  # the family
        (EQUAL, 3, 0, _AF_INET),
        (EQUAL, 2, 0, _AF_INET6),
        (EQUAL, 1, 0, _AF_NETLINK),
        refuse,
        (ANSWER, 0, 0, ALLOW),
        (EQUAL, 0, 5, pair),
        (LOAD, 0, 0, 24),  # the type, with flags
        (AND, 0, 0, 0xF),
        (EQUAL, 2, 0, _SOCK_STREAM),
        (EQUAL, 1, 0, _SOCK_SEQPACKET),
        refuse,
    ]
    try:
        filter_system_calls(rules)
    except OSError:
        return False
    return True


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


def shut_in(folder: str, disk_bytes: int) -> dict[str, bool]:
    """Shuts this process in, as far as the kernel allows; returns the kinds of things that it cannot reach.

    Namespaces of user, network, mounts and IPC, and of processes for its children, and no Unix sockets but pairs.
    `folder` becomes a file system in memory, the only one that it can write. The process must have one thread, and
    cannot leave.
    """
    prctl(_PR_SET_NO_NEW_PRIVS, 1)
    entered = _enter_namespaces()
    files = entered and _make_files_read_only(folder, disk_bytes)
    return {"network": entered and _refuse_sockets(), "files": files, "processes": entered}


def drop_rights() -> None:
    """Gives up what a process has in its namespaces, so that it cannot undo them, and hides its memory and environment
    from processes that it starts. What `exec` starts has no rights anyway."""
    header, none = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0), (ctypes.c_uint32 * 6)()
    _call("capset", header, none)
    prctl(_PR_SET_DUMPABLE, 0)


def kill_children() -> None:
    """Kills the children of this process until there is none: a subreaper gets those of a child that has ended."""
    while _has_children() and (children := list(filter(_is_child, map(int, filter(str.isdigit, os.listdir("/proc")))))):
        for pid in children:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)


def _has_children() -> bool:
    """True if a child of this process runs, or has ended and was not waited for. Cheaper than reading /proc."""
    with suppress(ChildProcessError):
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        return True
    return False


def _is_child(pid: int) -> bool:
    with suppress(OSError), open(f"/proc/{pid}/stat") as file:
        return int(file.read().rpartition(")")[2].split()[1]) == os.getpid()
    return False
