"""One server as a process tree: start, poll, readiness by a real generation, stop. Standard library only."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

from ..errors import ServerDiedError, ServerStartError
from ..samples import Endpoint
from .command import describe_environment
from .diagnose import diagnose

_HERE = Path(__file__).resolve().parent
_MAX_LOG_BYTES = 4 << 20  # of the log, read for a diagnosis
_POLL_S = 0.1


def call(
    endpoint: Endpoint, method: str, path: str, body: object | None = None, *, timeout_s: float = 30.0
) -> tuple[int, str]:
    """One blocking HTTP call: (status, text). Raises OSError or http.client.HTTPException when there is no answer."""
    parts = urlsplit(endpoint.url)
    connection_class = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    assert parts.hostname is not None, endpoint.url
    connection = connection_class(parts.hostname, parts.port, timeout=timeout_s)
    headers = {"Connection": "close"}
    if endpoint.api_key:
        headers["Authorization"] = f"Bearer {endpoint.api_key}"
    payload = None
    if body is not None:
        payload = json.dumps(body)
        headers["Content-Type"] = "application/json"
    try:
        connection.request(method, parts.path.rstrip("/") + path, payload, headers)
        response = connection.getresponse()
        return response.status, response.read().decode("utf-8", "replace")
    finally:
        connection.close()


def try_generation(endpoint: Endpoint, *, timeout_s: float) -> str | None:
    """Generate one token for real. None: it worked; else what went wrong, in a few words."""
    body = {"prompt": [1, 2], "max_tokens": 1, "temperature": 1.0, "seed": 0, "n": 1, "logprobs": 0}
    if endpoint.model is not None:
        body["model"] = endpoint.model
    try:
        status, text = call(endpoint, "POST", "/v1/completions", body, timeout_s=timeout_s)
    except (OSError, http.client.HTTPException) as error:
        return f"{type(error).__name__}: {error}"
    return None if status == 200 else f"HTTP {status}: {text[:200]}"


class Server(Protocol):
    """A server that we started, here or elsewhere: what `ServerGroup` and `ServerWatch` need of it."""

    @property
    def index(self) -> int: ...
    @property
    def endpoint(self) -> Endpoint: ...
    @property
    def log_path(self) -> Path: ...
    @property
    def alive(self) -> bool: ...

    def start(self) -> None: ...
    def wait_ready(self, deadline: float) -> None: ...
    def reason(self) -> str: ...
    def check(self) -> None: ...
    def ask_to_stop(self) -> None: ...
    def stop(self) -> None: ...
    def release_port(self) -> None: ...


class ServerProcess:
    """A vLLM server under its supervisor.

    The supervisor leads a session and a process group of its own, so a Ctrl-C at the terminal reaches the launcher
    alone and the whole tree can be addressed as one.
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
        self._process: subprocess.Popen[bytes] | None = None
        self._log_start = 0
        self._owner_pid = os.getpid()
        self._stopped = False

    @property
    def pid(self) -> int | None:
        """The supervisor's process id, which is the process group's too."""
        return self._process.pid if self._process else None

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start it and return at once. Also starts a dead one again, on the same port, into the same log."""
        assert not self.alive, "already running"
        supervisor = [
            sys.executable,
            "-S",
            "-E",
            str(_HERE / "_supervise.py"),
            str(os.getpid()),
            str(self._stop_grace_s),
        ]
        server = [sys.executable, "-P", str(_HERE / "_serve.py"), *self._arguments]
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        with self.log_path.open("ab") as log:
            self._log_start = log.tell()
            head = f"command: {' '.join(server)}\n{describe_environment(self._env)}\n\n"
            log.write(head.encode())
            log.flush()
            self._process = subprocess.Popen(
                [*supervisor, *server],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._env,
                start_new_session=True,
            )
        self._stopped = False

    def log_text(self) -> str:
        """This run's output, its last megabytes."""
        try:
            with self.log_path.open("rb") as log:
                size = log.seek(0, os.SEEK_END)
                log.seek(max(self._log_start, size - _MAX_LOG_BYTES))
                return log.read().decode("utf-8", "replace")
        except OSError:
            return ""

    def reason(self) -> str:
        """Why it is not running, or not answering, in one line."""
        status = self._process.poll() if self._process else None
        if self._stopped:
            return "it was stopped"
        return diagnose(self.log_text(), status)

    def wait_ready(self, deadline: float) -> None:
        """Block until a token was generated. `deadline`: by time.monotonic(). Raises ServerStartError."""
        while True:
            if not self.alive:
                raise ServerStartError(self.reason(), self.index, self.log_path)
            left = deadline - time.monotonic()
            if left <= 0:
                reason = f"not ready in time; last known: {self.reason()}"
                raise ServerStartError(reason, self.index, self.log_path)
            if self._listening():
                problem = try_generation(self.endpoint, timeout_s=left)
                if problem is None:
                    return
                if problem.startswith("HTTP 4"):  # up, but it will not take our request: waiting does not mend that
                    raise ServerStartError(problem, self.index, self.log_path)
            time.sleep(_POLL_S)

    def _listening(self) -> bool:
        parts = urlsplit(self.endpoint.url)
        try:
            with socket.create_connection((parts.hostname or "", parts.port or 80), timeout=1.0):
                return True
        except OSError:
            return False

    def check(self) -> None:
        """Raises ServerDiedError if it has exited."""
        if not self.alive:
            raise ServerDiedError(self.reason(), self.index, self.log_path)

    def ask_to_stop(self) -> None:
        """Begin to stop; returns at once."""
        if self._process is not None and os.getpid() == self._owner_pid and not self._stopped:
            self._stopped = True
            with suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGTERM)

    def stop(self) -> None:
        """Stop the whole tree and wait for its end. Idempotent; does nothing in a forked child of the launcher."""
        if self._process is None or os.getpid() != self._owner_pid:
            return
        self.ask_to_stop()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(self._stop_grace_s + 10.0)
        # A supervisor that ends by itself leaves nothing behind. This is for one that hangs or was killed; not done
        # otherwise, since the number of a group that is gone may belong to somebody else by now.
        if self._process.returncode is None or self._process.returncode < 0:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def release_port(self) -> None:
        if self._reservation is not None:
            self._reservation.close()
            self._reservation = None
