"""Ulysses sequence parallelism: sp ranks compute one micro batch together, each a contiguous slice of its tokens.

Everything but attention looks at one token at a time, so a rank computes it for its slice alone. Around attention two
all-to-alls swap what is split: before it each rank gives away the tokens' other heads and gets all tokens of its own
heads, after it the reverse (Jacobs et al., DeepSpeed-Ulysses, arXiv:2309.14509). Each rank then answers for the targets
in its slice, log-prob work included, and all answers are handed to every rank, which calls the loss function with them.

The gradient: a rank's backward pass starts at its own answers only, so a rank ends with the part of the gradient that
came through its slice, and the sum over the sp ranks is that of the loss, counted once.

Shapes: T tokens of the row, padded to a multiple of sp; K targets; R rows a head answers with; h heads, d head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import distributed_c10d

from .errors import EngineConfigError

__all__ = [
    "SequenceGroup",
    "TargetShare",
    "check_heads",
    "gather_answers",
    "gather_heads",
    "join_sequence_group",
    "kv_copies",
    "scatter_heads",
    "share_targets",
]


@dataclass(frozen=True, kw_only=True)
class SequenceGroup:
    """The ranks that share a micro batch, as one of them sees it."""

    group: dist.ProcessGroup
    rank: int
    """This rank's number in the group: it has the rank-th slice."""
    size: int
    """sp"""
    name: str = ""
    """torch's of the group."""


def join_sequence_group(sp: int) -> SequenceGroup | None:
    """This rank's group of sp consecutive ranks; None for sp = 1. Collective over all ranks.

    Raises:
        EngineConfigError: sp does not divide the number of ranks.
    """
    world_size = dist.get_world_size()
    if world_size % sp != 0:
        fits = [n for n in range(1, world_size + 1) if world_size % n == 0]
        raise EngineConfigError(f"sequence_parallel={sp} does not divide the {world_size} ranks: use one of {fits}")
    if sp == 1:
        return None
    group, _ = dist.new_subgroups(group_size=sp)
    return SequenceGroup(group=group, rank=dist.get_rank() % sp, size=sp, name=str(group.group_name))


def check_heads(model_config: Any, sp: int) -> None:
    """Refuse a model (its Hugging Face configuration) whose attention heads cannot be divided among sp ranks.

    Raises:
        EngineConfigError: names what would do.
    """
    text_config = model_config.get_text_config() if hasattr(model_config, "get_text_config") else model_config
    num_heads = int(text_config.num_attention_heads)
    if num_heads % sp != 0:
        fits = [n for n in range(1, num_heads + 1) if num_heads % n == 0]
        raise EngineConfigError(
            f"sequence_parallel={sp} cannot divide {num_heads} attention heads among ranks: use one of {fits}"
        )


def kv_copies(num_heads: int, num_kv_heads: int, sp: int) -> int:
    """How often each key/value head is repeated so that sp ranks get equally many; `num_heads` is a multiple of sp.

    The fewest that work. A rank's query heads then find their key/value heads on the same rank.
    """
    sharing = num_heads // num_kv_heads
    return next(n for n in range(1, sharing + 1) if sharing % n == 0 and num_kv_heads * n % sp == 0)


# ------------------------------------------------------------------ attention


@torch.library.custom_op("ds_engine::all_to_all", mutates_args=())
def _all_to_all(to_each: Tensor, group_name: str) -> Tensor:
    """[sp, ...] for each rank -> [sp, ...] from each rank. An operator of its own: to torch.compile, which could not
    follow what torch.distributed does, one node of a layer's graph."""
    from_each = torch.empty_like(to_each, memory_format=torch.contiguous_format)
    group = cast("Any", distributed_c10d)._resolve_process_group(group_name)
    dist.all_to_all_single(from_each, to_each.contiguous(), group=group)
    return from_each


@_all_to_all.register_fake
def _(to_each: Tensor, group_name: str) -> Tensor:
    return torch.empty_like(to_each, memory_format=torch.contiguous_format)


def _remember_group(ctx: Any, inputs: tuple[Tensor, str], output: Tensor) -> None:
    ctx.group_name = inputs[1]


def _all_to_all_back(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    """Its own inverse, so its own backward."""
    return _all_to_all(grad, ctx.group_name), None


_all_to_all.register_autograd(_all_to_all_back, setup_context=_remember_group)


def scatter_heads(query: Tensor, key: Tensor, value: Tensor, sequence: SequenceGroup) -> tuple[Tensor, Tensor, Tensor]:
    """[1, all heads, T / sp, d] of this rank's tokens -> [1, heads / sp, T, d] of this rank's heads; one collective."""
    copies = kv_copies(query.shape[1], key.shape[1], sequence.size)
    if copies > 1:
        key, value = key.repeat_interleave(copies, dim=1), value.repeat_interleave(copies, dim=1)
    sp = sequence.size
    whole = (query, key, value)
    to_each = torch.cat([x.reshape(sp, -1) for x in whole], dim=1)
    sizes = [x.numel() // sp for x in whole]
    from_each = _all_to_all(to_each, sequence.name).split(sizes, dim=1)
    query, key, value = (
        part.view(sp, x.shape[1] // sp, x.shape[2], x.shape[3]).transpose(0, 1).flatten(1, 2).unsqueeze(0)
        for part, x in zip(from_each, whole, strict=True)
    )
    return query, key, value


def gather_heads(out: Tensor, sequence: SequenceGroup) -> Tensor:
    """[1, T, heads / sp, d] of this rank's heads -> [1, T / sp, all heads, d] of this rank's tokens."""
    _, num_tokens, num_heads, size = out.shape
    to_each = out.view(sequence.size, num_tokens // sequence.size, num_heads, size)
    from_each: Tensor = _all_to_all(to_each, sequence.name)
    return from_each.transpose(0, 1).flatten(1, 2).unsqueeze(0)


# -------------------------------------------------------------------- targets


@dataclass(frozen=True, kw_only=True)
class TargetShare:
    """Which targets a rank answers for, and where the others' answers are found."""

    own_k: Tensor
    """int64, the targets whose index is in this rank's slice; may be empty."""
    width: int
    """Answers that each rank sends: as many as the busiest has, at least 1."""
    source_K: Tensor
    """int64 places of all K answers among the sp * width that were sent."""

    def to(self, device: torch.device) -> TargetShare:
        """The same on `device`."""
        return TargetShare(own_k=self.own_k.to(device), width=self.width, source_K=self.source_K.to(device))


def share_targets(target_index_K: Tensor, *, tokens_per_rank: int, sequence_rank: int, sp: int) -> TargetShare:
    """Divide targets, in any order, by the slices their indices fall into. A pure function."""
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


class _GatherAnswers(torch.autograd.Function):
    """[R, W] -> [sp, R, W] of all ranks. Backward takes this rank's part: the others start from theirs themselves."""

    @staticmethod
    def forward(ctx: Any, rows_RW: Tensor, sequence: SequenceGroup) -> Tensor:
        ctx.rank = sequence.rank
        everyone = rows_RW.new_empty(sequence.size * rows_RW.shape[0], rows_RW.shape[1])
        dist.all_gather_into_tensor(everyone, rows_RW.contiguous(), group=sequence.group)
        return everyone.view(sequence.size, *rows_RW.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0][ctx.rank], None


def gather_answers(rows_Rk: Tensor, share: TargetShare, sequence: SequenceGroup) -> Tensor:
    """[R, k] answers of this rank (k its own targets, or 1 to be ignored if it has none) -> [R, K] of all."""
    rows_RW = F.pad(rows_Rk, (0, share.width - rows_Rk.shape[1]))
    everyone: Tensor = _GatherAnswers.apply(rows_RW, sequence)
    return everyone.transpose(0, 1).flatten(1).index_select(1, share.source_K)
