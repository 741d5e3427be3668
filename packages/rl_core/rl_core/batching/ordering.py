"""Permutations of a batch: reorder items and restore their order."""

from collections.abc import Sequence
from typing import TypeVar, overload

import torch
from torch import Tensor

from ..errors import BatchError

Item = TypeVar("Item")


def inverse_order(order: Sequence[int]) -> list[int]:
    """The inverse permutation of `order`. Raises `BatchError` unless it is a permutation of 0 … n - 1."""
    inverse = [-1] * len(order)
    for place, index in enumerate(order):
        if not 0 <= index < len(order) or inverse[index] != -1:
            raise BatchError(f"not a permutation of 0 … {len(order) - 1}: {index} at place {place}")
        inverse[index] = place
    return inverse


@overload
def reorder(items: Tensor, order: Sequence[int]) -> Tensor: ...
@overload
def reorder(items: Sequence[Item], order: Sequence[int]) -> list[Item]: ...
def reorder(items: Tensor | Sequence[Item], order: Sequence[int]) -> Tensor | list[Item]:
    """items[order[0]], items[order[1]], …: a list, or a tensor indexed along its first dimension."""
    if isinstance(items, Tensor):
        return items[torch.as_tensor(order, dtype=torch.int64, device=items.device)]
    return [items[index] for index in order]


@overload
def restore(items: Tensor, order: Sequence[int]) -> Tensor: ...
@overload
def restore(items: Sequence[Item], order: Sequence[int]) -> list[Item]: ...
def restore(items: Tensor | Sequence[Item], order: Sequence[int]) -> Tensor | list[Item]:
    """Undo `reorder`: restore(reorder(x, order), order) equals x.

    Raises `BatchError` if `order` is no permutation or its length differs from that of `items`.
    """
    if len(items) != len(order):
        raise BatchError(f"{len(items)} items for an order of {len(order)}")
    return reorder(items, inverse_order(order))
