"""Partitions of items with integer sizes into bins of nearly equal size. Pure Python, deterministic."""

import heapq
from collections.abc import Sequence

__all__ = ["balanced_partition", "first_fit", "level_bins"]

Bins = list[list[int]]


def balanced_partition(sizes: Sequence[int], num_bins: int) -> Bins:
    """Item indices in `num_bins` bins whose item counts differ by at most one, balanced by size.

    Items go round by round, largest first; in each round the largest item goes to the bin that holds least so far.
    So the sums of two bins differ by at most the largest difference inside one round, which is at most max(sizes).
    """
    order = sorted(range(len(sizes)), key=lambda i: (-sizes[i], i))
    bins: Bins = [[] for _ in range(num_bins)]
    loads = [0] * num_bins
    for start in range(0, len(order), num_bins):
        lightest_first = sorted(range(num_bins), key=lambda b: (loads[b], b))
        for item, place in zip(order[start : start + num_bins], lightest_first, strict=False):
            bins[place].append(item)
            loads[place] += sizes[item]
    return bins


def first_fit(sizes: Sequence[int], capacity: int, max_items: int | None = None) -> Bins:
    """As few bins as first-fit-decreasing finds, none above `capacity` or `max_items`.

    An item larger than `capacity` gets a bin of its own. Uses at most 11/9 of the fewest bins possible, plus one
    (Johnson 1973), when `max_items` does not bind.
    """
    bins: Bins = []
    loads: list[int] = []
    for item in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        for place, load in enumerate(loads):
            if load + sizes[item] <= capacity and (max_items is None or len(bins[place]) < max_items):
                bins[place].append(item)
                loads[place] += sizes[item]
                break
        else:
            bins.append([item])
            loads.append(sizes[item])
    return bins


def level_bins(sizes: Sequence[int], num_bins: int, capacity: int, max_items: int | None = None) -> Bins | None:
    """Item indices in `num_bins` bins of nearly equal sums under the limits, or None where this order does not fit.

    Largest item first, into the lightest bin that still takes an item. An item larger than `capacity` stays alone.
    No bin is empty when there are at least `num_bins` items.
    """
    bins: Bins = [[] for _ in range(num_bins)]
    heap = [(0, place) for place in range(num_bins)]
    for item in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        if not heap:
            return None
        load, place = heapq.heappop(heap)
        load += sizes[item]
        if load > capacity and bins[place]:
            return None
        bins[place].append(item)
        if load < capacity and (max_items is None or len(bins[place]) < max_items):
            heapq.heappush(heap, (load, place))
    return bins
