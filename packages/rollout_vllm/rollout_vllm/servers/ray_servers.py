"""Servers on the nodes of a Ray cluster. An actor on the node owns each server; clients use the node's address.

    ray.init(address="auto")
    with launch_on_ray(model_folder, RolloutConfig(num_servers=4), log_dir=Path("logs")) as servers:
        servers.wait_ready()
        client = RolloutClient(servers.endpoints, config)

Ray is imported at first use. Every node needs this package, vLLM, and the model folder under the same path, for example
on a shared file system. An error names the address of a node without the folder, before a server starts there.
"""

import dataclasses
import secrets
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plinth_base import Endpoint, ModelFolderError

from ..config import RolloutConfig
from ..errors import RolloutConfigError, ServerLostError, ServerStartError
from .device import Device, check_device_features, detect_device
from .group import ServerGroup
from .launch import build_server, check_launch
from .process import ServerProcess

_CALL_TIMEOUT_S = 30.0


class _ServerHost:
    """The actor: owns one server's process tree on its node. Actor and process tree end with the job."""

    _server: ServerProcess

    def launch(
        self, index: int, model_path: str, config: RolloutConfig, num_on_node: int, settings: dict[str, Any]
    ) -> tuple[Endpoint, Path]:
        import ray

        # The servers of a node share its cores and its memory.
        config = dataclasses.replace(config, host=ray.util.get_node_ip_address(), num_servers=num_on_node)
        try:
            check_launch(model_path, dataclasses.replace(config, port=None))
        except ModelFolderError as error:
            raise ModelFolderError(
                f"on Ray node {config.host}: {error.problem}",
                value=error.value,
                remedy="put the folder under the same path on every node that runs a server, for example on a shared "
                "file system",
            ) from None
        self._server = build_server(index, model_path, config, **settings)
        self._server.start()
        return self._server.endpoint, self._server.log_path

    def call(self, name: str) -> Any:
        """Call a method of the server, or read a property."""
        value = getattr(self._server, name)
        return value() if callable(value) else value

    def wait_ready(self, seconds: float) -> None:
        self._server.wait_ready(time.monotonic() + seconds)  # monotonic clocks differ between hosts


@dataclass(frozen=True, kw_only=True)
class ServerSeat:
    """Placement of a server, for callers that have reserved its devices with Ray."""

    strategy: Any
    """Ray's scheduling strategy; the server takes one CPU of it."""
    gpu_ids: tuple[int | str, ...] = ()
    """Its GPUs as CUDA_VISIBLE_DEVICES names them."""
    num_on_node: int = 1
    """Servers of this group on the same node."""


class RayServer:
    """The launcher's handle of a server on a node. It restarts on the same node; it is lost when the node is lost."""

    def __init__(
        self, ray: Any, index: int, actor: Any, endpoint: Endpoint, log_path: Path, stop_timeout_s: float
    ) -> None:
        self.index, self.endpoint = index, endpoint
        self.log_path = log_path  # on its node
        self._ray, self._actor, self._stop_timeout_s = ray, actor, stop_timeout_s
        self._stopping: Any = None

    @property
    def alive(self) -> bool:
        with suppress(self._ray.exceptions.RayError):
            return bool(self._ray.get(self._actor.call.remote("alive"), timeout=_CALL_TIMEOUT_S))
        return False

    def reason(self) -> str:
        try:
            return str(self._ray.get(self._actor.call.remote("reason"), timeout=_CALL_TIMEOUT_S))
        except self._ray.exceptions.RayError as error:
            return f"its Ray actor is gone: {_first_line(error)}"

    def start(self) -> None:
        """Start the stopped server again, on the same node and port. Raises ServerLostError if the node is lost."""
        self._run("call", "start", timeout_s=_CALL_TIMEOUT_S)
        self._stopping = None

    def wait_ready(self, deadline: float) -> None:
        """Raises ServerStartError."""
        left = max(0.1, deadline - time.monotonic())
        self._run("wait_ready", left, timeout_s=left + _CALL_TIMEOUT_S)

    def _run(self, method: str, argument: Any, *, timeout_s: float) -> None:
        try:
            self._ray.get(getattr(self._actor, method).remote(argument), timeout=timeout_s)
        except self._ray.exceptions.RayError as error:
            cause = getattr(error, "cause", None)
            if isinstance(cause, ServerStartError):
                raise cause from None
            reason = f"its Ray actor is gone: {_first_line(error)}"
            kind = ServerLostError if isinstance(error, self._ray.exceptions.RayActorError) else ServerStartError
            raise kind(reason, self.index, self.log_path) from None

    def ask_to_stop(self) -> None:
        # Without Ray, its shutdown has stopped the server, and a call would start a new Ray.
        if self._ray.is_initialized():
            with suppress(Exception):
                self._stopping = self._stopping or self._actor.call.remote("stop")

    def stop(self) -> None:
        """Stop the server's process tree. The actor stays alive for a restart."""
        self.ask_to_stop()
        if self._ray.is_initialized():
            with suppress(Exception):
                self._ray.get(self._stopping, timeout=self._stop_timeout_s)

    def release_port(self) -> None:
        """Kill the actor, which releases the port it reserved."""
        if self._ray.is_initialized():
            with suppress(Exception):
                self._ray.kill(self._actor)


def launch_on_ray(
    model_path: str | Path,
    config: RolloutConfig,
    *,
    log_dir: Path,
    resources_per_server: Mapping[str, float] | None = None,
    seats: Sequence[ServerSeat] | None = None,
    extra_args: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
) -> ServerGroup:
    """Launch a `ServerGroup` on the nodes of the Ray cluster that this process is connected to.

    resources_per_server: Ray resources of one server ({"CPU": 2, "GPU": 1, "my_label": 0.01}); None: one CPU, and
    tensor_parallel_size GPUs if the device is cuda. seats: strategy and GPUs of every server, for callers that have
    reserved the GPUs (a server then takes one CPU); None: Ray spreads the servers over the nodes. log_dir: a folder on
    each node.
    `config.host` is ignored: every server binds to the cluster address of its node. The API key protects it, but the
    traffic is not encrypted.

    Raises RolloutConfigError (Ray is not initialized, the cluster lacks the resources, seats has the wrong length),
    ServerStartError, and the exceptions of `check_launch`, which runs on the server's node.
    """
    import ray

    if config.urls:
        remedy = "use ServerGroup.launch"
        raise RolloutConfigError("existing servers do not need Ray", field="urls", value=config.urls, remedy=remedy)
    if not ray.is_initialized():
        raise RolloutConfigError("Ray is not initialized", remedy="call ray.init(address=...) first")
    if seats is not None and len(seats) != config.server_count:
        raise RolloutConfigError(
            f"there are {len(seats)}", field="seats", allowed=f"{config.server_count}, one per server"
        )
    device: Device = detect_device()[0] if config.device == "auto" else config.device
    check_device_features(config, device)
    gpus = {"GPU": float(config.tensor_parallel_size)} if device == "cuda" and seats is None else {}
    resources = dict(resources_per_server or {"CPU": 1.0, **gpus})
    if seats is None:
        _check_resources(resources, config.server_count, ray.cluster_resources())
        seats = [ServerSeat(strategy="SPREAD")] * config.server_count
    settings = {
        "device": device,
        "api_key": config.read_api_key() or secrets.token_urlsafe(32),
        "log_dir": Path(log_dir).absolute(),
        "extra_args": tuple(extra_args),
        "env": dict(env or {}),
    }
    host = ray.remote(_ServerHost)
    actors = [
        host.options(
            num_cpus=resources.get("CPU", 0),
            num_gpus=resources.get("GPU", 0),
            resources={name: amount for name, amount in resources.items() if name not in ("CPU", "GPU")},
            max_concurrency=8,  # alive() must not wait for wait_ready()
            scheduling_strategy=seat.strategy,
        ).remote()
        for seat in seats
    ]
    folder = Path(model_path).expanduser()
    model = str(folder.absolute() if folder.is_dir() else model_path)  # actors have another working directory
    launched = [
        actor.launch.remote(index, model, config, seat.num_on_node, settings | {"gpu_ids": seat.gpu_ids or None})
        for index, (actor, seat) in enumerate(zip(actors, seats, strict=True))
    ]
    try:
        servers = [_connect(index, actor, launched[index], config) for index, actor in enumerate(actors)]
    except BaseException:
        for actor in actors:
            ray.kill(actor)
        raise
    return ServerGroup([server.endpoint for server in servers], servers, config.startup_timeout_s)


def _check_resources(wanted: Mapping[str, float], num_servers: int, available: Mapping[str, float]) -> None:
    """Raises RolloutConfigError if the cluster lacks the resources: Ray would wait for them indefinitely."""
    for name, amount in wanted.items():
        if amount * num_servers > available.get(name, 0.0):
            raise RolloutConfigError(
                f"{amount:g} {name} each is {amount * num_servers:g} in total, the cluster has "
                f"{available.get(name, 0.0):g}",
                field="num_servers",
                value=num_servers,
                remedy="lower num_servers or resources_per_server",
            )


def _connect(index: int, actor: Any, launched: Any, config: RolloutConfig) -> RayServer:
    import ray

    try:
        endpoint, log_path = ray.get(launched, timeout=config.startup_timeout_s)
    except ray.exceptions.GetTimeoutError:
        raise ServerStartError("no node of the Ray cluster had the resources in time", index, None) from None
    except ray.exceptions.RayError as error:
        cause = getattr(error, "cause", None)
        if isinstance(cause, (RolloutConfigError, ModelFolderError)):
            raise cause from None
        raise ServerStartError(_first_line(error), index, None) from error
    return RayServer(ray, index, actor, endpoint, log_path, config.stop_grace_s + _CALL_TIMEOUT_S)


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
