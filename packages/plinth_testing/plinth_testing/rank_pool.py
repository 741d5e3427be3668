"""Ranks that stay up and run functions together, one call after another: one start serves many tests."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import pickle
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, Self

from .processes import start_process
from .ranks import rendezvous

__all__ = ["RankPool", "serve_rank"]


class RankPool:
    """Starts `script` once per rank; `run` calls one of its functions on all ranks.

    The script calls `serve_rank`. Environment: torchrun's variables.
    """

    def __init__(self, script: Path, size: int, folder: Path, *, timeout_s: float = 400.0) -> None:
        self.size = size
        self.timeout_s = timeout_s
        address = str(folder / "pool.sock")
        listener = Listener(address)
        command, shared = [sys.executable, str(script), address], rendezvous(size)
        self.logs = [folder / f"rank_{rank}.log" for rank in range(size)]
        self.processes = [
            start_process(command, log, shared | {"RANK": str(rank)}) for rank, log in enumerate(self.logs)
        ]
        connections = [listener.accept() for _ in range(size)]
        by_rank: dict[int, Connection] = {pickle.loads(c.recv_bytes()): c for c in connections}
        self.connections = [by_rank[rank] for rank in range(size)]
        listener.close()

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
                for process in self.processes:
                    process.send_signal(signal.SIGUSR1)  # writes a traceback to its log
                time.sleep(0.5)
                for process in self.processes:
                    process.kill()
                raise TimeoutError(f"rank {rank} did not answer; its log ends: {self.logs[rank].read_text()[-3000:]}")
            results.append(pickle.loads(connection.recv_bytes()))
        for rank, result in enumerate(results):
            if isinstance(result, _Crash):
                raise RuntimeError(f"rank {rank} failed:\n{result}")
        return results

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        for connection in self.connections:
            with contextlib.suppress(OSError):
                connection.send_bytes(pickle.dumps(None))
        for process in self.processes:
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


class _Crash(str):
    """The traceback of a rank."""


def serve_rank(
    modules: Sequence[ModuleType],
    *,
    join: Callable[[int, int, str, int], None],
    leave: Callable[[], None],
    passed_on: tuple[type[Exception], ...] = (),
) -> None:
    """The main loop of a pool's rank: runs the functions that `RankPool.run` names.

    Args:
        modules: where the functions are defined; an imported name belongs to the module that defines it.
        join: joins the process group: called with rank, number of ranks, host and port.
        leave: leaves the process group.
        passed_on: exceptions that are results of a call.
    """
    import torch

    functions = {
        name: value
        for module in modules
        for name, value in vars(module).items()
        if getattr(value, "__module__", None) == module.__name__
    }
    faulthandler.register(signal.SIGUSR1)
    torch.set_num_threads(1)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    join(rank, size, os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    with Client(sys.argv[1]) as connection:
        connection.send_bytes(pickle.dumps(rank))
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
