"""Which process runs on which device: a pure plan, made and refused before anything starts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from .errors import PlacementError


@dataclass(frozen=True, kw_only=True)
class Placement:
    """GPU ids of every trainer rank and every rollout server; empty tuples mean the CPU."""

    rank_gpus: tuple[tuple[int, ...], ...]
    server_gpus: tuple[tuple[int, ...], ...]
    own_rank_gpus: Mapping[str, tuple[tuple[int, ...], ...]] = field(default_factory=dict)
    """Role -> the GPUs of ranks that compute for it alone."""

    @property
    def on_gpu(self) -> bool:
        """Whether the ranks train on CUDA."""
        return bool(self.rank_gpus[0])

    @property
    def num_gpus(self) -> int:
        """GPUs in use, those that a rank and a server share counted once; 0 on the CPU."""
        own = [gpus for ranks in self.own_rank_gpus.values() for gpus in ranks]
        return len({gpu for gpus in (*self.rank_gpus, *own, *self.server_gpus) for gpu in gpus})

    @property
    def num_ranks(self) -> int:
        """Trainer processes of all groups."""
        return len(self.rank_gpus) + sum(len(ranks) for ranks in self.own_rank_gpus.values())


def plan_placement(
    *,
    gpu_ids: Sequence[int],
    device: str,
    num_ranks: int,
    num_servers: int,
    tensor_parallel_size: int,
    colocate: bool,
    own_ranks: Mapping[str, int] | None = None,
) -> Placement:
    """One GPU a rank; `tensor_parallel_size` GPUs a server, shared with the ranks (colocate) or after them.

    Args:
        gpu_ids: GPUs this job may use.
        device: "auto", "cpu" or "cuda"; auto means CUDA when `gpu_ids` is not empty.
        own_ranks: role -> how many ranks compute for it alone; their GPUs follow the first `num_ranks`.

    Raises:
        PlacementError: not enough GPUs; says how many there are and how many would do.
    """
    own_ranks = own_ranks or {}
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
    return Placement(rank_gpus=ranks, server_gpus=servers, own_rank_gpus=own_gpus)
