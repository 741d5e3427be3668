"""A Ray cluster of several hosts: the ranks run on the driver's host, rollout servers on the others."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import ray

from rollout_vllm import RolloutConfig, ServerGroup, launch_on_ray
from rollout_vllm.servers.ray_servers import default_resources

from ..errors import InputError
from .local_ray import warn_without_token
from .placement import ClusterNode, plan_server_nodes
from .reachability import why_unreachable


def check_address(address: str) -> None:
    """Checks that something listens at `host:port`; `auto` is resolved when the run joins the cluster.

    Raises:
        InputError: `address` is no address, or nothing listens there.
    """
    if address == "auto":
        return
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise InputError(f"trainer.ray_address is {address!r}; allowed: auto, or host:port of the cluster's head")
    if why := why_unreachable(host.strip("[]"), int(port)):
        raise InputError(_no_cluster(address, why))


def join_cluster(address: str) -> None:
    """Connects this process to the cluster; this host must be one of its nodes.

    Raises:
        InputError: there is no cluster, or it has another version of Ray or Python.
    """
    try:
        ray.init(address=address, log_to_driver=True, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise InputError(_no_cluster(address, " ".join(str(error).split()))) from None
    warn_without_token("everybody who reaches the cluster's ports", "start the cluster with RAY_AUTH_MODE=token")


def _no_cluster(address: str, why: str) -> str:
    return (
        f"trainer.ray_address is {address}: no Ray cluster can be joined there ({why}); start one "
        "with ray start --head on this host and ray start --address=<this host>:6379 on the others"
    )


def launch_on_other_nodes(
    model_path: str,
    rollout: RolloutConfig,
    *,
    device: Literal["cpu", "cuda"],
    num_ranks: int,
    log_dir: Path,
    extra_args: list[str],
    env: Mapping[str, str],
) -> ServerGroup:
    """Starts the servers on the nodes of the cluster other than this host, which runs `num_ranks` ranks.

    Raises:
        PlacementError: the nodes have too few free resources.
        rollout_vllm.RolloutConfigError: a node lacks the model folder, or vLLM cannot serve it.
    """
    known = [
        ClusterNode(node_id=node["NodeID"], address=node["NodeManagerAddress"], resources=node["Resources"])
        for node in ray.nodes()
        if node["Alive"]
    ]
    nodes = plan_server_nodes(
        known,
        driver=str(ray.get_runtime_context().get_node_id()),
        num_ranks=num_ranks,
        num_servers=rollout.server_count,
        resources=default_resources(rollout, device),
    )
    return launch_on_ray(model_path, rollout, log_dir=log_dir, node_ids=nodes, extra_args=extra_args, env=env)
