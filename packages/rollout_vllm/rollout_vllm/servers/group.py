"""A group of vLLM servers that are launched, checked and stopped together."""

import atexit
import os
import secrets
import time
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path

from ..config import RolloutConfig
from ..errors import RolloutConfigError, ServerDiedError, ServerStartError
from ..samples import Endpoint
from .blocking_http import try_generation
from .checks import (
    available_memory_bytes,
    check_cache_folder,
    check_context,
    check_device_features,
    check_kv_cache,
    check_memory,
    read_model_config,
    reserve_port,
)
from .command import (
    SERVED_MODEL_NAME,
    Device,
    check_build,
    detect_device,
    has_multicast,
    server_arguments,
    server_environment,
)
from .process import Server, ServerProcess
from .running import is_paused


def check_launch(
    model_path: str | Path, config: RolloutConfig, *, elsewhere: bool = False, device_key: str = "device"
) -> Device:
    """Check the configuration without starting a process; takes milliseconds. Returns the device of the servers.

    elsewhere: the servers will run on other hosts, so this host's vLLM, memory and ports are not checked.
    device_key: the caller's setting that decides `config.device`, named by the error about vLLM's build.

    Raises RolloutConfigError or a subclass: vLLM is not installed or built for another device, the model folder is not
    usable, max_model_len exceeds the model's context, the KV cache is too small for one sequence or too large for the
    machine, a configured port is in use, vLLM's cache folder cannot be written.
    """
    if config.urls:
        return "cpu"
    device = detect_device()[0] if config.device == "auto" else config.device
    check_device_features(config, device)
    model_config = read_model_config(str(model_path), load_format=config.load_format)
    check_context(config, model_config)
    check_kv_cache(config, model_config, device)
    if elsewhere:
        return device
    check_build(device, device_key=device_key)
    check_cache_folder()
    check_memory(config, device, _free_memory())
    for index in range(config.server_count):
        reserve_port(config.host, None if config.port is None else config.port + index).close()
    return device


def _free_memory() -> int | None:
    try:
        return available_memory_bytes(Path("/proc/meminfo").read_text())
    except OSError:
        return None


def build_server(
    index: int,
    model_path: str | Path,
    config: RolloutConfig,
    *,
    device: Device,
    api_key: str,
    log_dir: Path,
    extra_args: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    gpu_ids: Sequence[int | str] | None = None,
) -> ServerProcess:
    """Server `index` of a group on this host, with a reserved port, not started yet. Raises PortInUseError."""
    held = reserve_port(config.host, None if config.port is None else config.port + index)
    port = held.getsockname()[1]
    num_cores = len(os.sched_getaffinity(0))
    variables = server_environment(
        os.environ, config, device=device, api_key=api_key, num_cores=num_cores, gpu_ids=gpu_ids, extra=env
    )
    multicast = has_multicast(variables)
    arguments = server_arguments(
        config, str(model_path), port=port, device=device, multicast=multicast, extra_args=extra_args
    )
    host = f"[{config.host}]" if ":" in config.host else config.host
    endpoint = Endpoint(f"http://{host}:{port}", api_key, SERVED_MODEL_NAME)
    log_path = Path(log_dir) / f"server_{index}.log"
    return ServerProcess(index, endpoint, arguments, variables, log_path, held, stop_grace_s=config.stop_grace_s)


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
                f"got {len(gpu_ids_per_server)} entries",
                field="gpu_ids_per_server",
                allowed=f"one entry per server ({config.server_count})",
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
                futures = [pool.submit(_wait_url, i, e, deadline) for i, e in enumerate(self.endpoints)]
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

    def stop(self) -> None:
        """Stop all servers and wait until none of their processes is left. Idempotent."""
        if os.getpid() != self._owner_pid:
            return
        for server in self.servers:
            server.ask_to_stop()
        for server in self.servers:
            server.stop()
            server.release_port()

    def __enter__(self) -> "ServerGroup":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def _stop_if_alive(reference: weakref.ref[ServerGroup]) -> None:
    group = reference()
    if group is not None:
        group.stop()


def _wait_url(index: int, endpoint: Endpoint, deadline: float) -> None:
    """Wait for an existing server. A paused server counts as ready: the first weight push resumes it."""
    while True:
        if is_paused(endpoint):
            return
        problem = try_generation(endpoint, timeout_s=max(0.1, deadline - time.monotonic()))
        if problem is None:
            return
        if problem.startswith("HTTP 4") or time.monotonic() > deadline:
            raise ServerStartError(f"{endpoint.url}: {problem}", index, None)
        time.sleep(0.5)
