"""Which process runs on which device: a pure plan, made and refused before anything starts."""

from collections.abc import Sequence
from dataclasses import dataclass

from .errors import PlacementError


@dataclass(frozen=True, kw_only=True)
class Placement:
    """GPU ids of every trainer rank and every rollout server; empty tuples mean the CPU."""

    rank_gpus: tuple[tuple[int, ...], ...]
    server_gpus: tuple[tuple[int, ...], ...]

    @property
    def on_gpu(self) -> bool:
        """Whether the ranks train on CUDA."""
        return bool(self.rank_gpus[0])

    @property
    def num_gpus(self) -> int:
        """GPUs in use, those that a rank and a server share counted once; 0 on the CPU."""
        return len({gpu for gpus in (*self.rank_gpus, *self.server_gpus) for gpu in gpus})


def plan_placement(
    *,
    gpu_ids: Sequence[int],
    device: str,
    num_ranks: int,
    num_servers: int,
    tensor_parallel_size: int,
    colocate: bool,
) -> Placement:
    """One GPU a rank; `tensor_parallel_size` GPUs a server, shared with the ranks (colocate) or after them.

    Args:
        gpu_ids: GPUs this job may use.
        device: "auto", "cpu" or "cuda"; auto means CUDA when `gpu_ids` is not empty.

    Raises:
        PlacementError: not enough GPUs; says how many there are and how many would do.
    """
    if device == "cpu" or (device == "auto" and not gpu_ids):
        return Placement(rank_gpus=((),) * num_ranks, server_gpus=((),) * num_servers)
    num_server_gpus = num_servers * tensor_parallel_size
    needed = max(num_ranks, num_server_gpus) if colocate else num_ranks + num_server_gpus
    if len(gpu_ids) < needed:
        raise PlacementError(
            f"{num_ranks} ranks and {num_servers} servers of {tensor_parallel_size} GPUs need {needed} GPUs "
            f"({'shared' if colocate else 'separate'}), this host offers {len(gpu_ids)}: lower trainer.num_ranks, "
            f"rollout.num_servers or rollout.tensor_parallel_size, or set trainer.colocate=true or trainer.device=cpu"
        )
    ranks = tuple((gpu,) for gpu in gpu_ids[:num_ranks])
    pool = gpu_ids if colocate else gpu_ids[num_ranks:]
    tp = tensor_parallel_size
    servers = tuple(tuple(pool[i * tp : (i + 1) * tp]) for i in range(num_servers))
    return Placement(rank_gpus=ranks, server_gpus=servers)
