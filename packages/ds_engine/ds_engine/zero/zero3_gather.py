"""Stage 3's gathers with a handful of calls for many parameters.

DeepSpeed gathers the shards of several parameters by one collective, but puts every parameter together, waits for it
and lets go of it by itself. Here one kernel and one wait do for all. Collectives and what they carry stay DeepSpeed's:
on every rank its shards of the parameters, in the order of their ids.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, MutableMapping, Sequence
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..collectives import all_gather_single
from ..errors import EngineError

__all__ = ["batch_gathers", "keep_whole", "param_status", "parameter_offload"]


def batch_gathers(module: nn.Module, zero_optimizer: Any) -> None:
    """Have the parameters of `module`, which DeepSpeed has sharded, gathered and let go of this way, and those small
    enough to stay gathered by one collective after each step.

    Left to DeepSpeed: parameters on NVMe, in several dtypes, and more than one way of sharding.

    Args:
        zero_optimizer: DeepSpeed's of stage 3, or None.
    """
    gathers = _Gathers(module)
    for parameter in module.parameters():
        gathers.take_over(parameter)
    small = getattr(zero_optimizer, "persistent_parameters", [])
    if small and gathers.are_alike(small):
        _gather_at_once(small)
    if zero_optimizer is not None:
        parameter_offload(zero_optimizer).partition_all_parameters = gathers.let_go_of_all


def _gather_at_once(small: Sequence[Any]) -> None:
    """DeepSpeed asks the first of them to gather the list, and would send for one after the other."""
    gather: Callable[..., Any] = small[0].all_gather
    not_there = param_status("NOT_AVAILABLE")

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
    offload = parameter_offload(zero_optimizer)
    params = list(offload.module.parameters())
    alone = all(dist.get_world_size(p.ds_process_group) == 1 for p in params)
    if not alone or any(p.nvme_swapper is not None or p.ds_tensor.device != _device() for p in params):
        return
    not_there = param_status("NOT_AVAILABLE")

    def reset_step() -> None:
        _Whole([p for p in params if p.ds_status == not_there]).wait()

    def do_nothing(submodule: Any, forward: bool = False) -> None:
        pass

    coordinator = offload.get_param_coordinator()
    coordinator.reset_step = reset_step
    coordinator.fetch_sub_module = coordinator.release_sub_module = do_nothing
    # Those that DeepSpeed would gather again, into memory of their own, after each step.
    zero_optimizer.persistent_parameters = []


def parameter_offload(zero_optimizer: Any) -> Any:
    """What has the hooks: DeepSpeed's optimizer of stage 3 holds one; for a frozen model it stands in its place."""
    return getattr(zero_optimizer, "parameter_offload", zero_optimizer)


_ALIGNED = 128
"""Bytes; kernels and compiled graphs expect a weight to begin at such an address."""


class _Gathers:
    """How the parameters of one module are gathered and let go of."""

    def __init__(self, module: nn.Module) -> None:
        self._under_way: MutableMapping[Any, Any] = getattr(module, "ds_inflight_param_registry", {})
        self._params: list[Any] = list(module.parameters())
        # Looked up for every parameter in every pass. None: left to DeepSpeed.
        self._kinds: dict[int, Any] = {p.ds_id: _kind(p) for p in self._params}
        self._buckets: dict[tuple[int, ...], _Bucket] = {}

    def are_alike(self, params: Iterable[Any]) -> bool:
        """Whether one collective can carry them."""
        kinds = {self._kinds.get(p.ds_id) for p in params}
        return len(kinds) == 1 and None not in kinds

    def take_over(self, parameter: Any) -> None:
        """Put the functions below in the place of DeepSpeed's methods of this parameter."""
        gather: Callable[..., Any] = parameter.all_gather_coalesced
        partition: Callable[..., None] = parameter.partition
        there, not_there = param_status("AVAILABLE"), param_status("NOT_AVAILABLE")
        nowhere = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
        ours = self._kinds[parameter.ds_id] is not None

        def all_gather_coalesced(params: Iterable[Any], safe_mode: bool = False, quantize: bool = False) -> Any:
            if not isinstance(params, Sequence):
                params = list(params)
            if not params or safe_mode or quantize or not self.are_alike(params):
                params = sorted(params, key=lambda p: int(p.ds_id))
                return gather(params, safe_mode=safe_mode, quantize=quantize)
            bucket = self._bucket(params)
            return _Whole(bucket.params) if bucket.world_size == 1 else _Gathered(bucket, self._under_way)

        def let_go(
            param_list: Any = None, hierarchy: int = 0, has_been_updated: bool = False, free_data: bool = True
        ) -> None:
            """What DeepSpeed does when a shard is up to date, without asking for all that could be different."""
            if (
                not ours
                or param_list is not None
                or has_been_updated
                or not free_data
                or parameter.ds_status != there
                or parameter.ds_active_sub_modules
            ):
                partition(param_list, hierarchy=hierarchy, has_been_updated=has_been_updated, free_data=free_data)
                return
            _used_here(parameter.data)
            parameter.data = nowhere
            parameter.ds_status = not_there

        parameter.all_gather_coalesced = all_gather_coalesced
        parameter.partition = let_go

    def let_go_of_all(self) -> None:
        """What of the parameters is left when the step begins: those that stay until then, and what was sent for in
        vain."""
        not_there = param_status("NOT_AVAILABLE")
        for param in self._params:
            param.ds_active_sub_modules.clear()
            if param.ds_status == not_there:
                continue
            if param in self._under_way:
                self._under_way.pop(param).wait()
            param.partition()
            if param.ds_status != not_there:
                raise EngineError(f"{param.ds_summary()} was to be released")

    def _bucket(self, params: Sequence[Any]) -> _Bucket:
        """Each step gathers the same ones together."""
        ids = tuple(sorted(p.ds_id for p in params))
        if ids not in self._buckets:
            self._buckets[ids] = _Bucket(sorted(params, key=lambda p: int(p.ds_id)))
        return self._buckets[ids]


def _kind(param: Any) -> Any:
    """Equal for parameters that one collective can carry; None for what is left to DeepSpeed."""
    shard: Tensor | None = param.ds_tensor
    if param.nvme_swapper is not None or shard is None or param.ds_secondary_tensor is not None:
        return None
    return (param.dtype, param.ds_process_group) if param.dtype == shard.dtype else None


class _Bucket:
    """Parameters that one collective gathers, in its order, and how they lie in memory."""

    def __init__(self, params: Sequence[Any]) -> None:
        first = params[0]
        self.params = params
        self.dtype: torch.dtype = first.dtype
        self.group: dist.ProcessGroup = first.ds_process_group
        self.world_size = dist.get_world_size(self.group)
        self.rank = dist.get_rank(self.group)
        self.shard_sizes = [int(p.ds_tensor.ds_numel) for p in params]
        """Elements, padded where ranks have no equal shares."""
        sharing: dict[Any, list[int]] = {}
        for index, param in enumerate(params):
            sharing.setdefault(self._sharing(index, param), []).append(index)
        self._storages = [(places, *self._views(places)) for places in sharing.values()]

    def _sharing(self, index: int, param: Any) -> Any:
        """Equal for parameters that come and go together, which so may share a storage: those that stay until the step,
        or the others of one layer."""
        whole = self.shard_sizes[index] * self.world_size
        if whole != param.ds_numel or whole * param.dtype.itemsize % _ALIGNED:
            return index
        return "stay" if param.ds_persist else ("layer", id(getattr(param, "ds_z3_leaf_module", param)))

    def _views(self, places: Sequence[int]) -> tuple[int, list[Tensor], list[Tensor]]:
        """Elements of a storage for the parameters at these places; the shapes of what the ranks have of each; those of
        the parameters, without the padding that one with a storage of its own may have at its end."""
        sizes = [self.shard_sizes[place] for place in places]
        by_rank = [torch.empty(self.world_size, size, device="meta") for size in sizes]
        whole = [torch.empty(self.params[place].ds_shape, device="meta") for place in places]
        return self.world_size * sum(sizes), by_rank, whole

    def put_together(self, everyone: Tensor) -> list[Tensor]:
        """[world size, the shards of one rank] -> the parameters; a kernel for all, and a few calls for all views."""
        pieces: list[Any] = [None] * len(self.params)
        wholes: list[Any] = [None] * len(self.params)
        unflatten = torch._C._nn.unflatten_dense_tensors
        for places, num_elements, by_rank, whole in self._storages:
            flat = everyone.new_empty(num_elements)
            for place, piece, view in zip(places, unflatten(flat, by_rank), unflatten(flat, whole), strict=True):
                pieces[place], wholes[place] = piece, view
        torch.split_with_sizes_copy(everyone, self.shard_sizes, dim=1, out=pieces)
        return wholes


class _Whole:
    """One rank has all of it: a view of its shard, or a copy of it from the CPU."""

    def __init__(self, params: Sequence[Any]) -> None:
        inflight = param_status("INFLIGHT")
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
        available = param_status("AVAILABLE")
        for param in self._params:
            param.ds_status = available
        self._params = ()


class _Gathered:
    """A collective under way."""

    def __init__(self, bucket: _Bucket, under_way: MutableMapping[Any, Any]) -> None:
        self._bucket: _Bucket | None = bucket
        self._under_way = under_way
        device = _device()
        shards = [p.ds_tensor.data for p in bucket.params]
        if any(shard.device != device for shard in shards):
            shards = [shard.to(device, non_blocking=True) for shard in shards]
        # [world size, the shards of one rank]
        self._everyone = torch.empty(bucket.world_size, sum(bucket.shard_sizes), dtype=bucket.dtype, device=device)
        own = self._everyone[bucket.rank]
        torch.cat(shards, out=own)
        self._work = all_gather_single(self._everyone.view(-1), own, group=bucket.group, async_op=True)
        inflight = param_status("INFLIGHT")
        for param in bucket.params:
            param.ds_status = inflight

    def wait(self, handle_dependency: bool | None = None) -> None:
        """Put the parameters together. What is copied from may be reused once the stream has come that far.

        Args:
            handle_dependency: given, whatever it is, where the coordinator would go on to wait for the others one by
                one, with an event for each; so these are taken off its list.
        """
        bucket, self._bucket = self._bucket, None
        if bucket is None:
            return
        self._work.wait()
        available = param_status("AVAILABLE")
        for param, whole in zip(bucket.params, bucket.put_together(self._everyone), strict=True):
            param.data = whole
            param.ds_status = available
            if handle_dependency is not None:
                self._under_way.pop(param, None)
        _used_here(self._everyone)
        del self._everyone, self._work


def _used_here(tensor: Tensor) -> None:
    """Have its memory wait for the current stream before it is given away: it is of the stream of the gathers."""
    if tensor.is_cuda:
        tensor.record_stream(torch.cuda.current_stream(tensor.get_device()))  # by number: without one it looks for long


@cache
def param_status(name: str) -> Any:
    """DeepSpeed's: AVAILABLE, NOT_AVAILABLE or INFLIGHT."""
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

    return ZeroParamStatus[name]


def _device() -> torch.device:
    from deepspeed.accelerator import get_accelerator

    return torch.device(get_accelerator().current_device_name())
