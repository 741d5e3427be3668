"""Plans which process runs on which device, with pure functions, before any process starts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ..errors import PlacementError
from ..ranks.environment import GpuId


@dataclass(frozen=True, kw_only=True)
class Placement:
    """GPU ids of every trainer rank and every rollout server on this host; an empty tuple is the CPU."""

    rank_gpus: tuple[tuple[GpuId, ...], ...]
    server_gpus: tuple[tuple[GpuId, ...], ...]
    own_rank_gpus: Mapping[str, tuple[tuple[GpuId, ...], ...]] = field(default_factory=dict)
    """Role -> GPU ids of the ranks that compute for it alone."""
    num_gpus_elsewhere: int = 0
    """Number of GPUs of servers on other hosts; Ray assigns them there."""

    @property
    def on_gpu(self) -> bool:
        """Whether the ranks train on CUDA."""
        return bool(self.rank_gpus[0])

    @property
    def num_gpus(self) -> int:
        """Number of GPUs in use; a GPU shared by a rank and a server counts once. 0 on the CPU."""
        own = [gpus for ranks in self.own_rank_gpus.values() for gpus in ranks]
        here = {gpu for gpus in (*self.rank_gpus, *own, *self.server_gpus) for gpu in gpus}
        return len(here) + self.num_gpus_elsewhere

    @property
    def num_ranks(self) -> int:
        """Trainer processes of all groups."""
        return len(self.rank_gpus) + sum(len(ranks) for ranks in self.own_rank_gpus.values())


def plan_placement(
    *,
    gpu_ids: Sequence[GpuId],
    device: str,
    num_ranks: int,
    num_servers: int,
    tensor_parallel_size: int,
    colocate: bool,
    own_ranks: Mapping[str, int] | None = None,
    servers_elsewhere: bool = False,
) -> Placement:
    """One GPU per rank; `tensor_parallel_size` GPUs per server, shared with the ranks (colocate) or after theirs.

    Args:
        gpu_ids: GPUs that this job can use.
        device: "auto", "cpu" or "cuda"; auto is CUDA if `gpu_ids` is not empty.
        own_ranks: role -> number of ranks that compute for it alone; their GPUs follow the first `num_ranks`.
        servers_elsewhere: the servers run on other hosts and use none of `gpu_ids`.

    Raises:
        PlacementError: not enough GPUs; gives the available and the required number.
    """
    own_ranks = own_ranks or {}
    num_elsewhere = num_servers if servers_elsewhere else 0
    num_servers -= num_elsewhere
    if device == "cpu" or (device == "auto" and not gpu_ids):
        return Placement(
            rank_gpus=((),) * num_ranks,
            server_gpus=((),) * num_servers,
            own_rank_gpus={role: ((),) * number for role, number in own_ranks.items()},
        )
    all_ranks = num_ranks + sum(own_ranks.values())
    num_server_gpus = num_servers * tensor_parallel_size
    needed = max(all_ranks, num_server_gpus) if colocate else all_ranks + num_server_gpus
    if len(gpu_ids) < needed:
        own = "".join(f" and {number} of the {role}" for role, number in own_ranks.items())
        raise PlacementError(
            f"{num_ranks} ranks{own} and {num_servers} servers of {tensor_parallel_size} GPUs need {needed} GPUs "
            f"({'shared' if colocate else 'separate'}), this host offers {len(gpu_ids)}: lower trainer.num_ranks, "
            f"rollout.num_servers or rollout.tensor_parallel_size, or set trainer.colocate=true or trainer.device=cpu"
        )
    free = iter(gpu_ids)
    ranks = tuple((next(free),) for _ in range(num_ranks))
    own_gpus = {role: tuple((next(free),) for _ in range(number)) for role, number in own_ranks.items()}
    pool = gpu_ids if colocate else gpu_ids[all_ranks:]
    tp = tensor_parallel_size
    servers = tuple(tuple(pool[i * tp : (i + 1) * tp]) for i in range(num_servers))
    return Placement(
        rank_gpus=ranks, server_gpus=servers, own_rank_gpus=own_gpus, num_gpus_elsewhere=num_elsewhere * tp
    )


@dataclass(frozen=True, kw_only=True)
class ClusterNode:
    """A node of a Ray cluster."""

    node_id: str
    address: str
    resources: Mapping[str, float]
    """Its total resources in Ray's terms ({"CPU": 8.0, "GPU": 2.0}), free or not."""


def plan_server_nodes(
    nodes: Sequence[ClusterNode],
    *,
    driver: str,
    num_ranks: int,
    num_servers: int,
    resources: Mapping[str, float],
) -> tuple[str, ...]:
    """The node id of every server: the node with the fewest servers and enough resources, never the driver's.

    Args:
        driver: node id of the driver, where each rank takes one of Ray's CPUs.
        resources: resources of a server in Ray's terms.

    Raises:
        PlacementError: not enough resources; lists those of every node.
    """
    known = {node.node_id: node for node in nodes}
    has = "; ".join(f"{node.address}{' (this host)' * (node.node_id == driver)}: {_totals(node)}" for node in nodes)
    if known[driver].resources.get("CPU", 0.0) < num_ranks:
        raise PlacementError(
            f"trainer.num_ranks is {num_ranks}: the ranks run on this host and need {num_ranks} CPUs of its Ray node, "
            f"but the cluster has {has}; start this host's node with ray start --num-cpus={num_ranks} or more"
        )
    others = [node for node in nodes if node.node_id != driver]
    placed: dict[str, int] = {node.node_id: 0 for node in others}
    chosen: list[str] = []
    for _ in range(num_servers):
        fitting = [node for node in others if _has_room(node, resources, placed[node.node_id] + 1)]
        if not fitting:
            wanted = ", ".join(f"{amount:g} {name}" for name, amount in resources.items())
            raise PlacementError(
                f"rollout.num_servers is {num_servers}: with trainer.ray_address each takes {wanted} of a node other "
                f"than this host's, and there is room for {len(chosen)} ({has}); lower it, or add nodes"
            )
        best = min(fitting, key=lambda node: placed[node.node_id])
        placed[best.node_id] += 1
        chosen.append(best.node_id)
    return tuple(chosen)


def _has_room(node: ClusterNode, resources: Mapping[str, float], num_servers: int) -> bool:
    return all(amount * num_servers <= node.resources.get(name, 0.0) for name, amount in resources.items())


def _totals(node: ClusterNode) -> str:
    return " ".join(f"{node.resources.get(name, 0.0):g} {name}" for name in ("CPU", "GPU"))
