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

Anybody on the host can connect to an abstract socket, and anybody on the network to a TCP port. A connection gets
nowhere, and delays no other, unless its peer is a process of this user or of root (Unix) and its first message, of at
most 64 KiB and within 2 s, holds the pusher's token.
"""

import asyncio
import contextlib
import errno
import json
import os
import queue
import secrets
import select
import socket
import struct
import threading
import time
from collections.abc import Sequence
from typing import Any

from .errors import ChannelError

#: Version of the messages; both sides must have the same.
PROTOCOL = 1

_HEADER = struct.Struct("!I")
_MAX_MESSAGE_BYTES = 256 * 1024 * 1024
_MAX_FDS = 8

#: Limits of a hello and of the connections that have not sent theirs yet.
MAX_HELLO_BYTES = 64 * 1024
HELLO_WAIT_S = 2.0
_MAX_STRANGERS = 256

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
            sent = socket.send_fds(self._sock, [data], list(fds)) if fds else 0
            self._sock.sendall(data[sent:])
        except OSError as error:
            raise ChannelError(f"cannot send {message.get('type')!r}: {_reason(error)}") from error

    def receive(self) -> Message:
        """Wait for one message. Raises ChannelError when the connection is closed, silent or sends something else."""
        size = _HEADER.unpack(self._read(_HEADER.size))[0]
        if size > _MAX_MESSAGE_BYTES:
            raise ChannelError(f"a message of {size} bytes exceeds the limit of {_MAX_MESSAGE_BYTES}")
        return _decode(self._read(size))

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
        """True if the other side has closed the connection, even if messages are still unread."""
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
                data, fds, _, _ = socket.recv_fds(self._sock, min(left, 1 << 20), _MAX_FDS)
            except OSError as error:
                raise ChannelError(f"cannot receive: {_reason(error)}") from error
            self._received_fds += fds
            if not data:
                raise ChannelError("the other side closed the connection")
            parts.append(data)
            left -= len(data)
        return b"".join(parts)


class Listener:
    """The pusher's listening sockets: an abstract Unix socket for this host and, when ``host`` is given, TCP.

    A thread accepts connections and reads their hellos side by side, so that silent ones delay no worker.
    ``local_address`` is the Unix socket's address, which can carry file descriptors; ``address`` is the TCP socket's,
    without ``host`` the Unix socket's.
    """

    def __init__(self, host: str | None = None) -> None:
        self.token = secrets.token_hex(16)
        name = f"plinth-weight-sync-{os.getpid()}-{secrets.token_hex(8)}"
        self._socks = [socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)]
        self._socks[0].bind("\0" + name)
        self.address = self.local_address = f"unix:{name}"
        if host is not None:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            self._socks.append(socket.create_server((host, 0), family=family))
            self.address = f"tcp:{self._socks[1].getsockname()[1]}:{host}"
        for sock in self._socks:
            sock.listen(128)
        self._known: queue.SimpleQueue[tuple[socket.socket, Message]] = queue.SimpleQueue()
        self._wake, self._woken = socket.socketpair()
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="weight_sync_listener", daemon=True)
        self._thread.start()

    def accept(self, wait_s: float, timeout_s: float) -> tuple[Channel, Message] | None:
        """The next connection with the right token, and its hello; None if none arrives within ``wait_s`` seconds.

        Raises ChannelError when the thread that accepts connections has failed.
        """
        try:
            sock, hello = self._known.get(timeout=wait_s)
        except queue.Empty:
            if self._failure is not None:
                raise ChannelError(f"no more workers can connect: {self._failure!r}") from self._failure
            return None
        return Channel(sock, timeout_s), hello

    def close(self) -> None:
        """Stop listening. The servers then accept another pusher. Can be called twice."""
        self._wake.close()
        self._thread.join()
        with contextlib.suppress(queue.Empty):
            while True:
                self._known.get_nowait()[0].close()

    def _run(self) -> None:
        with contextlib.ExitStack() as open_socks:
            for sock in (*self._socks, self._woken):
                open_socks.enter_context(sock)
                sock.setblocking(False)
            try:
                asyncio.run(self._serve())
            except Exception as error:
                self._failure = error

    async def _serve(self) -> None:
        """Until `close`, or until a socket cannot be served; the loop then cancels what is left."""
        strangers: dict[asyncio.Task[None], None] = {}
        served = [self._accept(sock, strangers) for sock in self._socks]
        woken = asyncio.get_running_loop().sock_recv(self._woken, 1)
        done, _ = await asyncio.wait(map(asyncio.ensure_future, (*served, woken)), return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()

    async def _accept(self, listener: socket.socket, strangers: dict[asyncio.Task[None], None]) -> None:
        """Greets each connection of a process of this user in a task of its own."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, _ = await loop.sock_accept(listener)
            except OSError:  # its peer has gone, or no descriptor is left
                await asyncio.sleep(0.01)
                continue
            if not _is_trusted(sock):
                sock.close()
                continue
            if len(strangers) == _MAX_STRANGERS:  # a worker sends its hello at once: the oldest is none
                oldest = next(iter(strangers))
                oldest.cancel()
                del strangers[oldest]
            task = loop.create_task(self._greet(sock))
            strangers[task] = None
            task.add_done_callback(lambda done: strangers.pop(done, None))
            await asyncio.sleep(0)  # an accept that need not wait lets no other task run

    async def _greet(self, sock: socket.socket) -> None:
        hello: Message = {}
        try:
            async with asyncio.timeout(HELLO_WAIT_S):
                size = _HEADER.unpack(await _read_async(sock, _HEADER.size))[0]
                if size <= MAX_HELLO_BYTES:
                    hello = _decode(await _read_async(sock, size))
        except (ChannelError, OSError):
            pass
        finally:
            if self._is_right(hello.get("token")):
                self._known.put((sock, hello))
            else:
                sock.close()

    def _is_right(self, token: object) -> bool:
        return isinstance(token, str) and secrets.compare_digest(token.encode(errors="replace"), self.token.encode())


def connect(address: str, timeout_s: float) -> Channel:
    """Connect to a Listener's ``address``. Raises ChannelError when it cannot be reached."""
    kind, _, rest = address.partition(":")
    sock: socket.socket | None = None
    try:
        if kind == "unix":
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            sock.settimeout(timeout_s)
            deadline = time.monotonic() + timeout_s
            while (code := sock.connect_ex("\0" + rest)) == errno.EAGAIN and time.monotonic() < deadline:
                time.sleep(0.01)  # too many connections wait to be accepted
            if code:
                raise OSError(code, os.strerror(code))
            if not _is_trusted(sock):
                raise OSError("its process belongs to another user")
        else:
            port, _, host = rest.partition(":")
            sock = socket.create_connection((host, int(port)), timeout=timeout_s)
    except (OSError, ValueError) as error:
        if sock is not None:
            sock.close()
        raise ChannelError(f"cannot reach the pusher at {address}: {_reason(error)}") from error
    return Channel(sock, timeout_s)


def _is_trusted(sock: socket.socket) -> bool:
    """True if the peer's process is of this user or of root. True for TCP, where only the token tells."""
    if sock.family != socket.AF_UNIX:
        return True
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return struct.unpack("3i", credentials)[1] in (os.getuid(), 0)


async def _read_async(sock: socket.socket, size: int) -> bytearray:
    received = bytearray()
    while len(received) < size:
        data = await asyncio.get_running_loop().sock_recv(sock, size - len(received))
        if not data:
            raise ChannelError("the other side closed the connection")
        received += data
    return received


def _decode(body: bytes | bytearray) -> Message:
    try:
        message = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ChannelError(f"received a message that is not JSON: {type(error).__name__}") from error
    if not isinstance(message, dict):
        raise ChannelError("received a message that is not a JSON object")
    return message


def _reason(error: Exception) -> str:
    return "timed out" if isinstance(error, TimeoutError) else getattr(error, "strerror", None) or str(error)
