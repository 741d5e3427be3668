"""A process that shuts itself in; skipped where the kernel denies namespaces."""

import subprocess
import sys
from pathlib import Path

import pytest

CODE = """
import ctypes, os, socket, sys
from plinth_base.namespaces import drop_rights, shut_in
folder, outside = sys.argv[1:]
listener = socket.socket(socket.AF_UNIX)
listener.bind(f"{outside}/unix")
listener.listen()
print(shut_in(folder, 1 << 20))
drop_rights()

def reaches(act):
    try:
        act()
    except OSError:
        return False
    return True

writable = ctypes.c_ulong(0x20)  # MS_REMOUNT without MS_RDONLY
mounts = ctypes.CDLL(None).mount(b"none", outside.encode(), None, writable, None) == 0
writes = [reaches(lambda: open(f"{place}/file", "w")) for place in (folder, outside)]
print(writes, mounts, reaches(lambda: socket.create_connection(("127.0.0.1", 9))))
left = {
    "unix": lambda: socket.socket(socket.AF_UNIX).connect(f"{outside}/unix"),
    "vsock": lambda: socket.socket(socket.AF_VSOCK),
    "datagrams": lambda: socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM),
    "pairs": socket.socketpair,
    "internet": lambda: [socket.socket(family) for family in (socket.AF_INET, socket.AF_INET6)],
    "names": lambda: socket.getaddrinfo("127.0.0.1", 80),
    "packets in order": lambda: socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET),
}
print([name for name, act in left.items() if reaches(act)])
rings = ctypes.CDLL(None, use_errno=True).syscall(425, 1, ctypes.create_string_buffer(120))
print(rings, os.strerror(ctypes.get_errno()))
"""


def test_a_process_that_is_shut_in_writes_its_folder_alone_and_cannot_undo_it(tmp_path: Path) -> None:
    inside, outside = tmp_path / "inside", tmp_path / "outside"
    inside.mkdir()
    outside.mkdir()
    command = [sys.executable, "-c", CODE, str(inside), str(outside)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    reached, *rest = done.stdout.splitlines()
    if "False" in reached:
        pytest.skip("the kernel denies namespaces")
    sockets = "['pairs', 'internet', 'names', 'packets in order']"
    assert rest == ["[True, False] False False", sockets, "-1 Function not implemented"], done.stderr
    assert [*inside.iterdir(), *outside.iterdir()] == [outside / "unix"], "what it has written is gone with it"
