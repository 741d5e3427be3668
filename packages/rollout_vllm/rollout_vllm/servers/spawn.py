"""The supervised process of a server, started for its settings or ahead of them.

Importing vLLM takes longest of a server's start. `prepare_servers` starts processes that do it before the settings are
known; `take_prepared` finds one that has the environment of a server, which `PreparedServer.hand_over` then becomes. A
server without one starts as always.
"""

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from ..config import RolloutConfig
from ._supervise import started
from .auth import KEY_VARIABLE
from .command import server_environment
from .device import Device

HERE = Path(__file__).resolve().parent
_MAX_SOCKET_FOLDER = 70  # characters: a socket's path has at most 107, and vLLM's names have 36
_LATE = frozenset(
    {
        KEY_VARIABLE,
        "CUDA_VISIBLE_DEVICES",  # read when CUDA is initialized, which no import does: the engine is forked later
        "PLINTH_SERVER_SOCKETS",
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING",
        "VLLM_RPC_BASE_PATH",
        "VLLM_SERVER_DEV_MODE",
    }
)
"""Variables that nothing reads while vLLM is imported."""
_prepared: "list[PreparedServer]" = []


def server_command(arguments: Sequence[str]) -> list[str]:
    """The command of a server, without its supervisor."""
    return [sys.executable, "-P", str(HERE / "_serve.py"), *arguments]


def spawn_server(
    arguments: Sequence[str], env: Mapping[str, str], *, grace_s: float, stdin: int, output: IO[bytes]
) -> subprocess.Popen[bytes]:
    """Starts a server under a supervisor, which leads a session and process group of its own."""
    supervisor = [sys.executable, "-S", "-E", str(HERE / "_supervise.py"), str(os.getpid()), str(grace_s)]
    return subprocess.Popen(
        [*supervisor, *server_command(arguments)],
        stdin=stdin,
        stdout=output,
        stderr=subprocess.STDOUT,
        env=env,
        start_new_session=True,
    )


class LeftProcess:
    """A supervisor that another process has started and left to this one, as far as a server needs its `Popen`."""

    def __init__(self, pid: int, start: str) -> None:
        self.pid, self._start = pid, start
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """0 once it has ended: only its parent knows its status."""
        if self.returncode is None and started(self.pid) != self._start:
            self.returncode = 0
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Nothing happens if it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def wait(self, timeout: float | None = None) -> int:
        """Raises subprocess.TimeoutExpired, as `Popen.wait`."""
        end = math.inf if timeout is None else time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired([str(self.pid)], timeout or 0.0)
            time.sleep(0.02)
        return 0


def end_server(process: subprocess.Popen[bytes] | LeftProcess, grace_s: float) -> None:
    """Waits until a process tree that was told to stop is gone; kills it otherwise."""
    with suppress(subprocess.TimeoutExpired):
        process.wait(grace_s + 10.0)
    # A supervisor that exits normally leaves no processes. Kill the group only if the supervisor hangs or was
    # killed: otherwise the id of the process group may already be in use by another process.
    if process.returncode is None or process.returncode < 0:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def socket_folder(base: str | None) -> str:
    """A new folder for one server's sockets, which the supervisor removes."""
    folder = tempfile.mkdtemp(prefix="plinth-vllm-", dir=base)
    if len(folder) <= _MAX_SOCKET_FOLDER or base is not None:
        return folder
    os.rmdir(folder)
    return tempfile.mkdtemp(prefix="plinth-vllm-", dir="/tmp")


def with_sockets(env: Mapping[str, str], folder: str) -> dict[str, str]:
    """`env` of a server whose sockets are in `folder`."""
    return {**env, "VLLM_RPC_BASE_PATH": folder, "PLINTH_SERVER_SOCKETS": folder}


class PreparedServer:
    """A process that imports vLLM, and then waits for the settings of its server."""

    def __init__(self, env: Mapping[str, str], grace_s: float) -> None:
        self.sockets = socket_folder(env.get("VLLM_RPC_BASE_PATH"))
        self._env, self._grace_s = with_sockets(env, self.sockets), grace_s
        self._launcher_env = dict(os.environ)
        with tempfile.TemporaryFile() as output:  # until the server has a log
            self._process = spawn_server(
                ["--prepared"], self._env, grace_s=grace_s, stdin=subprocess.PIPE, output=output
            )

    def fits(self, env: Mapping[str, str], grace_s: float) -> bool:
        """True for a process that runs, and has the environment that a server needs.

        Variables that libraries have set in the launcher since are no matter.
        """
        decided = [
            name
            for name in self._differing(env)
            if name not in _LATE and not env.get(name) == os.environ.get(name) != self._launcher_env.get(name)
        ]
        return not decided and grace_s == self._grace_s and self._process.poll() is None

    def hand_over(self, arguments: Sequence[str], env: Mapping[str, str], log: Path) -> subprocess.Popen[bytes]:
        """Makes the process a server that writes to `log`; returns its supervisor."""
        changes = {name: env.get(name) for name in self._differing(env)}
        settings = {"arguments": list(arguments), "environment": changes, "log": str(log)}
        assert self._process.stdin is not None
        with suppress(BrokenPipeError), self._process.stdin as stdin:
            stdin.write(json.dumps(settings).encode() + b"\n")
        return self._process

    def _differing(self, env: Mapping[str, str]) -> list[str]:
        return [name for name in {**self._env, **env} if self._env.get(name) != env.get(name)]

    def close(self) -> None:
        """Ends the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.send_signal(signal.SIGTERM)
        end_server(self._process, self._grace_s)
        shutil.rmtree(self.sockets, ignore_errors=True)


@contextmanager
def prepare_servers(
    config: RolloutConfig, *, device: Device, number: int, env: Mapping[str, str] | None = None
) -> Iterator[None]:
    """Starts `number` processes that import vLLM for servers which are launched on this host inside the block.

    `config` may have open settings, and `device` be a guess: a process that no server can use ends. `env`: as of
    `ServerGroup.launch`.
    """
    num_cores = len(os.sched_getaffinity(0))
    variables = server_environment(os.environ, config, device=device, api_key="", num_cores=num_cores, extra=env)
    try:
        with suppress(OSError):  # servers then start without them
            _prepared.extend(PreparedServer(variables, config.stop_grace_s) for _ in range(number))
        yield
    finally:
        close_prepared()


def take_prepared(env: Mapping[str, str], grace_s: float) -> PreparedServer | None:
    """A prepared process for a server with this environment, which is its own from now on; None if there is none."""
    for prepared in _prepared:
        if prepared.fits(env, grace_s):
            _prepared.remove(prepared)
            return prepared
    return None


def close_prepared() -> None:
    """Ends the processes that no server has taken."""
    while _prepared:
        _prepared.pop().close()
