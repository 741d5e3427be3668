"""Servers on the nodes of a Ray cluster: each owned by an actor there, reached by its node's own address.

    ray.init(address="auto")
    with launch_on_ray(model_folder, RolloutConfig(num_servers=4), log_dir=Path("logs")) as servers:
        servers.wait_ready()
        client = RolloutClient(servers.endpoints, config)

Ray is imported when this is used. The nodes need this package, vLLM, and the model folder under the same path, as on a
file system that they share: a node without it is refused by its address before any server of it starts.
"""

from __future__ import annotations

import dataclasses
import secrets
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..config import RolloutConfig
from ..errors import ModelFolderError, RolloutConfigError, ServerDiedError, ServerStartError
from ..samples import Endpoint
from .checks import check_device_features
from .command import Device, detect_device
from .process import ServerProcess
from .server import ServerGroup, build_server, check_launch

_CALL_TIMEOUT_S = 30.0


class _ServerHost:
    """The actor: one server as a process tree of its node. Dies with the job, and the tree with it."""

    _server: ServerProcess

    def launch(
        self, index: int, model_path: str, config: RolloutConfig, settings: dict[str, Any]
    ) -> tuple[Endpoint, Path]:
        import ray

        config = dataclasses.replace(config, host=ray.util.get_node_ip_address())
        try:
            check_launch(model_path, dataclasses.replace(config, num_servers=1, port=None))
        except ModelFolderError as error:
            raise ModelFolderError(
                f"on Ray node {config.host}: {error}; the model folder must be under the same path on every node that "
                "gets a server, as on a file system that they share"
            ) from None
        self._server = build_server(index, model_path, config, **settings)
        self._server.start()
        return self._server.endpoint, self._server.log_path

    def alive(self) -> bool:
        return self._server.alive

    def reason(self) -> str:
        return self._server.reason()

    def start(self) -> None:
        self._server.start()

    def wait_ready(self, seconds: float) -> None:
        self._server.wait_ready(time.monotonic() + seconds)  # clocks of two hosts differ

    def stop(self) -> None:
        self._server.stop()


class RayServer:
    """A server on some node, as the launcher sees it. Restarted in its place; when the node is lost, so is it."""

    def __init__(self, index: int, actor: Any, endpoint: Endpoint, log_path: Path, stop_timeout_s: float) -> None:
        self.index, self.endpoint = index, endpoint
        self.log_path = log_path  # on its node
        self._actor, self._stop_timeout_s = actor, stop_timeout_s
        self._stopping: Any = None

    def _call(self, method: str, *args: Any, timeout_s: float = _CALL_TIMEOUT_S) -> Any:
        """Raises ray.exceptions.RayError when the actor is gone, the method's own exception when it raised."""
        import ray

        return ray.get(getattr(self._actor, method).remote(*args), timeout=timeout_s)

    @property
    def alive(self) -> bool:
        from ray.exceptions import RayError

        with suppress(RayError):
            return bool(self._call("alive"))
        return False

    def reason(self) -> str:
        from ray.exceptions import RayError

        try:
            return str(self._call("reason"))
        except RayError as error:
            return f"its Ray actor is gone: {_first_line(error)}"

    def start(self) -> None:
        """Start a dead one again, on its node and port. Raises ServerStartError when the node is lost."""
        from ray.exceptions import RayError

        try:
            self._call("start")
        except RayError as error:
            raise self._start_error(error) from None
        self._stopping = None

    def wait_ready(self, deadline: float) -> None:
        """Raises ServerStartError."""
        from ray.exceptions import RayError

        left = max(0.1, deadline - time.monotonic())
        try:
            self._call("wait_ready", left, timeout_s=left + _CALL_TIMEOUT_S)
        except RayError as error:
            raise self._start_error(error) from None

    def _start_error(self, error: BaseException) -> ServerStartError:
        cause = getattr(error, "cause", None)
        if isinstance(cause, ServerStartError):
            return cause
        return ServerStartError(f"its Ray actor is gone: {_first_line(error)}", self.index, self.log_path)

    def check(self) -> None:
        if not self.alive:
            raise ServerDiedError(self.reason(), self.index, self.log_path)

    def ask_to_stop(self) -> None:
        with suppress(Exception):  # Ray is shut down, and everything of it with it
            self._stopping = self._stopping or self._actor.stop.remote()

    def stop(self) -> None:
        """Stop the server's whole tree. The actor stays, for a restart."""
        import ray

        self.ask_to_stop()
        with suppress(Exception):
            ray.get(self._stopping, timeout=self._stop_timeout_s)

    def release_port(self) -> None:
        """The end: the actor goes, and with it the port it held."""
        import ray

        with suppress(Exception):
            ray.kill(self._actor)


def launch_on_ray(
    model_path: str | Path,
    config: RolloutConfig,
    *,
    log_dir: Path,
    resources_per_server: Mapping[str, float] | None = None,
    placement_group: Any = None,
    node_ids: Sequence[str] | None = None,
    extra_args: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
) -> ServerGroup:
    """`ServerGroup.launch` over the nodes of the Ray cluster this process is connected to.

    resources_per_server: of one server, on one node, in Ray's words ({"CPU": 2, "GPU": 1, "my_label": 0.01}); None:
    `default_resources`. placement_group: of the caller's, server i in bundle i; node_ids: Ray's ids of nodes, server i
    on the i-th and nowhere else; neither: Ray spreads them over the nodes. log_dir: on each node. `config.host` is not
    used: every server binds to the address its node has in the cluster, where the API key guards it; the traffic itself
    is not encrypted.

    Raises RolloutConfigError (no Ray here, more asked for than the cluster has, not one node a server),
    ServerStartError, and what `check_launch` raises, found on the server's node.
    """
    import ray

    if config.urls:
        raise RolloutConfigError("urls: servers that run already need no Ray; use ServerGroup.launch")
    if not ray.is_initialized():
        raise RolloutConfigError("Ray is not initialised: call ray.init(address=...) first")
    if node_ids is not None and (placement_group is not None or len(node_ids) != config.num_servers):
        raise RolloutConfigError(
            f"node_ids has {len(node_ids)} entries for num_servers={config.num_servers}; give one a server, and no "
            "placement_group beside them"
        )
    device: Device = detect_device()[0] if config.device == "auto" else config.device
    check_device_features(config, device)
    resources = dict(resources_per_server or default_resources(config, device))
    if placement_group is None:
        _check_resources(resources, config.num_servers, ray.cluster_resources())
    settings = {
        "device": device,
        "api_key": config.api_key or secrets.token_urlsafe(32),
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
            max_concurrency=8,  # asking whether it lives must not wait for its start
            scheduling_strategy=_strategy(placement_group, node_ids, index),
        ).remote()
        for index in range(config.num_servers)
    ]
    folder = Path(model_path).expanduser()
    model = str(folder.absolute() if folder.is_dir() else model_path)  # actors have a working folder of their own
    launched = [actor.launch.remote(index, model, config, settings) for index, actor in enumerate(actors)]
    try:
        servers = [_connect(index, actor, launched[index], config) for index, actor in enumerate(actors)]
    except BaseException:
        for actor in actors:
            ray.kill(actor)
        raise
    return ServerGroup([server.endpoint for server in servers], servers, config.startup_timeout_s)


def default_resources(config: RolloutConfig, device: Device) -> dict[str, float]:
    """What a server takes of its node, in Ray's words: one CPU, and on GPUs tensor_parallel_size of them."""
    return {"CPU": 1.0} | ({"GPU": float(config.tensor_parallel_size)} if device == "cuda" else {})


def _check_resources(wanted: Mapping[str, float], num_servers: int, there: Mapping[str, float]) -> None:
    """Ray would wait for ever for what no cluster node has. Raises RolloutConfigError."""
    for name, amount in wanted.items():
        if amount * num_servers > there.get(name, 0.0):
            raise RolloutConfigError(
                f"num_servers={num_servers}: {amount:g} {name} each make {amount * num_servers:g}, the Ray cluster has "
                f"{there.get(name, 0.0):g}; lower num_servers or resources_per_server"
            )


def _strategy(placement_group: Any, node_ids: Sequence[str] | None, index: int) -> Any:
    if placement_group is None and node_ids is None:
        return "SPREAD"
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

    if node_ids is not None:
        return NodeAffinitySchedulingStrategy(node_ids[index], soft=False)
    return PlacementGroupSchedulingStrategy(placement_group, placement_group_bundle_index=index)


def _connect(index: int, actor: Any, launched: Any, config: RolloutConfig) -> RayServer:
    import ray
    from ray.exceptions import GetTimeoutError, RayError

    try:
        endpoint, log_path = ray.get(launched, timeout=config.startup_timeout_s)
    except GetTimeoutError:
        raise ServerStartError("no node of the Ray cluster had room for it in time", index, None) from None
    except RayError as error:
        cause = getattr(error, "cause", None)
        if isinstance(cause, RolloutConfigError):
            raise cause from None
        raise ServerStartError(_first_line(error), index, None) from error
    return RayServer(index, actor, endpoint, log_path, config.stop_grace_s + _CALL_TIMEOUT_S)


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
