"""Layout of a packed row in which sequences share their prefixes: a tree of spans of tokens, each computed once.

A node's tokens attend to the tokens of its path: those of its ancestors, then their own. Two ways compute the same:

* The keys and values of each path are gathered, and a kernel computes fewer queries than keys, causal from the bottom
  right (`TreeLayout.path_rows`). Any kernel and any window can do this.
* Nothing is gathered: each node attends to itself, and once more, without a mask, all tokens below an ancestor attend
  to the ancestor; the parts are merged by their log-sum-exp (`Crossings`, flash4.py).

Shapes: U computed tokens, N nodes, P rows of all paths.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import BatchError


@dataclass(frozen=True, kw_only=True)
class Borders:
    """Borders of the queries or keys of each node."""

    cu_seqlens: Tensor
    """int32 cumulative lengths, starting with 0, on the device of the tokens."""
    lengths: tuple[int, ...]
    longest: int

    @classmethod
    def make(cls, lengths: Sequence[int], device: torch.device) -> Borders:
        cu_seqlens = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32).to(device)
        return cls(cu_seqlens=cu_seqlens, lengths=tuple(lengths), longest=max(lengths))


@dataclass(frozen=True, kw_only=True)
class Crossings:
    """Attention of all nodes of a level to their ancestors on a level above: one call of a kernel for each pair of
    levels. No calls without shared prefixes, but the tensors are there, so that one compiled graph serves both."""

    table_C: Tensor
    """int64 [C, 9] on the CPU, see `Crossing`."""
    borders: Tensor
    """int32, cumulative lengths of queries, then of keys, of each call."""
    key_rows: Tensor
    """int64, rows of the keys of the calls whose ancestors are not contiguous."""


class Crossing(NamedTuple):
    """A row of the table: queries [q_start, q_end) and the keys of `num` ancestors."""

    q_start: int
    q_end: int
    k_start: int
    """First row of the keys, or -1 if they are `key_rows[rows_start : rows_start + num_keys]`."""
    num_keys: int
    rows_start: int
    borders_start: int
    num: int
    """0 in a row that only fills the table."""
    longest_q: int
    longest_k: int


@dataclass(frozen=True, kw_only=True)
class TreeLayout:
    """Paths of the nodes of a packed row."""

    path_rows: Tensor
    """int64 [P], rows of the keys of each node's path, one path after another."""
    paths: Borders
    """Borders of the paths among the P rows."""


def tree_layout(parents: Sequence[int], lengths: Sequence[int], device: torch.device) -> TreeLayout:
    """The paths of nodes with these parents and numbers of tokens."""
    starts = [0, *accumulate(lengths)]
    paths: list[Tensor] = []
    for node, parent in enumerate(parents):
        own = torch.arange(starts[node], starts[node + 1])
        paths.append(own if parent < 0 else torch.cat([paths[parent], own]))
    return TreeLayout(path_rows=torch.cat(paths).to(device), paths=Borders.make([len(path) for path in paths], device))


def make_crossings(parents: Sequence[int], lengths: Sequence[int], device: torch.device) -> Crossings:
    """The calls for nodes with these parents and numbers of tokens."""
    starts = [0, *accumulate(lengths)]
    lines = _ancestors(parents)
    calls: list[list[int]] = []
    borders: list[int] = []
    key_rows: list[Tensor] = []
    for level in range(1, max(map(len, lines))):
        nodes = [node for node, line in enumerate(lines) if len(line) == level + 1]
        for above in range(level):
            blocks = [(a, list(below)) for a, below in groupby(nodes, key=lambda node: lines[node][above])]
            ancestors = [ancestor for ancestor, _ in blocks]
            num_queries = [sum(lengths[node] for node in below) for _, below in blocks]
            num_keys = [lengths[a] for a in ancestors]
            is_contiguous = ancestors[-1] - ancestors[0] == len(ancestors) - 1
            rows_start = sum(map(len, key_rows))
            if not is_contiguous:
                key_rows += [torch.arange(starts[a], starts[a + 1]) for a in ancestors]
            call = Crossing(
                q_start=starts[nodes[0]],
                q_end=starts[nodes[-1] + 1],
                k_start=starts[ancestors[0]] if is_contiguous else -1,
                num_keys=sum(num_keys),
                rows_start=rows_start,
                borders_start=len(borders),
                num=len(blocks),
                longest_q=max(num_queries),
                longest_k=max(num_keys),
            )
            calls.append(list(call))
            borders += [0, *accumulate(num_queries), 0, *accumulate(num_keys)]
    # Filled up to sizes that are no model's: torch.compile makes sizes of 0 and 1 constants of a graph, and takes two
    # sizes that are equal in its first call, such as this and a number of heads, for the same one.
    calls += [[0] * 9] * max(0, 11 - len(calls))
    borders += [0] * max(0, 13 - len(borders))
    key_rows.append(torch.zeros(17, dtype=torch.int64))
    return Crossings(
        table_C=torch.tensor(calls, dtype=torch.int64),
        borders=torch.tensor(borders, dtype=torch.int32).to(device),
        key_rows=torch.cat(key_rows).to(device),
    )


def check_order(parents: Sequence[int]) -> None:
    """Raise BatchError unless parents come before their children, level by level, children in their parents' order."""
    for node, parent in enumerate(parents):
        if not -1 <= parent < node:
            raise BatchError("a parent comes before its children", field="prefixes.parents_N", value=parent)
    levels = [len(line) for line in _ancestors(parents)]
    children = [parent for parent in parents if parent >= 0]
    if levels != sorted(levels) or children != sorted(children):
        problem = "nodes are not ordered by level, and within a level by parent"
        raise BatchError(problem, field="prefixes.parents_N", value=list(parents[:16]))


def _ancestors(parents: Sequence[int]) -> list[list[int]]:
    """For each node the path of nodes from its root to itself."""
    lines: list[list[int]] = []
    for node, parent in enumerate(parents):
        lines.append([*lines[parent], node] if parent >= 0 else [node])
    return lines


# ------------------------------------------------------------------ gathering


@torch.library.custom_op("ds_engine::gather_rows", mutates_args=())
def gather_rows(x: Tensor, rows: Tensor) -> Tensor:
    """`x[rows]` along the first dimension; gradients of a row that is read several times are summed in fp32 and in a
    fixed order, which `index_select` does not do on a GPU."""
    return x.index_select(0, rows)


@gather_rows.register_fake
def _(x: Tensor, rows: Tensor) -> Tensor:
    return x.new_empty((rows.shape[0], *x.shape[1:]))


@torch.library.custom_op("ds_engine::sum_rows", mutates_args=())
def _sum_rows(grad: Tensor, rows: Tensor, num_rows: int) -> Tensor:
    order = rows.argsort(stable=True)
    values = grad.flatten(1).index_select(0, order)
    values = values if values.dtype == torch.float64 else values.float()
    # segment_reduce uses no atomics.
    sums = torch.segment_reduce(values, "sum", lengths=rows.bincount(minlength=num_rows), initial=0.0)
    return sums.to(grad.dtype).view(num_rows, *grad.shape[1:])


@_sum_rows.register_fake
def _(grad: Tensor, rows: Tensor, num_rows: int) -> Tensor:
    return grad.new_empty((num_rows, *grad.shape[1:]))


def _save_rows(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, rows = inputs
    ctx.save_for_backward(rows)
    ctx.num_rows = x.shape[0]


def _gather_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    (rows,) = ctx.saved_tensors
    return torch.ops.ds_engine.sum_rows(grad.contiguous(), rows, ctx.num_rows), None


gather_rows.register_autograd(_gather_backward, setup_context=_save_rows)
