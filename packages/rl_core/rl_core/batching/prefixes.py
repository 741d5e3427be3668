"""Shared prefixes: sequences that begin with the same tokens form a tree, in which each prefix is computed once.

A node is a span of tokens, a sequence is the path from a root to a node. A prompt and its responses are a tree of two
levels; episodes that branch and system prompts make deeper ones. Only token ids decide what is shared.

Shapes: T tokens, S sequences (S1 = S + 1 borders), N nodes (N1 = N + 1 borders), U computed tokens, U <= T.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .._tensors import ranges
from ..errors import require

MIN_SHARED_TOKENS = 32
"""Shorter nodes cost more in calls of attention than they save."""

Ints = NDArray[np.int64]
_NO_BRANCH = np.iinfo(np.int64).max


@dataclass(frozen=True, kw_only=True, eq=False)
class PrefixTree:
    """The tokens of a batch that are computed: each shared prefix once.

    Nodes stand level by level: all roots, then all their children, and so on; children in the order of their parents.
    """

    computed_U: Tensor
    """int64 [U], places among the T tokens of the batch of those that are computed, node after node."""
    place_T: Tensor
    """int64 [T], place among the U computed tokens of each token of the batch."""
    cu_seqlens_N1: Tensor
    """int32 [N + 1], start offsets of the nodes in U, and U at the end."""
    parents_N: tuple[int, ...]
    """The node before each node on its path, -1 for a root."""

    @property
    def num_tokens(self) -> int:
        """U."""
        return self.computed_U.numel()

    def mask(self) -> Tensor:
        """bool [U, U]: a computed token (row) attends to itself and to the tokens before it on its path."""
        on_path_NN = torch.eye(len(self.parents_N), dtype=torch.bool)
        for node, parent in enumerate(self.parents_N):
            if parent >= 0:
                on_path_NN[node] |= on_path_NN[parent]
        lens_N = self.cu_seqlens_N1.diff().long().cpu()
        node_U = torch.arange(len(self.parents_N)).repeat_interleave(lens_N)
        return on_path_NN[node_U][:, node_U].tril().to(self.computed_U.device)

    def to(self, device: torch.device | str) -> "PrefixTree":
        """A copy with every tensor on `device`."""
        moved: dict[str, Any] = {name: x.to(device) for name, x in vars(self).items() if isinstance(x, Tensor)}
        return replace(self, **moved)


@dataclass(frozen=True, kw_only=True, eq=False)
class PrefixOrder:
    """Sequences in an order in which those with a common prefix are neighbors.

    Any selection of sequences computes the sum of their lengths less the sum of `shared_S`, so a planner counts tokens
    from it, and `tree` makes the tree of a micro batch.
    """

    order_S: Ints
    """The sequences in this order."""
    shared_S: Ints
    """Tokens that each of them, in this order, shares with the one before; 0 at the beginning."""

    def select(self, sequences: Sequence[int]) -> "PrefixOrder":
        """The order of these sequences, each given once and numbered by its place in `sequences`."""
        if not len(sequences):
            return PrefixOrder(order_S=self.order_S[:0], shared_S=self.shared_S[:0])
        rank_S = np.empty_like(self.order_S)
        rank_S[self.order_S] = np.arange(len(self.order_S))
        chosen = rank_S[np.asarray(sequences, np.int64)]
        order = chosen.argsort(kind="stable")
        ranks = chosen[order]
        shared = np.zeros_like(ranks)
        if len(ranks) > 1:  # sequences share what all between them share
            shared[1:] = np.minimum.reduceat(self.shared_S[: ranks[-1] + 1], ranks[:-1] + 1)
        return PrefixOrder(order_S=order, shared_S=shared)

    def tree(self, cu_seqlens_S1: Tensor) -> PrefixTree:
        """The tree of these sequences, of which `cu_seqlens_S1` are the borders in their batch."""
        borders = cu_seqlens_S1.numpy().astype(np.int64)
        starts_S, lens_S = borders[:-1][self.order_S], np.diff(borders)[self.order_S]
        nodes, _ = _nodes(self.shared_S, lens_S, min_tokens=1)
        spans = np.array([(starts_S[node.last] + node.start, node.end - node.start) for node in nodes], np.int64)
        starts_N, lens_N = torch.from_numpy(spans.reshape(-1, 2)).unbind(1)
        borders_N1 = np.concatenate([[0], lens_N.numpy().cumsum()])
        # of each node and each sequence through it: where its tokens are in T and in U, and how many
        parts = [np.zeros((0, 3), np.int64)]
        for number, node in enumerate(nodes):
            through = slice(node.first, node.last + 1)
            lens = (np.minimum(lens_S[through], node.end) - node.start).clip(0)
            parts.append(np.stack([starts_S[through] + node.start, np.full_like(lens, borders_N1[number]), lens], 1))
        in_T, in_U, lens_P = torch.from_numpy(np.concatenate(parts)).unbind(1)
        place_T = torch.empty(int(borders[-1]), dtype=torch.int64)
        place_T[ranges(in_T, lens_P)] = ranges(in_U, lens_P)
        return PrefixTree(
            computed_U=ranges(starts_N, lens_N),
            place_T=place_T,
            cu_seqlens_N1=torch.from_numpy(borders_N1.astype(np.int32)),
            parents_N=tuple(node.parent for node in nodes),
        )


def find_prefixes(input_ids_T: Tensor, cu_seqlens_S1: Tensor, *, min_tokens: int = MIN_SHARED_TOKENS) -> PrefixTree:
    """The tree of the sequences of a batch; see `order_prefixes`."""
    return order_prefixes(input_ids_T, cu_seqlens_S1, min_tokens=min_tokens).tree(cu_seqlens_S1)


def order_prefixes(input_ids_T: Tensor, cu_seqlens_S1: Tensor, *, min_tokens: int = MIN_SHARED_TOKENS) -> PrefixOrder:
    """Finds the common prefixes of the sequences of a batch, from their token ids.

    Of a prefix that two sequences have in common, fewer than `min_tokens` tokens are computed twice: a node that
    sequences share has at least so many. With `min_tokens=1` no token is computed twice.
    """
    require(min_tokens >= 1, "min_tokens", min_tokens, "1 or more")
    ids, borders = np.ascontiguousarray(input_ids_T.numpy()), cu_seqlens_S1.tolist()
    rows = [ids[start:end] for start, end in pairwise(borders)]
    # bytes compare fast; in any order of the tokens, rows with a common prefix are neighbors, and a prefix comes first
    order = sorted(range(len(rows)), key=[row.tobytes() for row in rows].__getitem__)
    shared = [0, *(_common(rows[before], rows[row]) for before, row in pairwise(order))][: len(rows)]
    order_S, shared_S = np.array(order, np.int64), np.array(shared, np.int64)
    lens_S = np.array([len(rows[row]) for row in order], np.int64)
    return PrefixOrder(order_S=order_S, shared_S=_nodes(shared_S, lens_S, min_tokens)[1])


class _Node(NamedTuple):
    """Tokens `start` to `end` of the sequences `first` to `last` of a `PrefixOrder`; `last` has all of them."""

    start: int
    end: int
    first: int
    last: int
    parent: int


def _common(a: NDArray[np.integer], b: NDArray[np.integer]) -> int:
    """Length of the longest common prefix."""
    length = min(len(a), len(b))
    differs = a[:length] != b[:length]
    return int(differs.argmax()) if differs.any() else length


def _nodes(shared_S: Ints, lens_S: Ints, min_tokens: int) -> tuple[list[_Node], Ints]:
    """The nodes in their order, and `shared_S` without what nodes shorter than `min_tokens` would share."""
    kept_S, nodes = shared_S.copy(), list[_Node]()
    # a sequence that is a prefix of the next one ends on its path: the two do not branch
    ends_inside_S = np.append(lens_S[:-1] == shared_S[1:], False)
    branch_S = np.where(np.append(True, ends_inside_S[:-1])[: len(shared_S)], _NO_BRANCH, shared_S)
    level = [(0, len(shared_S), 0, -1)] if len(shared_S) else []
    while level:
        level, ranges_of_level = [], level[::-1]
        while ranges_of_level:
            first, end, start, parent = ranges_of_level.pop()
            inner = branch_S[first + 1 : end]
            common = int(inner.min(initial=_NO_BRANCH))
            if common == _NO_BRANCH:
                if lens_S[end - 1] > start:
                    nodes.append(_Node(start, int(lens_S[end - 1]), first, end - 1, parent))
                continue
            borders = [first, *(first + 1 + np.flatnonzero(inner == common)).tolist(), end]
            if common - start >= min_tokens:
                level += [(*part, common, len(nodes)) for part in pairwise(borders)]
                nodes.append(_Node(start, common, first, end - 1, parent))
            else:  # too short a node: its tokens are repeated in its children
                kept_S[borders[1:-1]] = start
                ranges_of_level += [(*part, start, parent) for part in pairwise(borders)][::-1]
    return nodes, kept_S
