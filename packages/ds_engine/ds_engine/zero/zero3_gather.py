"""Gather and release of stage 3 parameters, in few calls for many parameters.

DeepSpeed all-gathers the shards of several parameters in one collective, but assembles, waits for and releases every
parameter separately. Here one kernel and one wait serve all parameters of a collective. The collectives and their
contents are DeepSpeed's: on every rank its shards of the parameters, in the order of their ids; with hpZ, while they
exist, second shards of the ranks of a node.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, MutableMapping, Sequence
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..distributed import all_gather_single
from ..errors import EngineError
from ..upstream import FENCE

_PARAMETERS = "deepspeed.runtime.zero.partition_parameters"
_OFFLOAD = "deepspeed.runtime.zero.parameter_offload:DeepSpeedZeRoOffload"
_STAGE_3 = "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3"
_STATUS = {f"{_PARAMETERS}:ZeroParamStatus": ("AVAILABLE", "NOT_AVAILABLE", "INFLIGHT")}
GATHERS = FENCE.patch(
    name="gathers of stage 3",
    reason="one kernel and one wait serve all parameters of a collective",
    otherwise="stock path",
    replaces={
        _PARAMETERS: (
            "all_gather(param_list, async_op, hierarchy)",
            "all_gather_coalesced(params, safe_mode, quantize)",
            "partition(param_list, hierarchy, has_been_updated, free_data)",
        ),
        _OFFLOAD: ("partition_all_parameters()",),
    },
    reads={
        _PARAMETERS: (
            *("ds_id", "ds_status", "ds_shape", "ds_numel", "ds_tensor", "ds_secondary_tensor", "ds_persist"),
            *("ds_process_group", "ds_zero_param_process_group", "ds_active_sub_modules", "nvme_swapper"),
        ),
        _OFFLOAD: ("ds_inflight_param_registry",),
        _STAGE_3: ("persistent_parameters", "parameter_offload"),
        f"{_PARAMETERS}:AllGatherCoalescedHandle": ("wait(handle_dependency)",),
        **_STATUS,
        "torch._C._nn": ("unflatten_dense_tensors",),
    },
)


def coalesce_gathers(module: nn.Module, zero_optimizer: Any) -> None:
    """Replace gather and release of the parameters of `module`, which DeepSpeed has sharded.

    Parameters that stay gathered because they are small are gathered by one collective after each step. Parameters on
    NVMe, of several dtypes, or sharded over different groups keep DeepSpeed's methods.

    Args:
        zero_optimizer: DeepSpeed's stage 3 optimizer, or None.
    """
    if not GATHERS.check():
        return
    gathers = _Gathers(module)
    for parameter in module.parameters():
        gathers.take_over(parameter)
    persistent = getattr(zero_optimizer, "persistent_parameters", [])
    if persistent and gathers.share_collective(persistent):
        _gather_persistent_together(persistent)
    if zero_optimizer is not None:
        GATHERS.replace(parameter_offload(zero_optimizer), partition_all_parameters=gathers.release_all)


def _gather_persistent_together(persistent: Sequence[Any]) -> None:
    """Replace `all_gather` of the first persistent parameter, which DeepSpeed calls with the list of all of them. It
    would gather them one by one."""
    gather: Callable[..., Any] = persistent[0].all_gather
    not_available = param_status("NOT_AVAILABLE")

    def all_gather(param_list: Any = None, async_op: bool = False, hierarchy: int = 0) -> Any:
        if param_list is not persistent or async_op:
            return gather(param_list, async_op=async_op, hierarchy=hierarchy)
        missing = [param for param in persistent if param.ds_status == not_available]
        if missing:
            missing[0].all_gather_coalesced(missing).wait()
        return None

    GATHERS.replace(persistent[0], all_gather=all_gather)


def parameter_offload(zero_optimizer: Any) -> Any:
    """The DeepSpeedZeRoOffload that owns the hooks: part of the stage 3 optimizer, or the object of a frozen model."""
    return getattr(zero_optimizer, "parameter_offload", zero_optimizer)


_ALIGNMENT = 128
"""Bytes; kernels and compiled graphs expect weights at such addresses."""


class _Gathers:
    """Replaces gather and release of the parameters of one module."""

    def __init__(self, module: nn.Module) -> None:
        self._in_flight: MutableMapping[Any, Any] = getattr(module, "ds_inflight_param_registry", {})
        self._params: list[Any] = list(module.parameters())
        # Cached because every pass reads it for every parameter. None: DeepSpeed's own methods.
        self._gather_keys: dict[int, Any] = {p.ds_id: _gather_key(p) for p in self._params}
        self._buckets: dict[tuple[bool, tuple[int, ...]], _Bucket] = {}

    def share_collective(self, params: Iterable[Any]) -> bool:
        """True if one collective can gather all of `params`."""
        keys = {self._gather_keys.get(p.ds_id) for p in params}
        return len(keys) == 1 and None not in keys

    def take_over(self, parameter: Any) -> None:
        """Replace DeepSpeed's `all_gather_coalesced` and `partition` of this parameter."""
        gather: Callable[..., Any] = parameter.all_gather_coalesced
        partition: Callable[..., None] = parameter.partition
        available, not_available = param_status("AVAILABLE"), param_status("NOT_AVAILABLE")
        empty = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
        is_replaced = self._gather_keys[parameter.ds_id] is not None
        has_second = parameter.ds_zero_param_process_group is not None

        def all_gather_coalesced(params: Iterable[Any], safe_mode: bool = False, quantize: bool = False) -> Any:
            if not isinstance(params, Sequence):
                params = list(params)
            if not params or safe_mode or quantize or not self.share_collective(params):
                params = sorted(params, key=lambda p: int(p.ds_id))
                return gather(params, safe_mode=safe_mode, quantize=quantize)
            bucket = self._bucket(params)
            kind = _SingleRankGather if bucket.world_size == 1 else _Gather
            return kind(bucket, self._in_flight)

        def release(
            param_list: Any = None, hierarchy: int = 0, has_been_updated: bool = False, free_data: bool = True
        ) -> None:
            """DeepSpeed's release of a parameter whose shard is up to date, without checks of all other cases."""
            if (
                not is_replaced
                or param_list is not None
                or has_been_updated
                or not free_data
                or parameter.ds_status != available
                or parameter.ds_active_sub_modules
                or (has_second and parameter.ds_secondary_tensor is None)
            ):
                partition(param_list, hierarchy=hierarchy, has_been_updated=has_been_updated, free_data=free_data)
                return
            _record_stream(parameter.data)
            parameter.data = empty
            parameter.ds_status = not_available

        GATHERS.replace(parameter, all_gather_coalesced=all_gather_coalesced, partition=release)

    def release_all(self) -> None:
        """Release parameters that are still gathered when `step()` begins, including unused prefetches."""
        not_available = param_status("NOT_AVAILABLE")
        for param in self._params:
            param.ds_active_sub_modules.clear()
            if param.ds_status == not_available:
                continue
            if param in self._in_flight:
                self._in_flight.pop(param).wait()
            param.partition()
            if param.ds_status != not_available:
                raise EngineError(f"{param.ds_summary()} was not released")

    def _bucket(self, params: Sequence[Any]) -> _Bucket:
        """The bucket of these parameters; each step gathers the same combinations."""
        second = all(p.ds_secondary_tensor is not None for p in params)
        key = second, tuple(sorted(p.ds_id for p in params))
        if key not in self._buckets:
            self._buckets[key] = _Bucket(sorted(params, key=lambda p: int(p.ds_id)), second=second)
        return self._buckets[key]


def _gather_key(param: Any) -> Any:
    """Equal for parameters that one collective can gather; None if the parameter keeps DeepSpeed's methods."""
    shard: Tensor | None = param.ds_tensor
    if param.nvme_swapper is not None or shard is None:
        return None
    return (param.dtype, param.ds_process_group) if param.dtype == shard.dtype else None


class _Bucket:
    """Parameters that one collective gathers, in its order, and their memory layout."""

    def __init__(self, params: Sequence[Any], *, second: bool = False) -> None:
        """`second`: of hpZ's shards within a node."""
        first = params[0]
        self.params = params
        self._second = second
        self.dtype: torch.dtype = first.dtype
        self.group: dist.ProcessGroup = first.ds_zero_param_process_group if second else first.ds_process_group
        self.world_size = dist.get_world_size(self.group)
        self.rank = dist.get_rank(self.group)
        self.shard_sizes = [int(shard.ds_numel) for shard in self.shards()]
        """Elements, including the padding of parameters that are not divisible."""
        by_storage: dict[Any, list[int]] = {}
        for index, param in enumerate(params):
            by_storage.setdefault(self._storage_key(index, param), []).append(index)
        self._storages = [(indices, *self._views(indices)) for indices in by_storage.values()]

    def shards(self) -> list[Any]:
        """This rank's shards. The second ones are new in every step."""
        return [p.ds_secondary_tensor if self._second else p.ds_tensor for p in self.params]

    def _storage_key(self, index: int, param: Any) -> Any:
        """Equal for parameters that may share a storage because they are released together: those that stay gathered
        until the step, or the others of one layer."""
        whole = self.shard_sizes[index] * self.world_size
        if whole != param.ds_numel or whole * param.dtype.itemsize % _ALIGNMENT:
            return index
        return "persistent" if param.ds_persist else ("layer", id(getattr(param, "ds_z3_leaf_module", param)))

    def _views(self, indices: Sequence[int]) -> tuple[int, list[Tensor], list[Tensor]]:
        """(elements of a storage for the parameters at `indices`; per parameter the shape of all ranks' shards; per
        parameter its shape, without the padding that a parameter with its own storage may have at its end)."""
        sizes = [self.shard_sizes[index] for index in indices]
        by_rank = [torch.empty(self.world_size, size, device="meta") for size in sizes]
        whole = [torch.empty(self.params[index].ds_shape, device="meta") for index in indices]
        return self.world_size * sum(sizes), by_rank, whole

    def assemble(self, gathered: Tensor) -> list[Tensor]:
        """[world size, shards of one rank] -> the parameters, with one copy kernel and a few calls for all views."""
        pieces: list[Any] = [None] * len(self.params)
        wholes: list[Any] = [None] * len(self.params)
        unflatten = torch._C._nn.unflatten_dense_tensors
        for indices, num_elements, by_rank, whole in self._storages:
            flat = gathered.new_empty(num_elements)
            for index, piece, view in zip(indices, unflatten(flat, by_rank), unflatten(flat, whole), strict=True):
                pieces[index], wholes[index] = piece, view
        torch.split_with_sizes_copy(gathered, self.shard_sizes, dim=1, out=pieces)
        return wholes


class _SingleRankGather:
    """Gather on one rank: a parameter is a view of its shard, or a copy of a shard in CPU memory."""

    def __init__(self, bucket: _Bucket, in_flight: MutableMapping[Any, Any]) -> None:
        inflight = param_status("INFLIGHT")
        self._params: Sequence[Any] = bucket.params
        self._in_flight = in_flight
        device = _device()
        for param in bucket.params:
            shard: Tensor = param.ds_tensor.data
            if shard.device != device:
                shard = shard.to(device, non_blocking=True)
            param.data = shard.view(param.ds_shape)
            param.ds_status = inflight

    def wait(self, handle_dependency: bool | None = None) -> None:
        """Mark the parameters as available. The coordinator makes the compute stream wait for the copies, so the CPU
        need not. `handle_dependency`: as for `_Gather`."""
        available = param_status("AVAILABLE")
        for param in self._params:
            param.ds_status = available
            if handle_dependency is not None:
                self._in_flight.pop(param, None)
        self._params = ()


class _Gather:
    """An all-gather in flight."""

    def __init__(self, bucket: _Bucket, in_flight: MutableMapping[Any, Any]) -> None:
        self._bucket: _Bucket | None = bucket
        self._in_flight = in_flight
        device = _device()
        shards = [shard.data for shard in bucket.shards()]
        if any(shard.device != device for shard in shards):
            shards = [shard.to(device, non_blocking=True) for shard in shards]
        # [world size, shards of one rank]
        self._gathered = torch.empty(bucket.world_size, sum(bucket.shard_sizes), dtype=bucket.dtype, device=device)
        own = self._gathered[bucket.rank]
        torch.cat(shards, out=own)
        self._work = all_gather_single(self._gathered.view(-1), own, group=bucket.group, async_op=True)
        inflight = param_status("INFLIGHT")
        for param in bucket.params:
            param.ds_status = inflight

    def wait(self, handle_dependency: bool | None = None) -> None:
        """Assemble the parameters. The gathered memory may be reused when the stream has passed this point.

        Args:
            handle_dependency: if given (True or False), the coordinator would continue to wait for the bucket's other
                parameters one by one, with an event each, so they are removed from its registry.
        """
        bucket, self._bucket = self._bucket, None
        if bucket is None:
            return
        self._work.wait()
        available = param_status("AVAILABLE")
        for param, whole in zip(bucket.params, bucket.assemble(self._gathered), strict=True):
            param.data = whole
            param.ds_status = available
            if handle_dependency is not None:
                self._in_flight.pop(param, None)
        _record_stream(self._gathered)
        del self._gathered, self._work


def _record_stream(tensor: Tensor) -> None:
    """Keep the tensor's memory, allocated on the gather stream, until the current stream has passed this point."""
    if tensor.is_cuda:
        tensor.record_stream(torch.cuda.current_stream(tensor.get_device()))  # passing the index is much faster


@cache
def param_status(name: str) -> Any:
    """DeepSpeed's ZeroParamStatus: AVAILABLE, NOT_AVAILABLE or INFLIGHT."""
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

    return ZeroParamStatus[name]


def _device() -> torch.device:
    from deepspeed.accelerator import get_accelerator

    return torch.device(get_accelerator().current_device_name())
