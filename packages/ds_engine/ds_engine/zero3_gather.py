"""Stage 3's gathers with a handful of calls for many parameters.

DeepSpeed gathers the shards of several parameters by one collective, but puts every parameter together, waits for it
and lets go of it by itself. Here one kernel and one wait do for all. Collectives and what they carry stay DeepSpeed's:
on every rank its shards of the parameters, in the order of their ids.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, MutableMapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

__all__ = ["batch_gathers", "keep_whole"]


def batch_gathers(module: nn.Module, zero_optimizer: Any) -> None:
    """Have the parameters of `module`, which DeepSpeed has sharded, gathered and let go of this way, and those small
    enough to stay gathered by one collective after each step.

    Left to DeepSpeed: parameters on NVMe, in several dtypes, and more than one way of sharding.

    Args:
        zero_optimizer: DeepSpeed's of stage 3, or None.
    """
    under_way: MutableMapping[Any, Any] = getattr(module, "ds_inflight_param_registry", {})
    for parameter in module.parameters():
        _batch_gathers(parameter, under_way)
    small = getattr(zero_optimizer, "persistent_parameters", [])
    if small and _are_alike(small):
        _gather_at_once(small)


def _gather_at_once(small: Sequence[Any]) -> None:
    """DeepSpeed asks the first of them to gather the list, and would send for one after the other."""
    gather: Callable[..., Any] = small[0].all_gather
    not_there = _status("NOT_AVAILABLE")

    def all_gather(param_list: Any = None, async_op: bool = False, hierarchy: int = 0) -> Any:
        if param_list is not small or async_op:
            return gather(param_list, async_op=async_op, hierarchy=hierarchy)
        missing = [param for param in small if param.ds_status == not_there]
        if missing:
            missing[0].all_gather_coalesced(missing).wait()
        return None

    small[0].all_gather = all_gather


def keep_whole(zero_optimizer: Any) -> None:
    """Where a single rank has all of every weight on the device: have weights be there from the start of a forward pass
    to the optimizer's step. Nothing is gathered or released on the way, and it costs no memory: a whole weight is a
    view of the only shard.

    Args:
        zero_optimizer: DeepSpeed's of stage 3, or what stands in its place for a frozen model; after `batch_gathers`.
    """
    offload = getattr(zero_optimizer, "parameter_offload", zero_optimizer)
    params = list(offload.module.parameters())
    alone = all(dist.get_world_size(p.ds_process_group) == 1 for p in params)
    if not alone or any(p.nvme_swapper is not None or p.ds_tensor.device != _device() for p in params):
        return
    not_there = _status("NOT_AVAILABLE")

    def reset_step() -> None:
        _Whole([p for p in params if p.ds_status == not_there]).wait()

    def do_nothing(submodule: Any, forward: bool = False) -> None:
        pass

    coordinator = offload.get_param_coordinator()
    coordinator.reset_step = reset_step
    coordinator.fetch_sub_module = coordinator.release_sub_module = do_nothing
    # Those that DeepSpeed would gather again, into memory of their own, after each step.
    zero_optimizer.persistent_parameters = []


def _batch_gathers(parameter: Any, under_way: MutableMapping[Any, Any]) -> None:
    gather: Callable[..., Any] = parameter.all_gather_coalesced
    partition: Callable[..., None] = parameter.partition
    there = _status("AVAILABLE")
    nowhere = torch.empty(0, dtype=parameter.dtype, device=parameter.device)

    def all_gather_coalesced(params: Iterable[Any], safe_mode: bool = False, quantize: bool = False) -> Any:
        ordered = sorted(params, key=lambda p: int(p.ds_id))
        if not ordered or safe_mode or quantize or not _are_alike(ordered):
            return gather(ordered, safe_mode=safe_mode, quantize=quantize)
        if dist.get_world_size(ordered[0].ds_process_group) == 1:
            return _Whole(ordered)
        return _Gathered(ordered, under_way)

    def let_go(
        param_list: Any = None, hierarchy: int = 0, has_been_updated: bool = False, free_data: bool = True
    ) -> None:
        """What DeepSpeed does when a shard is up to date, without asking for all that could be different."""
        if (
            param_list is not None
            or has_been_updated
            or not free_data
            or parameter.ds_status != there
            or parameter.ds_active_sub_modules
            or not _are_alike((parameter,))
        ):
            partition(param_list, hierarchy=hierarchy, has_been_updated=has_been_updated, free_data=free_data)
            return
        whole = parameter.data
        if whole.is_cuda:  # it was made on the stream of the gathers
            whole.record_stream(torch.cuda.current_stream())
        parameter.data = nowhere
        parameter.ds_status = _status("NOT_AVAILABLE")

    parameter.all_gather_coalesced = all_gather_coalesced
    parameter.partition = let_go


def _are_alike(params: Sequence[Any]) -> bool:
    first = params[0]
    return all(
        p.nvme_swapper is None
        and p.ds_tensor is not None
        and p.ds_secondary_tensor is None
        and p.dtype == p.ds_tensor.dtype == first.dtype
        and p.ds_process_group is first.ds_process_group
        for p in params
    )


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

    def __init__(self, params: Sequence[Any], under_way: MutableMapping[Any, Any]) -> None:
        inflight = _status("INFLIGHT")
        self._params: Sequence[Any] = params
        self._under_way = under_way
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

    def wait(self, handle_dependency: bool | None = None) -> None:
        """Put the parameters together. What is copied from may be reused once the stream has come that far.

        Args:
            handle_dependency: given, whatever it is, where the coordinator would go on to wait for the others one by
                one, with an event for each; so these are taken off its list.
        """
        if not self._params:
            return
        assert self._work is not None, "asynchronous, and this rank is in the group"
        self._work.wait()
        world_size = self._everyone.shape[0]
        # A storage of its own for each: small parameters stay when the others are released.
        whole = [self._everyone.new_empty(world_size, size) for size in self._sizes]
        torch.split_with_sizes_copy(self._everyone, self._sizes, dim=1, out=whole)
        available = _status("AVAILABLE")
        for param, tensor in zip(self._params, whole, strict=True):
            param.data = tensor.view(-1)[: param.ds_numel].view(param.ds_shape)
            param.ds_status = available
            if handle_dependency is not None:
                self._under_way.pop(param, None)
        if self._everyone.is_cuda:
            self._everyone.record_stream(torch.cuda.current_stream())
        self._params = ()
        del self._everyone, self._work


def _status(name: str) -> Any:
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

    return ZeroParamStatus[name]


def _device() -> torch.device:
    from deepspeed.accelerator import get_accelerator

    return torch.device(get_accelerator().current_device_name())
