"""One server as a process tree: start, readiness check by generating a token, stop. Standard library only."""

import errno
import math
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from plinth_base import Endpoint

from ..errors import RolloutConfigError, ServerStartError
from ._supervise import OWNER, started
from .command import describe_environment
from .diagnose import diagnose, engine_core_failed
from .existing import try_generation
from .spawn import LeftProcess, end_server, server_command, socket_folder, spawn_server, take_prepared, with_sockets

_MAX_LOG_BYTES = 4 << 20  # how much of the log is read for a diagnosis
_POLL_S = 0.1
_LOOK_S = 1.0  # between two looks at the log of a server that starts
_EXIT_GRACE_S = 15.0  # for a server to exit after its engine core has failed


class Server(Protocol):
    """A server of a `ServerGroup`, on this host (`ServerProcess`) or on a Ray node (`RayServer`)."""

    index: int
    endpoint: Endpoint
    log_path: Path

    @property
    def alive(self) -> bool: ...

    def start(self) -> None: ...
    def wait_ready(self, deadline: float) -> None: ...
    def reason(self) -> str: ...
    def ask_to_stop(self) -> None: ...
    def stop(self) -> None: ...
    def release_port(self) -> None: ...


class ServerProcess:
    """A vLLM server under a supervisor process (`_supervise.py`).

    The supervisor leads its own session and process group: a Ctrl-C at the terminal reaches only the launcher, and
    signals can be sent to the whole tree.
    """

    def __init__(
        self,
        index: int,
        endpoint: Endpoint,
        arguments: Sequence[str],
        env: Mapping[str, str],
        log_path: Path,
        reservation: socket.socket | None = None,
        *,
        stop_grace_s: float = 5.0,
    ) -> None:
        self.index = index
        self.endpoint = endpoint
        self.log_path = log_path
        self._arguments = list(arguments)
        self._env = dict(env)
        self._reservation = reservation
        self._stop_grace_s = stop_grace_s
        self._process: subprocess.Popen[bytes] | LeftProcess | None = None
        self._sockets = ""
        self._log_start = 0
        self._handed_over_at: int | None = None
        """Size of the log when a prepared process became this server."""
        self._owner_pid = os.getpid()
        self._stopped = False

    def leave_to(self, owner: int) -> None:
        """Give the server to process `owner`, with whose end it ends from now on; a pickled copy there controls it."""
        Path(self._sockets, OWNER).write_text(f"{owner} {started(owner)}")
        self._owner_pid = owner

    def __getstate__(self) -> dict[str, Any]:
        process = None if self._process is None else LeftProcess(self._process.pid, started(self._process.pid))
        return vars(self) | {"_process": process, "_reservation": None}

    @property
    def pid(self) -> int | None:
        """Process id of the supervisor, which is also the id of its process group."""
        return self._process.pid if self._process else None

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start the server in the background, or start it again after `stop`, with the same port and log file."""
        assert not self.alive, "already running"
        prepared = take_prepared(self._env, self._stop_grace_s)
        self._sockets = prepared.sockets if prepared else socket_folder(self._env.get("VLLM_RPC_BASE_PATH"))
        env = with_sockets(self._env, self._sockets)
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        with self.log_path.open("ab") as log:
            self._log_start = log.tell()
            began = time.strftime("%m-%d %H:%M:%S")  # as vLLM writes it
            command = " ".join(server_command(self._arguments))
            log.write(f"command: {command}\nstarted at {began}\n{describe_environment(env)}\n\n".encode())
            log.flush()
            self._handed_over_at = log.tell() if prepared else None
            self._process = (
                prepared.hand_over(self._arguments, env, self.log_path.absolute())
                if prepared
                else spawn_server(
                    self._arguments, env, grace_s=self._stop_grace_s, stdin=subprocess.DEVNULL, output=log
                )
            )
        self._stopped = False

    def log_text(self) -> str:
        """The output since the last start, at most its last megabytes."""
        try:
            with self.log_path.open("rb") as log:
                size = log.seek(0, os.SEEK_END)
                log.seek(max(self._log_start, size - _MAX_LOG_BYTES))
                return log.read().decode("utf-8", "replace")
        except OSError:
            return ""

    def reason(self) -> str:
        """One line that says why the server is not running or not answering."""
        status = self._process.poll() if self._process else None
        if self._stopped:
            return "it was stopped"
        return diagnose(self.log_text(), status)

    def wait_ready(self, deadline: float) -> None:
        """Block until the server has generated a token. deadline: time.monotonic().

        Raises ServerStartError. A server that does not exit although its engine core failed is stopped first.
        """
        next_look, give_up = 0.0, math.inf
        while True:
            if not self.alive and self._was_not_taken_over():
                self.start()
            if not self.alive:
                raise ServerStartError(self.reason(), self.index, self.log_path)
            now = time.monotonic()
            if now >= give_up:
                self.stop()  # before the diagnosis: what the workers write when they end may name the cause
                reason = f"{diagnose(self.log_text(), None)}; it did not exit after its engine core failed"
                raise ServerStartError(reason, self.index, self.log_path)
            if now >= next_look:
                next_look = now + _LOOK_S
                if engine_core_failed(self.log_text()):
                    give_up = min(give_up, now + _EXIT_GRACE_S)
            left = deadline - now
            if left <= 0:
                reason = f"not ready in time; last known: {self.reason()}"
                raise ServerStartError(reason, self.index, self.log_path)
            problem = try_generation(self.endpoint, timeout_s=left)
            if problem is None:
                return
            if problem.startswith("HTTP 4"):  # it rejects the request: waiting does not help
                raise ServerStartError(problem, self.index, self.log_path)
            time.sleep(_POLL_S)

    def _was_not_taken_over(self) -> bool:
        """True if a prepared process ended before it had the settings of this server."""
        if self._stopped or self._handed_over_at is None:
            return False
        return self.log_path.stat().st_size == self._handed_over_at

    def ask_to_stop(self) -> None:
        """Start stopping the server; does not wait."""
        if self._process is not None and os.getpid() == self._owner_pid and not self._stopped:
            self._stopped = True
            with suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGTERM)

    def stop(self) -> None:
        """Stop the process tree and wait until it is gone. Idempotent; does nothing in a forked child."""
        if self._process is None or os.getpid() != self._owner_pid:
            return
        self.ask_to_stop()
        end_server(self._process, self._stop_grace_s)
        shutil.rmtree(self._sockets, ignore_errors=True)  # a supervisor that was killed left it

    def release_port(self) -> None:
        if self._reservation is not None:
            self._reservation.close()
            self._reservation = None


def reserve_port(host: str, port: int | None) -> socket.socket:
    """Reserve a port (None: a free one) with a socket that is bound but does not listen.

    The kernel never assigns a bound port to a process that requests any free port, and vLLM can still bind it: on Linux
    two sockets with SO_REUSEADDR share an address while neither listens. Keep the socket until the server has stopped.

    Raises RolloutConfigError for a port in use (`field` port) and a host that is no address of this machine.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        if port is not None:  # another reservation is detected only by listening
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind((host, port))
                probe.listen(1)
        held = socket.socket(family, socket.SOCK_STREAM)
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind((host, port or 0))
    except (OSError, UnicodeError) as error:
        if isinstance(error, (socket.gaierror, UnicodeError)) or error.errno == errno.EADDRNOTAVAIL:
            allowed = "the address of a network interface of this machine"
            raise RolloutConfigError(str(error), field="host", value=host, allowed=allowed) from None
        raise RolloutConfigError(
            f"{error.strerror or error} (on {host})",
            field="port",
            value=port,
            remedy="choose another port, or unset port to use a free one",
        ) from None
    return held
