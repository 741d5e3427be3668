"""Ranks that stay up and run functions together, one call after another: one start serves many tests.

A `RankServer` is a process that has imported what ranks need; it forks the ranks of every `RankPool`, so that imports
are paid once for all pools of a session.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import pickle
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from multiprocessing import active_children
from multiprocessing.connection import Client, Connection
from pathlib import Path
from types import ModuleType
from typing import Any, Self

from .processes import start_process, stop_process
from .ranks import fork_ranks


class RankServer:
    """Runs `script`, which calls `serve_ranks`, until it is closed; its ranks end with it.

    Args:
        folder: for its socket and log.
    """

    def __init__(self, script: Path, folder: Path) -> None:
        self.log = folder / "server.log"
        with _Listener(folder / "server.sock") as listener:
            self._process = start_process([sys.executable, str(script), listener.address], self.log)
            self._connection = listener.accept(self.check)

    def check(self) -> None:
        """Raises RuntimeError with the end of its log when the process has ended."""
        if self._process.poll() is not None:
            raise RuntimeError(f"the rank server ended:\n{self.log.read_text()[-3000:]}")

    def fork(self, address: str, size: int, folder: Path) -> None:
        """Starts `size` ranks that connect to `address` and write their logs to `folder`."""
        self._connection.send((address, size, folder))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()
        stop_process(self._process)


class RankPool:
    """`size` ranks in a process group of their own; `run` calls a function on all of them."""

    def __init__(self, server: RankServer, size: int, folder: Path, *, timeout_s: float = 400.0) -> None:
        self.size = size
        self.timeout_s = timeout_s
        self.logs = [folder / f"rank_{rank}.log" for rank in range(size)]
        with _Listener(folder / "pool.sock") as listener:
            server.fork(listener.address, size, folder)
            connections = [listener.accept(server.check) for _ in range(size)]
        # (rank, process id) of each
        greetings = {connection.recv(): connection for connection in connections}
        self.pids = [pid for _, pid in sorted(greetings)]
        self.connections: list[Connection] = [greetings[greeting] for greeting in sorted(greetings)]

    def __enter__(self) -> Self:
        return self

    def run(self, function: str, per_rank: Sequence[Mapping[str, Any]] | None = None, **everywhere: Any) -> list[Any]:
        """Results of `function(**everywhere, **per_rank[rank])` by rank.

        Exceptions that the script passes on come back as results.

        Raises:
            RuntimeError: a rank raised another exception.
            TimeoutError: a rank did not answer within `timeout_s`; all ranks are killed.
        """
        for rank, connection in enumerate(self.connections):
            # Plain pickle bytes: the connection's own pickler would pass tensors as shared-memory handles.
            connection.send_bytes(pickle.dumps((function, dict(everywhere) | dict(per_rank[rank] if per_rank else {}))))
        deadline = time.monotonic() + self.timeout_s
        results = []
        for rank, connection in enumerate(self.connections):
            if not connection.poll(max(0.1, deadline - time.monotonic())):
                self._signal(signal.SIGUSR1)  # writes tracebacks to the logs
                time.sleep(0.5)
                self._signal(signal.SIGKILL)
                raise TimeoutError(f"rank {rank} did not answer; its log ends: {self.logs[rank].read_text()[-3000:]}")
            try:
                results.append(pickle.loads(connection.recv_bytes()))
            except EOFError:
                raise RuntimeError(f"rank {rank} ended; its log ends: {self.logs[rank].read_text()[-3000:]}") from None
        for rank, result in enumerate(results):
            if isinstance(result, _Crash):
                raise RuntimeError(f"rank {rank} failed:\n{result}")
        return results

    def _signal(self, number: int) -> None:
        for pid in self.pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def __exit__(self, *_: object) -> None:
        for connection in self.connections:
            with contextlib.suppress(OSError):
                connection.send_bytes(pickle.dumps(None))
        for connection in self.connections:
            with contextlib.suppress(OSError, EOFError):
                if connection.poll(20):
                    connection.recv_bytes()  # the rank has left, or its end of the connection is closed
        self._signal(signal.SIGKILL)


class _Listener:
    """A Unix socket at which processes announce themselves with `Client(address)`."""

    def __init__(self, path: Path) -> None:
        self.address = str(path)
        path.unlink(missing_ok=True)
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(self.address)
        self._socket.listen()
        self._socket.settimeout(0.5)

    def accept(self, check: Callable[[], None], *, timeout_s: float = 300.0) -> Connection:
        """The next connection; `check` is called while there is none."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            with contextlib.suppress(TimeoutError):
                accepted, _ = self._socket.accept()
                accepted.setblocking(True)
                return Connection(accepted.detach())
            check()
        logs = [path.read_text()[-1000:] for path in sorted(Path(self.address).parent.glob("*.log"))]
        raise TimeoutError(f"a process did not connect within {timeout_s} s; logs:\n" + "\n".join(logs))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()


class _Crash(str):
    """The traceback of a rank."""


def serve_ranks(
    modules: Sequence[ModuleType],
    *,
    join: Callable[[int, int, str, int], None],
    leave: Callable[[], None],
    passed_on: tuple[type[Exception], ...] = (),
) -> None:
    """The main program of a `RankServer`'s script.

    Args:
        modules: where the functions are defined that `RankPool.run` names; an imported name belongs to the module that
            defines it.
        join: joins the process group: called with rank, number of ranks, host and port.
        leave: leaves the process group.
        passed_on: exceptions that are results of a call.
    """
    functions = {
        name: value
        for module in modules
        for name, value in vars(module).items()
        if getattr(value, "__module__", None) == module.__name__
    }

    def serve(address: str, folder: Path, rank: int) -> None:
        log = os.open(folder / f"rank_{rank}.log", os.O_WRONLY | os.O_CREAT)
        os.dup2(log, 1)
        os.dup2(log, 2)
        faulthandler.register(signal.SIGUSR1)
        join(rank, int(os.environ["WORLD_SIZE"]), os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
        with Client(address) as connection:
            connection.send((rank, os.getpid()))
            while (request := pickle.loads(connection.recv_bytes())) is not None:
                function, kwargs = request
                try:
                    result = functions[function](**kwargs)
                except passed_on as error:
                    result = error
                except Exception:
                    result = _Crash(traceback.format_exc())
                connection.send_bytes(pickle.dumps(result))
            leave()

    with Client(sys.argv[1]) as server, contextlib.suppress(EOFError):
        while True:
            address, size, folder = server.recv()
            fork_ranks(partial(serve, address, folder), num_ranks=size)
            active_children()  # reaps those that have ended
