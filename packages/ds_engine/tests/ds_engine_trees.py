"""Trees of shared prefixes for tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from ds_engine.simple import SimpleBatch

GROUP = ([-1, -1, 0, 0, 0, 1, 1], [5, 9, 4, 1, 7, 6, 2])
"""Parents and numbers of tokens: two prompts with three and two responses."""
DEEP = ([-1, -1, 0, 1, 1, 2, 2, 4], [3, 2, 4, 5, 1, 2, 6, 3])
"""Four levels; the nodes with children are not contiguous."""


def draw_tree(data: Any, *, max_levels: int = 4, max_nodes: int = 4) -> list[int]:
    """The parent of each node, level by level, children in their parents' order."""
    parents = [-1] * data.draw(st.integers(1, max_nodes))
    level = list(range(len(parents)))
    for _ in range(data.draw(st.integers(0, max_levels - 1))):
        below = sorted(data.draw(st.lists(st.sampled_from(level), max_size=max_nodes)))
        level = list(range(len(parents), len(parents) + len(below)))
        parents += below
        if not level:
            break
    return parents


@dataclass(frozen=True, kw_only=True)
class Tree:
    """`Prefixes` of a batch."""

    computed_U: Tensor
    place_T: Tensor
    cu_seqlens_N1: Tensor
    parents_N: tuple[int, ...]


def tree_batch(parents: Sequence[int], lengths: Sequence[int], *, seed: int, vocab: int = 64) -> SimpleBatch:
    """One sequence for each node without children, of which all but the first token are targets, with its tree."""
    generator = torch.Generator().manual_seed(seed)
    starts = [0, *accumulate(lengths)]
    ids_U = torch.randint(3, vocab, (starts[-1],), generator=generator)
    paths: list[Tensor] = []
    for node, parent in enumerate(parents):
        own = torch.arange(starts[node], starts[node + 1])
        paths.append(own if parent < 0 else torch.cat([paths[parent], own]))
    ends = [path for node, path in enumerate(paths) if node not in parents]
    place_T = torch.cat(ends)
    first_U = torch.stack([(place_T == place).nonzero()[0, 0] for place in range(starts[-1])])
    weights = (torch.randn(len(place_T) - len(ends), generator=generator) / len(ends)).tolist()
    batch = SimpleBatch.pack([([int(ids_U[path[0]])], ids_U[path[1:]].tolist()) for path in ends], {"weights": weights})
    borders = torch.tensor(starts, dtype=torch.int32)
    tree = Tree(computed_U=first_U, place_T=place_T, cu_seqlens_N1=borders, parents_N=tuple(parents))
    return replace(batch, prefixes=tree)


def routed_batch(parents: Sequence[int], lengths: Sequence[int], seed: int, layers: int = 2, experts: int = 4) -> Any:
    """`tree_batch` with two random experts of each token in each layer, equal where sequences share a token."""
    batch = tree_batch(parents, lengths, seed=seed)
    assert batch.prefixes is not None
    scores = torch.rand(sum(lengths), layers, experts, generator=torch.Generator().manual_seed(seed))
    return replace(batch, per_token={"routes": scores.argsort(-1)[batch.prefixes.place_T, :, :2].byte()})
