"""Shuts the process of an episode in: it reaches the policy, and no other network, process, secret or file to write."""

import fcntl
import os
import resource
import socket
import struct
from pathlib import Path

from plinth_base.namespaces import die_with_parent, drop_rights, shut_in

from .processes import end_like

_DISK_BYTES = 256 << 20
_KEPT_VARIABLES = ("LANG", "LD_LIBRARY_PATH", "OMP_NUM_THREADS", "PATH", "PYTHONPATH", "VIRTUAL_ENV")
_SIOCSIFFLAGS, _IFF_UP = 0x8914, 0x1


def enter(pipe: socket.socket, folder: str) -> None:
    """Returns in a new process that is shut in; the calling one waits for its end, and ends in the same way.

    A socket that listens in there is sent through the pipe, so that the caller's HTTP server can answer requests. The
    process works in `folder`, in memory. Raises OSError where the kernel denies namespaces.
    """
    for name in os.environ.keys() - {*_KEPT_VARIABLES}:
        del os.environ[name]
    closed = shut_in(folder, _DISK_BYTES)
    if not all(closed.values()):
        pipe.send(b"-")
        opened = ", ".join(kind for kind, is_closed in closed.items() if not is_closed)
        raise OSError(f"episode.isolated: the kernel denies namespaces, so the process reaches {opened}")
    with socket.socket() as control:
        fcntl.ioctl(control, _SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", _IFF_UP))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        socket.send_fds(pipe, [b"+"], [listener.fileno()])
    if child := os.fork():
        pipe.close()
        end_like(os.waitpid(child, 0)[1])
    die_with_parent()
    os.chdir(folder)
    os.environ.update(HOME=folder, TMPDIR=folder)
    drop_rights()


def receive_listener(pipe: socket.socket, timeout_s: float) -> socket.socket | None:
    """The socket that listens in a process that has called `enter`; None if it could not."""
    pipe.settimeout(timeout_s)
    _, descriptors, _, _ = socket.recv_fds(pipe, 1, 1)
    pipe.setblocking(False)
    return socket.socket(fileno=descriptors[0]) if descriptors else None


def limit_memory(num_bytes: int) -> None:
    """Limits the address space that this process adds to what it has, and that of each process that it starts."""
    has_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (has_bytes + num_bytes, has_bytes + num_bytes))
