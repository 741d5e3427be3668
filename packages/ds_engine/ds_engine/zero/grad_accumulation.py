"""Gradients of stage 2 on their way from the backward pass into the fp32 sum that this rank keeps, in few kernels.

DeepSpeed copies every gradient into a bucket, divides the bucket by the number of ranks (one, too), copies it once more
to reduce it, and then takes each gradient out by itself: cast to fp32, added to zeros, written back to the bucket. Here
a bucket is a list of gradients. Several ranks lay it end to end, divide and reduce it, as DeepSpeed does, but while the
backward pass goes on. When the next bucket is on its way, what belongs to this rank is cast straight into its place:
all of a bucket in one kernel when it is the first micro batch's, else in one call. The sums are the same to the
last bit (a zero may have the other sign).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["sum_gradients_in_place"]


def sum_gradients_in_place(optimizer: Any) -> None:
    """Let DeepSpeed's optimizer of stage 2 with fp32 accumulation on the device work as said above.

    Any other object is left as it is: so are optimizer offload and reduction during the backward pass.
    """
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    if (
        type(optimizer) is DeepSpeedZeroOptimizer
        and optimizer.partition_gradients
        and optimizer.dtype != optimizer.gradient_accumulation_dtype == torch.float32
        and not optimizer.cpu_offload
        and not optimizer.overlap_comm
    ):
        _GradientSum(optimizer).install()


_Place = tuple[int, int, int]
"""A gradient's parameter group, number within it, and id."""

_Sent = tuple[dist.Work, list[_Place], Tensor, list[int]]
"""A bucket on its way: the collective, whose gradients they are, these laid end to end, elements of each."""


class _GradientSum:
    """Takes the place of the methods of DeepSpeed's optimizer that fill and empty its buckets."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._world_size: int = dist.get_world_size(optimizer.dp_process_group)
        self._under_way: _Sent | None = None

    def install(self) -> None:
        self._optimizer.setup_buckets = self._begin
        self._optimizer.reduce_independent_p_g_buckets_and_remove_grads = self._take
        self._optimizer.reduce_ipg_grads = self._reduce

    def _begin(self) -> None:
        """A backward pass begins (called before every gradient). DeepSpeed would allocate a bucket."""
        if not self._optimizer.ready_for_gradients:
            self._optimizer.micro_step_id += 1
            self._optimizer.ready_for_gradients = True

    def _take(self, param: Any, group: int) -> None:
        """The gradient of `param` is there: into the bucket with it, after the bucket is emptied if it does not fit."""
        optimizer = self._optimizer
        if param.numel() == 0:
            return
        comm_dtype = optimizer.get_param_comm_dtype(param)
        bucket = optimizer.ipg_buckets[comm_dtype]
        if bucket.elements + param.numel() > optimizer.reduce_bucket_size:
            self._reduce(comm_dtype)
        param_id = optimizer.get_param_id(param)
        assert not optimizer.params_already_reduced[param_id], "a gradient came twice in one backward pass"
        bucket.params.append((group, param.param_idx_in_group, param_id))
        bucket.grads.append(param.grad.reshape(-1))
        bucket.elements += param.numel()
        param.grad = None

    def _reduce(self, comm_dtype: torch.dtype | None = None) -> None:
        """Empty the bucket of this dtype, or all at the end of the backward pass."""
        optimizer = self._optimizer
        for dtype in list(optimizer.ipg_buckets) if comm_dtype is None else [comm_dtype]:
            bucket = optimizer.ipg_buckets[dtype]
            if bucket.grads and self._world_size == 1:
                self._add(bucket.params, bucket.grads)
            elif bucket.grads:
                self._send(list(bucket.params), bucket.grads, dtype)
            for _, _, param_id in bucket.params:
                optimizer.params_already_reduced[param_id] = True
            bucket.clear()
        if comm_dtype is None:
            self._receive()

    def _send(self, params: list[_Place], gradients: list[Tensor], dtype: torch.dtype) -> None:
        """Have the mean over ranks of each computed (the engine multiplies losses by their number) and take in what was
        sent before. Empties `gradients`; a single one may itself be what travels."""
        sizes = [gradient.numel() for gradient in gradients]
        flat = torch.cat(gradients) if len(gradients) > 1 else gradients[0]
        gradients.clear()
        flat = flat.to(dtype).div_(self._world_size)
        work = dist.all_reduce(flat, group=self._optimizer.dp_process_group, async_op=True)
        assert work is not None, "asynchronous, and this rank is in the group"
        self._receive((work, params, flat, sizes))

    def _receive(self, next_one: _Sent | None = None) -> None:
        """Take in the bucket that is on its way, if there is one; now `next_one` is."""
        sent, self._under_way = self._under_way, next_one
        if sent is not None:
            work, params, flat, sizes = sent
            work.wait()
            self._add(params, list(flat.split(sizes)))

    def _add(self, params: list[_Place], gradients: list[Tensor]) -> None:
        """Add this rank's parts of `gradients` to the fp32 sum, which begins with the first."""
        first: tuple[list[Tensor], list[Tensor]] = [], []
        later: tuple[list[Tensor], list[Tensor]] = [], []
        for (group, _, param_id), gradient in zip(params, gradients, strict=True):
            shares = self._shares(group)
            totals, parts = later if param_id in shares else first
            if param_id not in shares:
                shares[param_id] = self._share(group, param_id, gradient.numel())
            share = shares[param_id]
            if share is not None:
                total, start = share
                totals.append(total)
                parts.append(gradient.narrow(0, start, total.numel()))
        if first[0]:
            torch._foreach_copy_(*first)
        if later[0]:
            torch._foreach_add_(*later)

    def _shares(self, group: int) -> dict[int, tuple[Tensor, int] | None]:
        """`_share` of each parameter that is in the sum; kept with it, for DeepSpeed makes a sum anew for each step."""
        gradient_sum = self._optimizer._get_compact_grad_partition_buffer(group)
        shares: dict[int, tuple[Tensor, int] | None] = vars(gradient_sum).setdefault("shares", {})
        return shares

    def _share(self, group: int, param_id: int, num_elements: int) -> tuple[Tensor, int] | None:
        """(Where this rank adds up its part of a gradient, where that begins in the gradient); None if it has none."""
        optimizer = self._optimizer
        rank = dist.get_rank(optimizer.real_dp_process_group[group])
        start = optimizer.grad_start_offset[group][rank].get(param_id)
        if start is None:
            return None
        room = optimizer.partition_size[group] - optimizer.grad_partition_insertion_offset[group][rank][param_id]
        size = min(num_elements - start, room)
        return optimizer._get_compact_grad_partition_slice(group, rank, param_id, size), start
