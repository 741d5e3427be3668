"""Gradient accumulation of stage 2: from the backward pass into this rank's fp32 accumulator, in few kernels.

DeepSpeed copies every gradient into a bucket, divides the bucket by the number of ranks (even by one), copies it again
to reduce it, and then casts each gradient to fp32, adds it to zeros and writes it back to the bucket, one by one. Here
a bucket is a list of gradients. Several ranks concatenate, divide and reduce it like DeepSpeed, but asynchronously
during the backward pass. While the next bucket is being reduced, this rank's part of the previous one is cast directly
into the accumulator: in one kernel per bucket for the first micro batch, in one foreach call for later ones. The
result is bit-identical (a zero may have the other sign).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..upstream import FENCE

COUNT = FENCE.patch(
    name="number of micro batches, counted by DeepSpeed",
    reason="zero.step_each_micro: the number differs between mini batches, and DeepSpeed's default keeps only the last",
    otherwise="refused",
    replaces={
        "deepspeed.runtime.engine:DeepSpeedEngine": ("micro_steps",),
        "deepspeed.runtime.config:DeepSpeedConfig": ("gradient_accumulation_steps",),
    },
    reads={"deepspeed.runtime.engine:DeepSpeedEngine": ("_config",)},
)
WAITING = FENCE.patch(
    name="gradients that wait for a step of their own",
    reason="accumulate and step are calls of their own: nobody knows at a backward pass that it is the last",
    otherwise="refused",
    replaces={
        "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer": ("clip_grad",),
        "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3": ("clip_grad",),
    },
    reads={
        "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer": ("finalize_gradient_accumulation_boundary()",),
        "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3": ("finalize_gradient_accumulation_boundary()",),
    },
)
GRADIENTS = FENCE.patch(
    name="gradient accumulation of stage 2",
    reason="one kernel per bucket casts gradients into the fp32 accumulator, while the next bucket is reduced",
    otherwise="stock path",
    replaces={
        "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer": (
            "setup_buckets()",
            "reduce_independent_p_g_buckets_and_remove_grads(param, i)",
            "reduce_ipg_grads(comm_dtype)",
        )
    },
    reads={
        "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer": (
            *("ready_for_gradients", "micro_step_id", "ipg_buckets", "reduce_bucket_size", "params_already_reduced"),
            *("dp_process_group", "real_dp_process_group", "grad_start_offset", "partition_size"),
            *("grad_partition_insertion_offset", "get_param_comm_dtype(param)", "get_param_id(param)"),
            "_get_compact_grad_partition_buffer(group_idx)",
            "_get_compact_grad_partition_slice(group_idx, partition_id, param_id, num_elements)",
        ),
        "deepspeed.runtime.zero.stage_1_and_2:IPGBucket": ("params", "grads", "elements", "clear()"),
        "torch": ("_foreach_copy_", "_foreach_add_"),
    },
)


def set_num_micro_batches(deepspeed_engine: Any, num_micro_batches: int) -> None:
    """Start a mini batch whose micro batches DeepSpeed itself counts."""
    COUNT.check()
    COUNT.replace(deepspeed_engine._config, gradient_accumulation_steps=num_micro_batches)
    COUNT.replace(deepspeed_engine, micro_steps=0)


def fuse_grad_accumulation(zero_optimizer: Any) -> None:
    """Replace gradient accumulation of DeepSpeed's stage 2 optimizer.

    Args:
        zero_optimizer: of an engine whose settings have `EngineConfig.fuses_grad_accumulation`.
    """
    if GRADIENTS.check():
        accumulation = _GradAccumulation(zero_optimizer)
        GRADIENTS.replace(
            zero_optimizer,
            setup_buckets=accumulation.begin,
            reduce_independent_p_g_buckets_and_remove_grads=accumulation.add_to_bucket,
            reduce_ipg_grads=accumulation.reduce,
        )


_ParamKey = tuple[int, int, int]
"""Parameter group, index within the group, and id of a parameter."""

_PendingBucket = tuple[dist.Work, list[_ParamKey], Tensor, list[int]]
"""A bucket being reduced: the collective, its parameters, their concatenated gradients, elements of each."""


class _GradAccumulation:
    """Replaces the methods of DeepSpeed's optimizer that fill and reduce its buckets."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._world_size: int = dist.get_world_size(optimizer.dp_process_group)
        self._pending: _PendingBucket | None = None

    def begin(self) -> None:
        """Start a backward pass; called before every gradient. DeepSpeed would allocate a bucket."""
        if not self._optimizer.ready_for_gradients:
            self._optimizer.micro_step_id += 1
            self._optimizer.ready_for_gradients = True

    def add_to_bucket(self, param: Any, group: int) -> None:
        """Add the gradient of `param` to the bucket; reduce the bucket before if the gradient does not fit."""
        optimizer = self._optimizer
        if param.numel() == 0:
            return
        comm_dtype = optimizer.get_param_comm_dtype(param)
        bucket = optimizer.ipg_buckets[comm_dtype]
        if bucket.elements + param.numel() > optimizer.reduce_bucket_size:
            self.reduce(comm_dtype)
        param_id = optimizer.get_param_id(param)
        assert not optimizer.params_already_reduced[param_id], "two gradients of a parameter in one backward pass"
        bucket.params.append((group, param.param_idx_in_group, param_id))
        bucket.grads.append(param.grad.reshape(-1))
        bucket.elements += param.numel()
        param.grad = None

    def reduce(self, comm_dtype: torch.dtype | None = None) -> None:
        """Reduce the bucket of this dtype; without a dtype, all buckets, at the end of the backward pass."""
        optimizer = self._optimizer
        for dtype in list(optimizer.ipg_buckets) if comm_dtype is None else [comm_dtype]:
            bucket = optimizer.ipg_buckets[dtype]
            if bucket.grads and self._world_size == 1:
                self._accumulate(bucket.params, bucket.grads)
            elif bucket.grads:
                self._start_reduce(list(bucket.params), bucket.grads, dtype)
            for _, _, param_id in bucket.params:
                optimizer.params_already_reduced[param_id] = True
            bucket.clear()
        if comm_dtype is None:
            self._finish_reduce()

    def _start_reduce(self, params: list[_ParamKey], gradients: list[Tensor], dtype: torch.dtype) -> None:
        """Start averaging `gradients` over ranks (the engine multiplies losses by the number of ranks), then
        accumulate the previous bucket. Empties `gradients`; a single gradient is reduced in place."""
        sizes = [gradient.numel() for gradient in gradients]
        flat = torch.cat(gradients) if len(gradients) > 1 else gradients[0]
        gradients.clear()
        flat = flat.to(dtype).div_(self._world_size)
        work = dist.all_reduce(flat, group=self._optimizer.dp_process_group, async_op=True)
        assert work is not None, "asynchronous, and this rank is in the group"
        self._finish_reduce((work, params, flat, sizes))

    def _finish_reduce(self, next_bucket: _PendingBucket | None = None) -> None:
        """Wait for the pending bucket, if any, and accumulate it; `next_bucket` becomes the pending one."""
        pending, self._pending = self._pending, next_bucket
        if pending is not None:
            work, params, flat, sizes = pending
            work.wait()
            self._accumulate(params, list(flat.split(sizes)))

    def _accumulate(self, params: list[_ParamKey], gradients: list[Tensor]) -> None:
        """Add this rank's partition of `gradients` to the fp32 accumulator; the first micro batch overwrites it."""
        first: tuple[list[Tensor], list[Tensor]] = [], []
        later: tuple[list[Tensor], list[Tensor]] = [], []
        for (group, _, param_id), gradient in zip(params, gradients, strict=True):
            partitions = self._partitions(group)
            totals, parts = later if param_id in partitions else first
            if param_id not in partitions:
                partitions[param_id] = self._partition(group, param_id, gradient.numel())
            partition = partitions[param_id]
            if partition is not None:
                total, start = partition
                totals.append(total)
                parts.append(gradient.narrow(0, start, total.numel()))
        if first[0]:
            torch._foreach_copy_(*first)
        if later[0]:
            torch._foreach_add_(*later)

    def _partitions(self, group: int) -> dict[int, tuple[Tensor, int] | None]:
        """`_partition` by parameter id, stored on DeepSpeed's buffer because it is replaced in every step."""
        buffer = self._optimizer._get_compact_grad_partition_buffer(group)
        partitions: dict[int, tuple[Tensor, int] | None] = vars(buffer).setdefault("_ds_engine_partitions", {})
        return partitions

    def _partition(self, group: int, param_id: int, num_elements: int) -> tuple[Tensor, int] | None:
        """(accumulator of this rank's part of a gradient, start of that part in the gradient); None if it has none."""
        optimizer = self._optimizer
        rank = dist.get_rank(optimizer.real_dp_process_group[group])
        start = optimizer.grad_start_offset[group][rank].get(param_id)
        if start is None:
            return None
        room = optimizer.partition_size[group] - optimizer.grad_partition_insertion_offset[group][rank][param_id]
        size = min(num_elements - start, room)
        return optimizer._get_compact_grad_partition_slice(group, rank, param_id, size), start
