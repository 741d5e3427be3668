"""Stage 3's gathers with a handful of kernels for many parameters.

DeepSpeed gathers the shards of several parameters by one collective, and then puts every parameter together by itself.
Here one kernel does so for all of them. Collectives and what they carry stay DeepSpeed's: on every rank its shards of
the parameters, in the order of their ids.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

__all__ = ["batch_gathers"]


def batch_gathers(module: nn.Module) -> None:
    """Have the parameters of `module`, which DeepSpeed has sharded, gathered this way.

    Left to DeepSpeed: parameters on their own, on NVMe, in several dtypes, and more than one way of sharding.
    """
    for parameter in module.parameters():
        parameter.all_gather_coalesced = _gatherer(parameter.all_gather_coalesced)


def _gatherer(original: Callable[..., Any]) -> Callable[..., Any]:
    def all_gather_coalesced(params: Iterable[Any], safe_mode: bool = False, quantize: bool = False) -> Any:
        ordered = sorted(params, key=lambda p: int(p.ds_id))
        if safe_mode or quantize or not _is_plain(ordered):
            return original(ordered, safe_mode=safe_mode, quantize=quantize)
        return _Whole(ordered) if dist.get_world_size(ordered[0].ds_process_group) == 1 else _Gathered(ordered)

    return all_gather_coalesced


def _is_plain(params: Sequence[Any]) -> bool:
    if len(params) < 2:
        return False
    first = params[0]
    return all(
        p.nvme_swapper is None
        and p.ds_secondary_tensor is None
        and p.dtype == p.ds_tensor.dtype == first.dtype
        and p.ds_process_group is first.ds_process_group
        for p in params
    )


def _status(name: str) -> Any:
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

    return ZeroParamStatus[name]


class _Whole:
    """One rank has all of it: a view of its shard, or a copy of it from the CPU."""

    def __init__(self, params: Sequence[Any]) -> None:
        inflight = _status("INFLIGHT")
        self._params: Sequence[Any] = params
        device = _device()
        for param in params:
            shard: Tensor = param.ds_tensor.data
            if shard.device != device:
                shard = shard.to(device, non_blocking=True)
            param.data = shard.view(param.ds_shape)
            param.ds_status = inflight

    def wait(self, **_: Any) -> None:
        """Mark the parameters as there. The coordinator has the stream of the computation wait for that of the copies,
        so the CPU need not."""
        available = _status("AVAILABLE")
        for param in self._params:
            param.ds_status = available
        self._params = ()


class _Gathered:
    """A collective under way."""

    def __init__(self, params: Sequence[Any]) -> None:
        inflight = _status("INFLIGHT")
        self._params: Sequence[Any] = params
        group = params[0].ds_process_group
        world_size = dist.get_world_size(group)
        self._sizes = [int(p.ds_tensor.ds_numel) for p in params]
        device = _device()
        shards = [p.ds_tensor.data.to(device, non_blocking=True) for p in params]
        # [world size, the shards of one rank]
        self._everyone = torch.empty(world_size, sum(self._sizes), dtype=shards[0].dtype, device=device)
        own = self._everyone[dist.get_rank(group)]
        torch.cat(shards, out=own)
        self._work = dist.all_gather_into_tensor(self._everyone.view(-1), own, group=group, async_op=True)
        for param in params:
            param.ds_status = inflight

    def wait(self, **_: Any) -> None:
        """Put the parameters together. What is copied from may be reused once the stream has come that far."""
        if not self._params:
            return
        self._work.wait()
        world_size = self._everyone.shape[0]
        # A storage of its own for each: small parameters stay when the others are released.
        whole = [self._everyone.new_empty(world_size, size) for size in self._sizes]
        torch.split_with_sizes_copy(self._everyone, self._sizes, dim=1, out=whole)
        available = _status("AVAILABLE")
        for param, tensor in zip(self._params, whole, strict=True):
            param.data = tensor.view(-1)[: param.ds_numel].view(param.ds_shape)
            param.ds_status = available
        if self._everyone.is_cuda:
            self._everyone.record_stream(torch.cuda.current_stream())
        self._params = ()
        del self._everyone, self._work


def _device() -> torch.device:
    from deepspeed.accelerator import get_accelerator

    return torch.device(get_accelerator().current_device_name())
