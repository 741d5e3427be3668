"""The memory of this host's GPUs, without a CUDA context in this process."""

from collections.abc import Sequence
from dataclasses import dataclass

from run_kit.machine import gpus

from ..ranks.environment import GpuId


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU."""

    name: str
    total_bytes: int
    used_bytes: int
    """Bytes that other processes hold now, or that the driver reserves for itself."""
    capability: tuple[int, int] | None = None
    """Compute capability; None: unknown."""

    @property
    def free_bytes(self) -> int:
        """Bytes that this run can use."""
        return self.total_bytes - self.used_bytes


def read_gpus(gpu_ids: Sequence[GpuId]) -> tuple[Gpu, ...]:
    """The GPUs with these ids, from nvidia-smi; else from torch, which does not know what others hold.

    nvidia-smi does not tell the memory of MIG instances, and CUDA shows only the first one to a process: all are taken
    to be as large as that one.
    """
    listed = known_gpus(gpus.read_gpus()[0])
    known = [listed[gpu] for gpu in gpu_ids if isinstance(gpu, int) and gpu in listed]
    if len(known) == len(gpu_ids):
        return tuple(known)
    import torch

    last = torch.cuda.device_count() - 1
    properties = [torch.cuda.get_device_properties(min(number, last)) for number in range(len(gpu_ids))]
    return tuple(
        Gpu(name=p.name, total_bytes=p.total_memory, used_bytes=0, capability=(p.major, p.minor)) for p in properties
    )


def known_gpus(listed: Sequence[gpus.Gpu]) -> dict[int, Gpu]:
    """Index -> GPU, of those whose total and free memory nvidia-smi reports."""
    return {
        gpu.index: Gpu(
            name=gpu.name,
            total_bytes=gpu.total_mib * 2**20,
            used_bytes=(gpu.total_mib - gpu.free_mib) * 2**20,
            capability=gpu.capability,
        )
        for gpu in listed
        if gpu.total_mib is not None and gpu.free_mib is not None
    }
