"""Shards in DeepSpeed's layout are read back as whole parameters, for any sizes, ranks and groups."""

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt import ShardError
from ckpt.zero.zero_layout import ZeroLayout
from plinth_testing import raises

PROPERTY = settings(deadline=None, derandomize=True, max_examples=150)
SHAPES = st.lists(st.lists(st.integers(1, 7), max_size=3).map(tuple), min_size=1, max_size=5)
GROUPS = st.lists(SHAPES, min_size=1, max_size=3)


def numbered(groups: list[list[tuple[int, ...]]]) -> list[dict[str, torch.Tensor]]:
    """Parameters with distinct nonzero elements; 0 is padding."""
    tensors, count = [], 1
    for group, shapes in enumerate(groups):
        tensors.append({})
        for index, shape in enumerate(shapes):
            size = math.prod(shape)
            tensors[-1][f"{group}.{index}"] = torch.arange(count, count + size).float().reshape(shape)
            count += size
    return tensors


def cut_flat(tensors: list[dict[str, torch.Tensor]], num_ranks: int, *, align: int, keep_padding: bool):
    """Stages 1 and 2: [rank][group] buffers, and the paddings after each parameter."""
    ranks, paddings = [[] for _ in range(num_ranks)], []
    for group in tensors:
        pieces, offset, after = [], 0, []
        for index, tensor in enumerate(group.values()):
            offset += tensor.numel()
            after.append(0 if index == len(group) - 1 else -offset % align)
            offset += after[-1]
            pieces += [tensor.reshape(-1), torch.zeros(after[-1])]
        paddings.append(tuple(after))
        flat = torch.cat([*pieces, torch.zeros(-offset % (2 * num_ranks))])
        for rank, part in enumerate(flat.chunk(num_ranks)):
            lean = max(0, min(part.numel(), offset - rank * part.numel()))
            ranks[rank].append(part if keep_padding else part[:lean])
    return ranks, tuple(paddings)


def cut_each(tensors: list[dict[str, torch.Tensor]], num_ranks: int) -> list[list[torch.Tensor]]:
    """Stage 3: [rank][group] buffers."""
    ranks = []
    for rank in range(num_ranks):
        ranks.append([])
        for group in tensors:
            parts = []
            for tensor in group.values():
                size = math.ceil(tensor.numel() / num_ranks)
                padded = torch.cat([tensor.reshape(-1), torch.zeros(size * num_ranks - tensor.numel())])
                parts.append(padded[rank * size : (rank + 1) * size])
            ranks[-1].append(torch.cat(parts))
    return ranks


def sizes_of(ranks: list[list[torch.Tensor]]) -> list[list[int]]:
    return [[buffer.numel() for buffer in rank] for rank in ranks]


def gather(layout: ZeroLayout, ranks: list[list[torch.Tensor]], name: str, start: int, stop: int) -> torch.Tensor:
    spans = layout.spans(name, start, stop, sizes_of(ranks))
    return torch.cat([torch.empty(0), *(ranks[s.rank][s.buffer][s.start : s.stop] for s in spans)])


def check_every_range(layout: ZeroLayout, ranks: list[list[torch.Tensor]], group: dict[str, torch.Tensor]) -> None:
    for name, tensor in group.items():
        flat = tensor.reshape(-1)
        assert layout.shapes[name] == tuple(tensor.shape)
        for start in range(0, flat.numel(), max(1, flat.numel() // 5)):
            for stop in range(start, flat.numel() + 1, max(1, flat.numel() // 5)):
                assert torch.equal(gather(layout, ranks, name, start, stop), flat[start:stop]), (name, start, stop)
        assert torch.equal(gather(layout, ranks, name, 0, flat.numel()), flat)


@PROPERTY
@given(GROUPS, st.integers(1, 9), st.sampled_from([1, 8]), st.booleans())
def test_stages_1_and_2(groups, num_ranks: int, align: int, keep_padding: bool) -> None:
    tensors = numbered(groups)
    ranks, paddings = cut_flat(tensors, num_ranks, align=align, keep_padding=keep_padding)
    shapes = tuple({name: tuple(t.shape) for name, t in group.items()} for group in tensors)
    layout = ZeroLayout(stage=2, num_ranks=num_ranks, groups=shapes, paddings=paddings if align > 1 else None)
    layout.check(sizes_of(ranks))
    for group in tensors:
        check_every_range(layout, ranks, group)


@PROPERTY
@given(GROUPS, st.integers(1, 9), st.booleans())
def test_stage_3(groups, num_ranks: int, one_buffer: bool) -> None:
    tensors = numbered(groups)
    ranks = cut_each(tensors, num_ranks)
    if one_buffer:  # buffers need not be cut where the groups of names are
        ranks = [[torch.cat(rank)] for rank in ranks]
    shapes = tuple({name: tuple(t.shape) for name, t in group.items()} for group in tensors)
    layout = ZeroLayout(stage=3, num_ranks=num_ranks, groups=shapes)
    layout.check(sizes_of(ranks))
    for group in tensors:
        check_every_range(layout, ranks, group)


def test_sizes_that_do_not_add_up() -> None:
    flat = ZeroLayout(stage=2, num_ranks=2, groups=({"a": (5,), "b": (4,)},))
    flat.check([[6], [3]])
    flat.check([[6], [6]])
    with raises(ShardError, field="group 0", value=14):
        flat.check([[7], [7]])
    with raises(ShardError, field="groups", value=[2]):
        flat.check([[6, 1], [6, 1]])
    with raises(ShardError, field="stop", value=9):
        list(flat.spans("b", 0, 4, [[4], [4]]))
    each = ZeroLayout(stage=3, num_ranks=2, groups=({"a": (5,)}, {"b": (4,)}))
    each.check([[3, 2], [3, 2]])
    with raises(ShardError, field="rank 1", value=4):
        each.check([[3, 2], [3, 1]])
