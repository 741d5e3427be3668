"""Layout of a packed row in which sequences share their prefixes: a tree of spans of tokens, each computed once.

A node's tokens attend to the tokens of its path: those of its ancestors, then their own. Two ways compute the same:

* The keys and values of each path are gathered, and a kernel computes fewer queries than keys, causal from the bottom
  right (`TreeLayout.path_rows`). Any kernel and any window can do this. It costs memory traffic for each row of a path.
* Nothing is gathered: each node attends to itself, and once more, without a mask, all tokens below an ancestor attend
  to the ancestor; the parts are merged by their log-sum-exp (`Crossings`, flash4.py). It costs memory traffic for each
  query that has ancestors, however long these are.

Shapes: U computed tokens, N nodes, P rows of all paths.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..config import MOST_PATH_ROWS
from ..errors import BatchError

FORWARD_ROWS, BACKWARD_ROWS = 2.4, 3.3
"""Rows of all paths per query of all crossings up to which a pass of flash4 gathers the paths, as measured on an H200
(benchmarks/shared_prefix). The forward pass counts key/value heads of rows and query heads of queries."""
_NOT_KEPT = 19
"""In place of 0 rows, which would be a constant of compiled graphs (see the end of `make_crossings`)."""


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
    """int64 [C, 9] on the CPU: `Gathering`, then a `Crossing` in each row."""
    borders: Tensor
    """int32, cumulative lengths of queries, then of keys, of each call, then of the paths."""
    key_rows: Tensor
    """int64, rows of the keys of the calls whose ancestors are not contiguous, then of the paths."""
    num_kept: int = _NOT_KEPT
    """Rows of keys and of values that the forward pass leaves to the backward pass: those of all paths where they are
    kept, else `_NOT_KEPT` empty ones, so that one compiled graph serves both."""

    def without_paths(self) -> Crossings:
        """For keys that are those of the paths: nothing is left to cross or to gather."""
        return replace(self, table_C=torch.zeros_like(self.table_C), num_kept=_NOT_KEPT)


class Gathering(NamedTuple):
    """The first row of the table: the keys of all paths, which a pass gathers if that costs less than the crossings."""

    num_nodes: int
    longest_path: int
    borders_start: int
    """First of the borders of the paths."""
    num_rows: int
    """0 where there is nothing to gather."""
    rows_start: int
    """Among the key rows: the rows of all paths; behind them their sources (`TreeLayout.sources`)."""
    num_keys: int
    num_queries: int
    """Queries of all crossings."""
    keeps: int = 0
    """1 if the forward pass keeps what it gathers for the backward pass."""
    unused: int = 0

    def in_forward(self, heads: int, kv_heads: int) -> bool:
        """True if the forward pass gathers."""
        few = self.num_rows * kv_heads <= FORWARD_ROWS * self.num_queries * heads
        return bool(self.keeps) or (self._fits and few)

    def in_backward(self) -> bool:
        """True if the backward pass gathers."""
        return self._fits and self.num_rows <= BACKWARD_ROWS * self.num_queries

    @property
    def _fits(self) -> bool:
        return 0 < self.num_rows <= MOST_PATH_ROWS * self.num_keys


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
    sources: tuple[Tensor, Tensor]
    """int64 [P] and [U + 1]: for each of the U tokens its places among the P rows, and their borders."""


def tree_layout(parents: Sequence[int], lengths: Sequence[int], device: torch.device) -> TreeLayout:
    """The paths of nodes with these parents and numbers of tokens. The host counts nodes, the device their rows."""
    starts, lines = [0, *accumulate(lengths)], _ancestors(parents)
    nodes = [node for line in lines for node in line]
    places = [0, *accumulate(lengths[node] for node in nodes)]
    shifts = [starts[node] - place for node, place in zip(nodes, places, strict=False)]
    spans = torch.tensor([shifts, [lengths[node] for node in nodes]]).to(device)
    path_rows = spans[0].repeat_interleave(spans[1], output_size=places[-1]) + torch.arange(places[-1], device=device)
    paths = Borders.make([sum(lengths[node] for node in line) for line in lines], device)
    return TreeLayout(path_rows=path_rows, paths=paths, sources=rows_by_source(path_rows, starts[-1]))


def take(x: Tensor, rows: Tensor) -> Tensor:
    """`x[rows]`, of tensors on the CPU by numpy: torch divides such small work among all cores, which a host with busy
    cores pays for with milliseconds."""
    return x[rows] if x.is_cuda else torch.from_numpy(x.numpy()[rows.numpy()])


def make_crossings(
    parents: Sequence[int], lengths: Sequence[int], tree: TreeLayout | None, device: torch.device, *, keeps_paths: bool
) -> Crossings:
    """The calls for nodes with these parents and numbers of tokens, and the paths of `tree`, which `keeps_paths` lets
    the forward pass keep."""
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
    gathering = Gathering(*[0] * 7)
    rows = [x.to(device) for x in key_rows]
    if tree is not None and calls:
        gathering = Gathering(
            num_nodes=len(lengths),
            longest_path=tree.paths.longest,
            borders_start=len(borders),
            num_rows=len(tree.path_rows),
            rows_start=sum(map(len, rows)),
            num_keys=starts[-1],
            num_queries=sum(q_end - q_start for q_start, q_end, *_ in calls),
        )
        gathering = gathering._replace(keeps=int(keeps_paths and gathering.in_backward()))
        borders += [0, *accumulate(tree.paths.lengths)]
        rows += [tree.path_rows, *tree.sources]
    # Filled up to sizes that are no model's: torch.compile makes sizes of 0 and 1 constants of a graph, and takes two
    # sizes that are equal in its first call, such as this and a number of heads, for the same one.
    calls += [[0] * 9] * max(0, 10 - len(calls))
    borders += [0] * max(0, 13 - len(borders))
    rows.append(torch.zeros(17, dtype=torch.int64, device=device))
    return Crossings(
        table_C=torch.tensor([list(gathering), *calls], dtype=torch.int64),
        borders=torch.tensor(borders, dtype=torch.int32).to(device),
        key_rows=torch.cat(rows),
        num_kept=gathering.num_rows if gathering.keeps else _NOT_KEPT,
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


def rows_by_source(rows: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """For each of `num_rows` rows the places in `rows` that read it, ascending, one row after another, and borders."""
    read, sources = rows.sort(stable=True)
    return sources, torch.searchsorted(read, torch.arange(num_rows + 1, device=rows.device))


def gather_paths(k: Tensor, v: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """`k[rows]` and `v[rows]`, by one kernel on a GPU."""
    if k.is_cuda:
        from .flash4_merge import gather_on_gpu

        return gather_on_gpu(k, v, rows)
    return k.index_select(0, rows), v.index_select(0, rows)


def sum_sources(grad: Tensor, sources: Tensor, borders: Tensor, copies: int = 1) -> Tensor:
    """Sum of each row over its places in `grad` and the `copies` of its heads, in fp32 and in the order of the places
    (`rows_by_source`)."""
    if grad.is_cuda and grad.element_size() == 2:
        from .flash4_merge import sum_on_gpu

        return sum_on_gpu(grad, sources, borders, copies)
    values = grad.index_select(0, sources)
    values = values if values.dtype == torch.float64 else values.float()
    values = values if copies == 1 else values.unflatten(1, (-1, copies)).sum(2)
    # segment_reduce uses no atomics.
    sums = torch.segment_reduce(values.flatten(1), "sum", lengths=borders.diff(), initial=0.0)
    return sums.to(grad.dtype).view(-1, *values.shape[1:])


@torch.library.custom_op("ds_engine::sum_rows", mutates_args=())
def _sum_rows(grad: Tensor, rows: Tensor, num_rows: int) -> Tensor:
    return sum_sources(grad, *rows_by_source(rows, num_rows))


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
