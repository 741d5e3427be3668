"""A group of vLLM servers that are launched, checked and stopped together."""

import atexit
import os
import secrets
import time
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path

from plinth_base import Endpoint

from ..config import RolloutConfig
from ..errors import RolloutConfigError, ServerDiedError
from .existing import wait_for_existing
from .launch import build_server, check_launch
from .process import Server, ServerProcess
from .spawn import close_prepared


class ServerGroup:
    """N servers of one model. Use `launch`, then `wait_ready`. As a context manager, it stops the servers at the end.

    When the launching process ends for any reason, including SIGKILL, the supervisors of the servers stop them.
    """

    def __init__(self, endpoints: Sequence[Endpoint], servers: Sequence[Server], startup_timeout_s: float) -> None:
        self.endpoints = tuple(endpoints)
        self.servers = tuple(servers)
        self.startup_timeout_s = startup_timeout_s
        self._started_at = time.monotonic()
        self._owner_pid = os.getpid()
        atexit.register(_stop_if_alive, weakref.ref(self))

    @classmethod
    def launch(
        cls,
        model_path: str | Path,
        config: RolloutConfig,
        *,
        log_dir: Path,
        extra_args: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        gpu_ids_per_server: Sequence[Sequence[int | str]] | None = None,
    ) -> "ServerGroup":
        """Start the servers in the background; they load in parallel. `wait_ready` waits for them.

        With `config.urls` nothing is started. log_dir: for server_0.log, server_1.log, ... extra_args, env: for every
        server; they override our values. gpu_ids_per_server: one sequence of device ids per server.
        Raises the exceptions of `check_launch`, before any process starts.
        """
        if config.urls:
            return cls(
                [Endpoint(url.rstrip("/"), config.read_api_key()) for url in config.urls], [], config.startup_timeout_s
            )
        device = check_launch(model_path, config)
        if gpu_ids_per_server is not None and len(gpu_ids_per_server) != config.server_count:
            raise RolloutConfigError(
                field="gpu_ids_per_server",
                value=gpu_ids_per_server,
                allowed=f"one entry for each of num_servers={config.server_count}",
            )
        api_key = config.read_api_key() or secrets.token_urlsafe(32)
        servers = [
            build_server(
                index,
                model_path,
                config,
                device=device,
                api_key=api_key,
                log_dir=log_dir,
                extra_args=extra_args,
                env=env,
                gpu_ids=gpu_ids_per_server[index] if gpu_ids_per_server is not None else None,
            )
            for index in range(config.server_count)
        ]
        group = cls([server.endpoint for server in servers], servers, config.startup_timeout_s)
        try:
            for server in servers:
                server.start()
        except BaseException:
            group.stop()
            raise
        finally:
            close_prepared()
        return group

    def wait_ready(self) -> None:
        """Block until every server has generated a token.

        Raises ServerStartError with the reason of the first failure in one line, after stopping all servers.
        """
        deadline = self._started_at + self.startup_timeout_s
        pool = ThreadPoolExecutor(max_workers=len(self.endpoints), thread_name_prefix="wait_ready")
        try:
            if self.servers:
                futures = [pool.submit(server.wait_ready, deadline) for server in self.servers]
            else:
                futures = [pool.submit(wait_for_existing, i, e, deadline) for i, e in enumerate(self.endpoints)]
            done, _ = wait(futures, return_when=FIRST_EXCEPTION)
            for future in done:
                future.result()
        except BaseException:
            self.stop()  # the other threads notice that their servers are gone and end
            raise
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def check(self) -> None:
        """Raises ServerDiedError if a server of this group has exited. Cheap: sends no request."""
        for server in self.servers:
            if not server.alive:
                raise ServerDiedError(server.reason(), server.index, server.log_path)

    def ask_to_stop(self) -> None:
        """Start stopping all servers; does not wait."""
        if os.getpid() == self._owner_pid:
            for server in self.servers:
                server.ask_to_stop()

    def stop(self) -> None:
        """Stop all servers and wait until none of their processes is left. Idempotent."""
        if os.getpid() != self._owner_pid:
            return
        self.ask_to_stop()
        for server in self.servers:
            server.stop()
            server.release_port()

    def leave_to(self, owner: int) -> None:
        """Give the servers to process `owner`, with whose end they end; it makes a group of pickled copies of them."""
        for server in self.servers:
            assert isinstance(server, ServerProcess), "servers of a Ray cluster end with their run"
            server.leave_to(owner)
            server.release_port()
        self._owner_pid = owner

    def __enter__(self) -> "ServerGroup":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def _stop_if_alive(reference: weakref.ref[ServerGroup]) -> None:
    group = reference()
    if group is not None:
        group.stop()
