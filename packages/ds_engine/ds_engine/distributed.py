"""Joining and leaving the process group. The only place of this package that touches environment variables."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

from .errors import EngineError

__all__ = ["init_distributed", "shutdown_distributed"]


def init_distributed(
    rank: int,
    world_size: int,
    master_addr: str,
    master_port: int,
    device: torch.device,
    *,
    timeout_s: float = 1800.0,
) -> None:
    """Join the group of `world_size` ranks that meets at `master_addr:master_port`: NCCL on CUDA, gloo on the CPU.

    DeepSpeed insists on the variable LOCAL_RANK and picks its accelerator by DS_ACCELERATOR; both are set here from
    `device`. Everything else is passed explicitly.

    Raises:
        EngineError: DeepSpeed was imported before for another kind of device.
    """
    os.environ["LOCAL_RANK"] = str(device.index or 0)
    os.environ.setdefault("DS_ACCELERATOR", device.type)
    import deepspeed
    import torch
    import torch.distributed as dist
    from deepspeed.accelerator import get_accelerator

    if get_accelerator().device_name() != device.type:
        raise EngineError(
            f"DeepSpeed runs on {get_accelerator().device_name()} in this process, but the device is {device}: "
            f"set DS_ACCELERATOR={device.type} before importing deepspeed"
        )
    # Otherwise DeepSpeed compiles a shared-memory all-reduce here, which only its inference engine calls: a minute of
    # two cores at first use, and a compiler killed half-way leaves a lock that every later process waits for.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    backend = "gloo"
    if device.type == "cuda":
        torch.cuda.set_device(device)
        backend = "nccl"
    dist.init_process_group(
        backend,
        init_method=f"tcp://{master_addr}:{master_port}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout_s),
        device_id=device if device.type == "cuda" and world_size > 1 else None,
    )
    deepspeed.comm.init_distributed(dist_backend=backend, auto_mpi_discovery=False, verbose=False)


def shutdown_distributed() -> None:
    """Leave the group, so that the process ends without warnings and could join another one."""
    import deepspeed.comm.comm as ds_comm
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
    ds_comm.cdb = None
