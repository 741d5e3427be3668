"""What stage 3 does with gradients in a handful of kernels, where they stay on the device.

DeepSpeed cuts every gradient into shares by itself, adds it by itself to those of earlier micro batches, and copies all
of them once more for the optimizer. The device is done with each of these sooner than the CPU can ask for the next.
Here one call does so for a bucket, or for all. Collectives and what they carry stay DeepSpeed's. The sums, in fp32
twice as large as the weights' shards, are there from the first gradient to the step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..collectives import reduce_scatter_single

__all__ = ["batch_zero3_step"]

_PRIVATE = "_DeepSpeedZeroOptimizer_Stage3__"

_READERS = ("_get_fp32_grad_state_partition", "update_fp32_grad_for_param_vectorized", "offload_states")
"""Other methods that look into the sums, for DeepSpeed's tools (`safe_get_full_grad`, ...), at any time."""


def batch_zero3_step(optimizer: Any) -> None:
    """Give DeepSpeed's stage 3 optimizer the methods below; any other object, and one offloaded, is left as it is."""
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

    if type(optimizer) is not DeepSpeedZeroOptimizer_Stage3 or optimizer.offload_optimizer:
        return
    setattr(optimizer, f"{_PRIVATE}avg_scatter_grads", _scatter)
    optimizer.reduce_ready_partitions_and_remove_grads = partial(_collect, optimizer)
    optimizer.partition_grads = partial(_add_up, optimizer)
    optimizer.independent_gradient_partition_epilogue = partial(_end_backward, optimizer)
    optimizer._post_step = partial(_end_step, optimizer, optimizer._post_step)
    if optimizer.gradient_accumulation_dtype == torch.float32:
        optimizer._prepare_fp32_grad_for_sub_group = partial(_hand_over, optimizer)
    for name in _READERS:
        setattr(optimizer, name, partial(_read_sums, optimizer, getattr(optimizer, name)))
    _free_sums(optimizer)


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
    _make_room_for_sums(optimizer)
    stream = optimizer.reduce_and_partition_stream
    if isinstance(stream, torch.cuda.Stream):
        stream.wait_stream(torch.cuda.current_stream())
    getattr(optimizer, f"{_PRIVATE}reduce_and_partition_ipg_grads")(dtype)


def _scatter(params: Sequence[Any], dtype: torch.dtype) -> list[Tensor]:
    """The mean over ranks (the engine multiplies losses by their number) of this rank's shares of the gradients, flat
    and without padding, computed in `dtype`."""
    gradients = [param.grad.view(-1) for param in params]
    group = params[0].ds_process_group
    world_size, rank = dist.get_world_size(group), dist.get_rank(group)
    if world_size == 1:
        return gradients
    rows = [_by_rank(gradient, world_size) for gradient in gradients]
    flat = (torch.cat(rows, dim=1) if len(rows) > 1 else rows[0]).to(dtype).div_(world_size)
    reduce_scatter_single(flat[rank], flat.view(-1), group=group)
    shares = flat[rank].split([row.shape[1] for row in rows])
    sizes = [_share_size(gradient, world_size, rank) for gradient in gradients]
    return [share[:size] if len(share) > size else share for share, size in zip(shares, sizes, strict=True)]


def _by_rank(gradient: Tensor, world_size: int) -> Tensor:
    """[world size, share], the end padded where the ranks have no equal shares."""
    missing = -gradient.numel() % world_size
    if missing:
        gradient = torch.nn.functional.pad(gradient, (0, missing))
    return gradient.view(world_size, -1)


def _share_size(gradient: Tensor, world_size: int, rank: int) -> int:
    """Elements, without padding."""
    size = -(-gradient.numel() // world_size)
    return max(0, min(size, gradient.numel() - rank * size))


def _add_up(optimizer: Any, params: Sequence[Any], partitions: Sequence[Tensor]) -> list[Tensor]:
    """Add this rank's shares of gradients, flat, to those of earlier micro batches, or put them in their place."""
    shares = getattr(optimizer, f"{_PRIVATE}param_id_to_grad_partition")
    stream = torch.cuda.current_stream() if partitions[0].is_cuda else None
    sums, new = [], []
    for param, partition in zip(params, partitions, strict=True):
        if stream is not None:
            param.grad.record_stream(stream)
        param.grad = None
        if partition.numel() > 0:  # else all of it is padding
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


def _read_sums(optimizer: Any, reader: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Where there are no gradients it finds zeros; what has no memory cannot be read."""
    _make_room_for_sums(optimizer)
    return reader(*args, **options)


def _end_step(optimizer: Any, post_step: Callable[..., None], *args: Any) -> None:
    post_step(*args)
    _free_sums(optimizer)


def _free_sums(optimizer: Any) -> None:
    """Between the step and the next gradients nothing is in the sums, and activations can have their memory. Views of
    them stay valid: DeepSpeed holds one for each parameter."""
    optimizer.grad_partitions_flat_buffer.untyped_storage().resize_(0)


def _make_room_for_sums(optimizer: Any) -> None:
    """On the stream of the backward pass, as all else that comes and goes with it. Zeros: padding is never written."""
    sums: Tensor = optimizer.grad_partitions_flat_buffer
    storage = sums.untyped_storage()
    if storage.nbytes() == 0:
        storage.resize_(sums.numel() * sums.element_size())
        sums.zero_()
