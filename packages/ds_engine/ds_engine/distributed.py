"""Joins and leaves the default process group. The only module of this package that sets environment variables."""

from __future__ import annotations

import ipaddress
import os
import socket
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from .errors import EngineError
from .upstream import FENCE

SHARED_MEMORY = FENCE.patch(
    name="DeepSpeed's shared-memory all-reduce",
    reason="only its inference engine uses it, and compiling it takes a minute and can leave a lock behind",
    otherwise="stock path",
    replaces={"deepspeed.ops": ("__compatible_ops__",)},
)
# torch 2.13 renamed these two and warns at every call of the old names.
_dist: Any = dist
all_gather_single = getattr(dist, "all_gather_single", None) or _dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or _dist.reduce_scatter_tensor


def import_deepspeed(device: torch.device) -> Any:
    """The module deepspeed, which takes seconds to import, with the accelerator of `device`.

    DeepSpeed requires the variable LOCAL_RANK and selects its accelerator by DS_ACCELERATOR; both are set here.

    Raises:
        EngineError: DeepSpeed was already imported for another type of device.
    """
    os.environ["LOCAL_RANK"] = str(device.index or 0)
    os.environ.setdefault("DS_ACCELERATOR", device.type)
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    if get_accelerator().device_name() != device.type:
        raise EngineError(
            f"DeepSpeed uses {get_accelerator().device_name()} in this process",
            field="device",
            value=str(device),
            remedy=f"set DS_ACCELERATOR={device.type} before importing deepspeed",
        )
    return deepspeed


def init_distributed(
    rank: int,
    world_size: int,
    master_addr: str,
    master_port: int,
    device: torch.device,
    *,
    timeout_s: float = 1800.0,
) -> None:
    """Join the group of `world_size` ranks at `master_addr:master_port`, with NCCL on CUDA and gloo on the CPU.

    The variables that `import_deepspeed` sets are set; everything else is passed explicitly.

    Args:
        timeout_s: timeout of collectives, in seconds.

    Raises:
        EngineError: see `import_deepspeed`.
    """
    deepspeed = import_deepspeed(device)
    if SHARED_MEMORY.check():
        operators = {**deepspeed.ops.__compatible_ops__, "deepspeed_shm_comm": False}
        SHARED_MEMORY.replace(deepspeed.ops, __compatible_ops__=operators)
    backend = "gloo"
    if device.type == "cuda":
        torch.cuda.set_device(device)
        backend = "nccl"
    dist.init_process_group(
        backend,
        store=_open_store(rank, world_size, master_addr, master_port, timedelta(seconds=timeout_s)),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout_s),
        device_id=device if device.type == "cuda" and world_size > 1 else None,
    )
    deepspeed.comm.init_distributed(dist_backend=backend, auto_mpi_discovery=False, verbose=False)


def _open_store(rank: int, world_size: int, address: str, port: int, timeout: timedelta) -> Any:
    """The store in which the ranks meet. A TCPStore has no password and listens on every interface; where all ranks are
    on one host (a loopback address), rank 0 gives it a socket that only this host reaches."""
    listening = None
    if rank == 0 and ipaddress.ip_address(socket.getaddrinfo(address, port)[0][4][0]).is_loopback:
        listening = socket.create_server((address, port)).detach()
    return _dist.TCPStore(
        address, port, world_size, is_master=rank == 0, timeout=timeout, master_listen_fd=listening, multi_tenant=True
    )


def shutdown_distributed() -> None:
    """Destroy the process group, so that the process exits without warnings and can join another group."""
    import deepspeed.comm

    if deepspeed.comm.is_initialized():
        deepspeed.comm.destroy_process_group()
    elif dist.is_initialized():
        dist.destroy_process_group()
