"""Ulysses sequence parallelism: sp ranks compute one micro batch together, each on a contiguous slice of its tokens.

All layers but attention work on single tokens, so each rank computes them for its slice. Two all-to-alls around
attention exchange the split dimension: before it, T / sp tokens of all heads become all T tokens of h / sp heads; after
it, the reverse (Jacobs et al., DeepSpeed-Ulysses, arXiv:2309.14509). Each rank computes the outputs (log-probs or
values) of the targets in its slice. An all-gather gives all outputs to every rank, which calls the loss function.

Gradient: the backward pass of a rank starts from its own outputs only. Each rank thus holds the part of the gradient
that flows through its slice, and the sum over the sp ranks is the gradient of the loss, counted once.

Shapes: T tokens of the row, padded to a multiple of sp; K targets; R rows of head outputs; h heads; d head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import distributed_c10d

from ..config import check_divides, check_heads, kv_copies
from ..distributed import all_gather_single
from ..upstream import FENCE

GROUPS = FENCE.patch(
    name="process groups by name",
    reason="custom operators take a group's name, because torch.compile cannot trace a group",
    otherwise="refused",
    reads={"torch.distributed.distributed_c10d": ("_resolve_process_group",)},
)


@dataclass(frozen=True, kw_only=True)
class SequenceGroup:
    """The sequence-parallel group of this rank."""

    group: dist.ProcessGroup
    rank: int
    """Rank within the group; the rank-th slice of the tokens is this rank's."""
    size: int
    """sp"""
    name: str = ""
    """torch's name of the group, by which custom operators look it up."""


def join_sequence_group(sp: int) -> SequenceGroup | None:
    """Create groups of sp consecutive ranks and return this rank's; None for sp = 1. Collective over all ranks.

    Raises:
        EngineConfigError: sp does not divide the number of ranks.
    """
    check_divides("sequence_parallel", sp, dist.get_world_size(), "ranks")
    if sp == 1:
        return None
    GROUPS.check()
    group, _ = dist.new_subgroups(group_size=sp)
    return SequenceGroup(group=group, rank=dist.get_rank() % sp, size=sp, name=str(group.group_name))


def check_model_heads(model_config: Any, sp: int) -> None:
    """`check_heads` for a Hugging Face configuration. One without a number of heads is not checked.

    Raises:
        EngineConfigError: sp does not divide the number of attention heads.
    """
    text_config = model_config.get_text_config() if hasattr(model_config, "get_text_config") else model_config
    num_heads = getattr(text_config, "num_attention_heads", None)
    if isinstance(num_heads, int):
        check_heads(num_heads, sp)


# ------------------------------------------------------------------ attention


# Custom operators, because torch.compile cannot trace torch.distributed's calls. They include the layout of the send
# buffer: a compiled kernel with a dynamic number of tokens divides by that number for each element and took 1.3 to
# 1.7 ms for 100 MB on an H200 (torch 2.11), where the transfer took 0.2 ms.


def _exchange(to_each: Tensor, group_name: str) -> Tensor:
    """All-to-all: [sp, ...], one entry for each rank -> [sp, ...], one entry from each rank."""
    from_each = torch.empty_like(to_each)
    group = cast("Any", distributed_c10d)._resolve_process_group(group_name)
    dist.all_to_all_single(from_each, to_each, group=group)
    return from_each


@torch.library.custom_op("ds_engine::to_heads", mutates_args=())
def _to_heads(parts: list[Tensor], sp: int, group_name: str) -> Tensor:
    """Tensors [T / sp, h_i, d] of this rank's tokens -> [T, sum of h_i / sp, d], this rank's heads of each tensor."""
    num_tokens, _, size = parts[0].shape
    own = [part.shape[1] // sp for part in parts]
    to_each = parts[0].new_empty(sp, num_tokens, sum(own), size)
    for slot, part, heads in zip(to_each.split(own, dim=2), parts, own, strict=True):
        slot.copy_(part.unflatten(1, (sp, heads)).transpose(0, 1))
    return _exchange(to_each, group_name).flatten(0, 1)


@torch.library.custom_op("ds_engine::to_tokens", mutates_args=())
def _to_tokens(joined: Tensor, heads: list[int], sp: int, group_name: str) -> list[Tensor]:
    """Inverse of `_to_heads`: [T, sum of h_i / sp, d] -> tensors [T / sp, h_i, d] (h_i in `heads`)."""
    from_each = _exchange(joined.contiguous().unflatten(0, (sp, -1)), group_name)
    parts = []
    for slot, count in zip(from_each.split([n // sp for n in heads], dim=2), heads, strict=True):
        whole = slot.new_empty(slot.shape[1], count, slot.shape[3])
        whole.unflatten(1, (sp, -1)).copy_(slot.transpose(0, 1))
        parts.append(whole)
    return parts


@_to_heads.register_fake
def _(parts: list[Tensor], sp: int, group_name: str) -> Tensor:
    num_tokens, _, size = parts[0].shape
    return parts[0].new_empty(sp * num_tokens, sum(part.shape[1] // sp for part in parts), size)


@_to_tokens.register_fake
def _(joined: Tensor, heads: list[int], sp: int, group_name: str) -> list[Tensor]:
    return [joined.new_empty(joined.shape[0] // sp, count, joined.shape[2]) for count in heads]


def _save_heads(ctx: Any, inputs: tuple[list[Tensor], int, str], output: Tensor) -> None:
    parts, *ctx.exchange = inputs
    ctx.heads = [part.shape[1] for part in parts]


def _save_exchange(ctx: Any, inputs: tuple[Tensor, list[int], int, str], output: list[Tensor]) -> None:
    ctx.exchange = inputs[2:]


# Both only permute elements and are inverse to each other, so each one is the other's backward.
_to_heads.register_autograd(
    lambda ctx, grad: (_to_tokens(grad, ctx.heads, *ctx.exchange), None, None), setup_context=_save_heads
)
_to_tokens.register_autograd(
    lambda ctx, grads: (_to_heads(grads, *ctx.exchange), None, None, None), setup_context=_save_exchange
)


def scatter_heads(query: Tensor, key: Tensor, value: Tensor, sp_group: SequenceGroup) -> tuple[Tensor, Tensor, Tensor]:
    """[T / sp, all heads, d] of this rank's tokens -> [T, heads / sp, d] of this rank's heads; one collective."""
    copies = kv_copies(query.shape[1], key.shape[1], sp_group.size)
    if copies > 1:
        key, value = key.repeat_interleave(copies, dim=1), value.repeat_interleave(copies, dim=1)
    whole = [query, key, value]
    joined: Tensor = _to_heads(whole, sp_group.size, sp_group.name)
    query, key, value = joined.split([x.shape[1] // sp_group.size for x in whole], dim=1)
    return query, key, value


def gather_heads(out: Tensor, sp_group: SequenceGroup) -> Tensor:
    """[T, heads / sp, d] of this rank's heads -> [T / sp, all heads, d] of this rank's tokens; one collective."""
    (whole,) = _to_tokens(out, [out.shape[1] * sp_group.size], sp_group.size, sp_group.name)
    return cast("Tensor", whole)


# -------------------------------------------------------------------- targets


@dataclass(frozen=True, kw_only=True)
class TargetShare:
    """The targets that this rank computes, and the places of all targets in the gathered outputs."""

    own_k: Tensor
    """int64 indices of the targets in this rank's slice; may be empty."""
    width: int
    """Number of outputs each rank sends: the largest number of targets on a rank, at least 1."""
    source_K: Tensor
    """int64 positions of the K outputs among the sp * width gathered ones."""


def share_targets(target_index_K: Tensor, *, tokens_per_rank: int, sequence_rank: int, sp: int) -> TargetShare:
    """Assign each target to the rank whose slice holds its index. Targets may be in any order. A pure function."""
    owner_K = target_index_K // tokens_per_rank
    order_K = owner_K.argsort(stable=True)
    counts_P = owner_K.bincount(minlength=sp)
    starts_P = counts_P.cumsum(0) - counts_P
    width = max(1, int(counts_P.max()))
    place_K = torch.empty_like(order_K)
    place_K[order_K] = torch.arange(len(order_K), device=order_K.device) - starts_P[owner_K[order_K]]
    start = int(starts_P[sequence_rank])
    return TargetShare(
        own_k=order_K[start : start + int(counts_P[sequence_rank])], width=width, source_K=owner_K * width + place_K
    )


class _GatherOutputs(torch.autograd.Function):
    """All-gather [R, W] -> [sp, R, W]. Backward keeps this rank's part: the other ranks start from their own."""

    @staticmethod
    def forward(ctx: Any, rows_RW: Tensor, sp_group: SequenceGroup) -> Tensor:
        ctx.rank = sp_group.rank
        gathered = rows_RW.new_empty(sp_group.size * rows_RW.shape[0], rows_RW.shape[1])
        all_gather_single(gathered, rows_RW.contiguous(), group=sp_group.group)
        return gathered.view(sp_group.size, *rows_RW.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0][ctx.rank], None


def gather_outputs(rows_Rk: Tensor, share: TargetShare, sp_group: SequenceGroup) -> Tensor:
    """[R, k] outputs of this rank's k targets (one dummy output if it has none) -> [R, K] outputs of all targets."""
    rows_RW = F.pad(rows_Rk, (0, share.width - rows_Rk.shape[1]))
    gathered: Tensor = _GatherOutputs.apply(rows_RW, sp_group)
    return gathered.transpose(0, 1).flatten(1).index_select(1, share.source_K)
