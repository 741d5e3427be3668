"""Messages between the pusher and the workers inside the servers: length-prefixed JSON over a socket, plus file
descriptors over Unix sockets. Nothing is pickled.

The pusher listens; each worker of each server connects while its server executes ``/update_weights``. The messages of
one push, in order:

    worker -> pusher   hello    (token, server, worker rank, buffers that are still mapped)
    pusher -> worker   plan     (digest; the layout if the worker does not know it; how to attach to the transport)
    worker -> pusher   ready    (digest recomputed, every name and shape checked against the model)
    pusher -> worker   bucket k (checksum)      at most two are unanswered
    worker -> pusher   taken k  (checksum verified, loaded)
    pusher -> worker   end      (number of tensors)
    worker -> pusher   done     (every tensor counted, layers processed)

Either side may send ``error`` or ``abort`` at any point. A closed socket means that the other side died.
"""

import array
import contextlib
import json
import os
import secrets
import select
import socket
import struct
from collections.abc import Sequence
from typing import Any

from .errors import ChannelError

#: Version of the messages; both sides must have the same.
PROTOCOL = 1

_HEADER = struct.Struct("!I")
_MAX_MESSAGE_BYTES = 256 * 1024 * 1024
_MAX_FDS = 8

Message = dict[str, Any]


class Channel:
    """One blocking connection with a time limit on every call."""

    def __init__(self, sock: socket.socket, timeout_s: float) -> None:
        sock.settimeout(timeout_s)
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sock = sock
        self._received_fds: list[int] = []

    def set_timeout(self, timeout_s: float) -> None:
        """Change the time limit of every later call."""
        self._sock.settimeout(timeout_s)

    def fileno(self) -> int:
        """The socket's descriptor, for selectors."""
        return self._sock.fileno()

    def send(self, message: Message, fds: Sequence[int] = ()) -> None:
        """Send one message and, over a Unix socket, file descriptors. Raises ChannelError."""
        body = json.dumps(message, separators=(",", ":")).encode()
        data = _HEADER.pack(len(body)) + body
        try:
            sent = 0
            if fds:
                rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))]
                sent = self._sock.sendmsg([data], rights)
            self._sock.sendall(data[sent:])
        except OSError as error:
            raise ChannelError(f"cannot send {message.get('type')!r}: {_reason(error)}") from error

    def receive(self) -> Message:
        """Wait for one message. Raises ChannelError when the connection is closed, silent or sends something else."""
        size = _HEADER.unpack(self._read(_HEADER.size))[0]
        if size > _MAX_MESSAGE_BYTES:
            raise ChannelError(f"a message of {size} bytes exceeds the limit of {_MAX_MESSAGE_BYTES}")
        message = json.loads(self._read(size))
        if not isinstance(message, dict):
            raise ChannelError("received a message that is not a JSON object")
        return message

    def take_fds(self) -> list[int]:
        """File descriptors received so far. The caller owns them and must close them."""
        fds, self._received_fds = self._received_fds, []
        return fds

    def send_bytes(self, view: memoryview) -> None:
        """Send raw bytes; the receiver must know their number. Raises ChannelError."""
        try:
            self._sock.sendall(view)
        except OSError as error:
            raise ChannelError(f"cannot send a bucket: {_reason(error)}") from error

    def receive_bytes_into(self, view: memoryview) -> None:
        """Fill ``view`` with raw bytes. Raises ChannelError."""
        done = 0
        while done < len(view):
            try:
                count = self._sock.recv_into(view[done:])
            except OSError as error:
                raise ChannelError(f"cannot receive a bucket: {_reason(error)}") from error
            if count == 0:
                raise ChannelError("the other side closed the connection during a bucket")
            done += count

    def is_hung_up(self) -> bool:
        """Whether the other side has closed the connection, even if messages are still unread."""
        poll = select.poll()
        poll.register(self._sock, select.POLLRDHUP | select.POLLHUP | select.POLLERR)
        return bool(poll.poll(0))

    def linger(self, wait_s: float = 5.0) -> None:
        """Read and discard until the other side closes, so that it can still read our last message.

        Closing a TCP socket with unread bytes resets the connection and would discard that message.
        """
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_WR)
            self._sock.settimeout(wait_s)
            while self._sock.recv(1 << 20):
                pass

    def close(self) -> None:
        """Close the connection and the received descriptors that were not taken."""
        for fd in self.take_fds():
            os.close(fd)
        with contextlib.suppress(OSError):
            self._sock.close()

    def _read(self, size: int) -> bytes:
        parts: list[bytes] = []
        left = size
        while left:
            try:
                data, ancillary, _, _ = self._sock.recvmsg(min(left, 1 << 20), socket.CMSG_SPACE(_MAX_FDS * 4))
            except OSError as error:
                raise ChannelError(f"cannot receive: {_reason(error)}") from error
            for level, kind, payload in ancillary:
                if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                    fds = array.array("i")
                    fds.frombytes(payload[: len(payload) - len(payload) % fds.itemsize])
                    self._received_fds.extend(fds)
            if not data:
                raise ChannelError("the other side closed the connection")
            parts.append(data)
            left -= len(data)
        return b"".join(parts)


class Listener:
    """The pusher's listening socket: an abstract Unix socket (same host), or TCP when ``host`` is given."""

    def __init__(self, host: str | None = None) -> None:
        self.token = secrets.token_hex(16)
        if host is None:
            name = f"plinth-weight-sync-{os.getpid()}-{secrets.token_hex(8)}"
            self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self._sock.bind("\0" + name)
            self.address = f"unix:{name}"
        else:
            self._sock = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
            self.address = f"tcp:{self._sock.getsockname()[1]}:{host}"
        self._sock.listen(128)

    def accept(self, wait_s: float, timeout_s: float) -> Channel | None:
        """The next connection, or None if none arrives within ``wait_s`` seconds."""
        self._sock.settimeout(wait_s)
        try:
            sock, _ = self._sock.accept()
        except TimeoutError:
            return None
        return Channel(sock, timeout_s)

    def close(self) -> None:
        """Stop listening. The servers then accept another pusher."""
        self._sock.close()


def connect(address: str, timeout_s: float) -> Channel:
    """Connect to a Listener's ``address``. Raises ChannelError when it cannot be reached."""
    kind, _, rest = address.partition(":")
    sock: socket.socket | None = None
    try:
        if kind == "unix":
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            sock.settimeout(timeout_s)
            sock.connect("\0" + rest)
        else:
            port, _, host = rest.partition(":")
            sock = socket.create_connection((host, int(port)), timeout=timeout_s)
    except OSError as error:
        if sock is not None:
            sock.close()
        raise ChannelError(f"cannot reach the pusher at {address}: {_reason(error)}") from error
    return Channel(sock, timeout_s)


def _reason(error: OSError) -> str:
    return "timed out" if isinstance(error, TimeoutError) else (error.strerror or str(error))
