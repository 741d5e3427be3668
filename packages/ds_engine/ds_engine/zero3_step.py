"""What stage 3 does with gradients in a handful of kernels, where they stay on the device.

DeepSpeed adds every gradient by itself to those of earlier micro batches, and copies all of them once more for the
optimizer. The device is done with each of these sooner than the CPU can ask for the next. Here one call does so for a
bucket, or for all. The collectives stay DeepSpeed's.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["batch_zero3_step"]

_PRIVATE = "_DeepSpeedZeroOptimizer_Stage3__"


def batch_zero3_step(optimizer: Any) -> None:
    """Give DeepSpeed's stage 3 optimizer the methods below; any other object, and one offloaded, is left as it is."""
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

    if type(optimizer) is not DeepSpeedZeroOptimizer_Stage3 or optimizer.offload_optimizer:
        return
    if dist.get_world_size(optimizer.dp_process_group) == 1:
        setattr(optimizer, f"{_PRIVATE}avg_scatter_grads", _own_gradients)
    optimizer.reduce_ready_partitions_and_remove_grads = partial(_collect, optimizer)
    optimizer.partition_grads = partial(_add_up, optimizer)
    optimizer.independent_gradient_partition_epilogue = partial(_end_backward, optimizer)
    if optimizer.gradient_accumulation_dtype == torch.float32:
        optimizer._prepare_fp32_grad_for_sub_group = partial(_hand_over, optimizer)


def _collect(optimizer: Any, param: Any) -> None:
    """Take in the gradient of `param`; DeepSpeed's buckets, without a wait of its stream for each that goes in."""
    dtype = optimizer.communication_data_type
    bucket = optimizer.ipg_buckets[dtype]
    if bucket.params and bucket.elements + param.ds_numel > optimizer.reduce_bucket_size:
        _reduce(optimizer, dtype)
    bucket.params.append(param)
    bucket.process_group = param.ds_process_group
    bucket.elements += param.ds_numel


def _reduce(optimizer: Any, dtype: torch.dtype) -> None:
    stream = optimizer.reduce_and_partition_stream
    if isinstance(stream, torch.cuda.Stream):
        stream.wait_stream(torch.cuda.current_stream())
    getattr(optimizer, f"{_PRIVATE}reduce_and_partition_ipg_grads")(dtype)


def _own_gradients(params: Sequence[Any], communication_data_type: torch.dtype) -> list[Tensor]:
    """The sum over one rank."""
    return [param.grad.view(-1) for param in params]


def _add_up(optimizer: Any, params: Sequence[Any], partitions: Sequence[Tensor]) -> list[Tensor]:
    """Add this rank's shares of gradients, flat, to those of earlier micro batches, or put them in their place."""
    shares = getattr(optimizer, f"{_PRIVATE}param_id_to_grad_partition")
    rank = dist.get_rank(optimizer.dp_process_group)
    sums, new = [], []
    for param, partition in zip(params, partitions, strict=True):
        if partition.is_cuda:
            param.grad.record_stream(torch.cuda.current_stream())
        param.grad = None
        if param.partition_numel() * rank < param.ds_numel:  # else all of it is padding
            sums.append(shares[param.ds_id][: partition.numel()])
            new.append(partition)
    if sums and optimizer.micro_step_id == 0:
        torch._foreach_copy_(sums, new)
    elif sums:
        torch._foreach_add_(sums, [each.to(sums[0].dtype) for each in new])
    return sums


def _end_backward(optimizer: Any) -> None:
    """Reduce what is left in the buckets. What comes after waits on the device, not on the CPU."""
    for dtype in sorted(optimizer.ipg_buckets, key=str):
        _reduce(optimizer, dtype)
    stream = optimizer.reduce_and_partition_stream
    if isinstance(stream, torch.cuda.Stream):
        torch.cuda.current_stream().wait_stream(stream)
    optimizer.params_already_reduced = dict.fromkeys(optimizer.params_already_reduced, False)
    shares = getattr(optimizer, f"{_PRIVATE}param_id_to_grad_partition")
    for index, sub_group in enumerate(optimizer.fp16_groups):
        optimizer.averaged_gradients[index] = [shares[param.ds_id] for param in sub_group]
    optimizer._epilogue_ran_this_backward = True


def _hand_over(optimizer: Any, sub_group_id: int) -> None:
    """The sums are as long and in the same order as what the optimizer steps, so it gets them as they lie."""
    start = sum(len(flat) for flat in optimizer.fp32_partitioned_groups_flat[:sub_group_id])
    flat = optimizer.fp32_partitioned_groups_flat[sub_group_id]
    flat.grad = optimizer.grad_partitions_flat_buffer[start : start + len(flat)]
    optimizer.averaged_gradients[sub_group_id] = None
