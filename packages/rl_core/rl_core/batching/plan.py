"""Mini-batch splits and micro-batch plans: which rank computes which sample in which micro batch.

A train batch holds the prompts of one step, a mini batch those of one optimizer step, a micro batch the sequences of
one forward/backward. There are dp replicas of sp ranks each; the sp ranks of a replica share every sequence.
Pure Python and deterministic.
"""

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from ..errors import BatchError

if TYPE_CHECKING:  # it needs torch
    from .prefixes import PrefixOrder

Bins = list[list[int]]

_MAX_ROUNDS = 32
"""Attempts to balance a plan by splitting prefixes; the first few are the best ones."""


@dataclass(frozen=True, kw_only=True)
class MicroBatchPlan:
    """The samples that each rank computes in each micro batch."""

    assignment: tuple[tuple[tuple[int, ...], ...], ...]
    """`[rank][micro batch]` -> sample indices; equally many micro batches on every rank, each sample once."""

    @property
    def num_micro_batches(self) -> int:
        """Micro batches on each rank."""
        return len(self.assignment[0])


def plan_micro_batches(
    lengths: Sequence[int],
    *,
    num_ranks: int,
    token_budget: int | None = None,
    micro_batch_size: int | None = None,
    prefixes: "PrefixOrder | None" = None,
    loads: Sequence[int] | None = None,
) -> MicroBatchPlan:
    """Spread samples over `num_ranks` (dp) ranks and micro batches, balanced by tokens.

    `lengths` are the tokens of each sample. With `prefixes`, the order of these samples, tokens are those that a micro
    batch computes: each prefix that its samples share counts once. `loads`: what the budget limits beside them and
    samples cannot share, such as the targets of each sample, which a head computes. The plan guarantees:

    * Every rank gets the same number of micro batches, and every sample is computed exactly once.
    * `token_budget`: no micro batch holds more tokens, or more load, except that a longer sample gets a micro batch
      of its own.
    * `micro_batch_size`: no micro batch holds more samples. Without a budget their sizes also differ by at most one,
      and the count is ceil(samples / (num_ranks * micro_batch_size)). With both, both limits hold.
    * A micro batch is empty only if there are fewer samples than num_ranks * count.
    * The k-th micro batches of all ranks, which run at the same time, are of similar size. The tokens of two ranks
      differ by at most the spread of the micro batches (largest minus smallest).
    * Samples that share a prefix are in one micro batch if they fit, else they are split where the fewest tokens are
      computed twice. They are also split where that makes the rank with the most tokens faster; that rank never
      computes more tokens than in the plan without `prefixes`.

    Raises `BatchError` without samples, without a limit, or for a length or limit below 1.
    """
    lengths = [int(length) for length in lengths]
    if not lengths:
        raise BatchError(field="lengths", value=[], allowed="at least one sample")
    if min(lengths) < 1:
        problem = f"sample {lengths.index(min(lengths))}"
        raise BatchError(problem, field="lengths", value=min(lengths), allowed="1 or more")
    for name, value in (
        ("num_ranks", num_ranks),
        ("token_budget", token_budget),
        ("micro_batch_size", micro_batch_size),
    ):
        if value is not None and value < 1:
            raise BatchError(field=name, value=value, allowed="1 or more")
    if token_budget is not None:
        bins = _bins_within_budget(lengths, num_ranks, token_budget, micro_batch_size)
    elif micro_batch_size is not None:
        count = -(-len(lengths) // (num_ranks * micro_batch_size))
        bins = balanced_partition(lengths, num_ranks * count)
    else:
        raise BatchError(field="token_budget", value=None, allowed="a number, unless micro_batch_size is one")
    largest, ranks = _spread(bins, lengths, num_ranks, prefixes)
    if prefixes is not None and prefixes.shared_S.any():
        for total, whole in _bins_of_prefixes(
            lengths, prefixes, loads, num_ranks, token_budget, micro_batch_size, num_bins=len(bins)
        ):
            if total > largest * num_ranks:
                break  # the prefixes are split further and further, so the next ones compute even more
            if _num_empty(whole) == max(0, len(whole) - len(lengths)):
                largest, ranks = min((largest, ranks), _spread(whole, lengths, num_ranks, prefixes), key=_cost)
            if total >= largest * num_ranks:
                break  # every rank has its share of the fewest tokens
    assignment = tuple(tuple(tuple(sorted(micro)) for micro in rank) for rank in ranks)
    return MicroBatchPlan(assignment=assignment)


def split_mini_batches(group_ids: Sequence[int], num_groups: int) -> tuple[tuple[int, ...], ...]:
    """The samples of each mini batch: `num_groups` whole groups, in the order in which groups first appear.

    The last mini batch is smaller if the groups do not divide. Raises `BatchError` for `num_groups` below 1.

    Args:
        group_ids: the group of each sample; any integers, equal for samples of the same prompt.
    """
    if num_groups < 1:
        raise BatchError(field="num_groups", value=num_groups, allowed="1 or more")
    number = {group: place for place, group in enumerate(dict.fromkeys(group_ids))}
    minis: Bins = [[] for _ in range(-(-len(number) // num_groups))]
    for sample, group in enumerate(group_ids):
        minis[number[group] // num_groups].append(sample)
    return tuple(map(tuple, minis))


def balanced_partition(sizes: Sequence[int], num_bins: int) -> Bins:
    """Distribute item indices over `num_bins` bins, with equal item counts (within one), balanced by size.

    Items are dealt in rounds, largest first; in each round the largest item goes to the bin with the smallest sum.
    So the sums of two bins differ by at most the largest difference within one round, which is at most max(sizes).
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


def first_fit(
    sizes: Sequence[int], capacity: int, max_items: int | None = None, counts: Sequence[int] | None = None
) -> Bins:
    """First-fit-decreasing bin packing: no bin exceeds `capacity` or `max_items`.

    An item larger than `capacity` gets a bin of its own. Without `max_items`, it uses at most 11/9 of the minimum
    number of bins, plus one (Johnson 1973). `counts`: how many items of `max_items` each one is, 1 by default.
    """
    bins: Bins = []
    loads: list[int] = []
    held: list[int] = []
    counts = counts or [1] * len(sizes)
    for item in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        for place, load in enumerate(loads):
            if load + sizes[item] <= capacity and (max_items is None or held[place] + counts[item] <= max_items):
                bins[place].append(item)
                loads[place] += sizes[item]
                held[place] += counts[item]
                break
        else:
            bins.append([item])
            loads.append(sizes[item])
            held.append(counts[item])
    return bins


def level_bins(
    sizes: Sequence[int],
    num_bins: int,
    capacity: int,
    max_items: int | None = None,
    counts: Sequence[int] | None = None,
) -> Bins | None:
    """Distribute item indices over `num_bins` bins of nearly equal sums within the limits; None if this fails.

    Greedy: largest item first, into the lightest bin that can take another item. An item larger than `capacity` gets a
    bin of its own. No bin is empty if there are at least `num_bins` items.
    """
    bins: Bins = [[] for _ in range(num_bins)]
    held, counts = [0] * num_bins, counts or [1] * len(sizes)
    heap = [(0, place) for place in range(num_bins)]
    for item in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        if not heap:
            return None
        load, place = heapq.heappop(heap)
        load, held[place] = load + sizes[item], held[place] + counts[item]
        full = max_items is not None and held[place] > max_items
        if bins[place] and (load > capacity or full):
            return None
        bins[place].append(item)
        if load < capacity and (max_items is None or held[place] < max_items):
            heapq.heappush(heap, (load, place))
    return bins


def nearest_divisors(number: int, wanted: int, *, multiple_of: int = 1) -> list[int]:
    """Up to four divisors of `number`, multiples of `multiple_of`, nearest to `wanted`, in ascending order."""
    divisors = [d for d in range(multiple_of, max(number, 1) + 1, multiple_of) if number % d == 0]
    return sorted(sorted(divisors, key=lambda d: (abs(d - wanted), d))[:4])


def nearest_multiples(unit: int, wanted: int) -> list[int]:
    """The multiples of `unit` (at least one unit) just below and just above `wanted`."""
    below = wanted // unit * unit
    return [multiple for multiple in (below, below + unit) if multiple >= unit]


def listed(sizes: Sequence[int]) -> str:
    """Numbers as text for an error message."""
    return ", ".join(map(str, sizes))


def _bins_within_budget(
    lengths: Sequence[int],
    num_ranks: int,
    budget: int,
    max_items: int | None,
    counts: Sequence[int] | None = None,
) -> Bins:
    """Bins within the limits; their number is a multiple of `num_ranks`. Bins are empty only if samples are too few."""
    packed = first_fit(lengths, budget, max_items, counts)
    num_bins = -(-len(packed) // num_ranks) * num_ranks
    # level_bins can fail on tight budgets; the bins of first_fit, some of them halved to reach the multiple, never do
    return level_bins(lengths, num_bins, budget, max_items, counts) or _split_to(packed, lengths, num_bins)


def _split_to(bins: Bins, lengths: Sequence[int], num_bins: int) -> Bins:
    """Halve the bin with the most tokens that has several samples, until there are `num_bins` bins."""
    bins = list(bins)
    while len(bins) < num_bins:  # fewer than there are samples, for which level_bins does not fail
        splittable = [place for place, members in enumerate(bins) if len(members) > 1]
        place = max(splittable, key=lambda p: (sum(lengths[i] for i in bins[p]), -p))
        members = bins.pop(place)
        halves = balanced_partition([lengths[i] for i in members], 2)
        bins += [[members[i] for i in half] for half in halves]
    return bins


def _spread(
    bins: Bins, lengths: Sequence[int], num_ranks: int, prefixes: "PrefixOrder | None"
) -> tuple[int, list[Bins]]:
    """The bins of each rank, and the computed tokens of the rank with the most."""
    sizes = [sum(lengths[i] for i in members) for members in bins]
    if prefixes is not None:
        sizes = [size - int(prefixes.select(members).shared_S.sum()) for size, members in zip(sizes, bins, strict=True)]
    ranks = balanced_partition(sizes, num_ranks)
    largest = max(sum(sizes[place] for place in rank) for rank in ranks)
    return largest, [[bins[place] for place in rank] for rank in ranks]


def _cost(spread: tuple[int, list[Bins]]) -> tuple[int, int]:
    """Tokens of the largest rank, then the number of micro batches."""
    largest, ranks = spread
    return largest, len(ranks[0])


def _num_empty(bins: Bins) -> int:
    return sum(not members for members in bins)


def _bins_of_prefixes(
    lengths: Sequence[int],
    prefixes: "PrefixOrder",
    loads: Sequence[int] | None,
    num_ranks: int,
    budget: int | None,
    max_items: int | None,
    *,
    num_bins: int,
) -> Iterator[tuple[int, Bins]]:
    """Bins in which prefixes are whole, then such in which they are split into smaller and smaller runs.

    A run is a sequence of neighbors in the order of `prefixes`. Each comes with the sum of the tokens of all runs.
    Without a budget there is one candidate, runs of equally many samples (within one) in `num_bins` bins.
    """
    order, shared = prefixes.order_S.tolist(), prefixes.shared_S.tolist()
    lens, total = [lengths[i] for i in order], len(order)
    load = [0 if loads is None else loads[i] for i in order]
    if budget is None:
        cuts = [total * place // num_bins for place in range(num_bins + 1)]
        yield 0, [order[start:end] for start, end in pairwise(cuts)]
        return
    runs = _cut(lens, shared, load, (0, total), budget, max_items)
    for _ in range(_MAX_ROUNDS):
        computed = [sum(lens[start:end]) - sum(shared[start + 1 : end]) for start, end in runs]
        sizes = [max(size, sum(load[start:end])) for size, (start, end) in zip(computed, runs, strict=True)]
        counts = [end - start for start, end in runs]
        bins = _bins_within_budget(sizes, num_ranks, budget, max_items, counts)
        yield sum(computed), [[i for run in members for i in order[slice(*runs[run])]] for members in bins]
        splittable = sorted((run for run, count in enumerate(counts) if count > 1), key=lambda run: -sizes[run])
        if not splittable:
            return
        # as many as there are empty bins, else the largest ones
        largest = sizes[splittable[0]]
        split = set(splittable[: _num_empty(bins)] or [run for run in splittable if 8 * sizes[run] > 7 * largest])
        runs = [
            part
            for run, span in enumerate(runs)
            for part in (_cut(lens, shared, load, span, sizes[run] - 1, None) if run in split else [span])
        ]


def _cut(
    lens: Sequence[int],
    shared: Sequence[int],
    loads: Sequence[int],
    run: tuple[int, int],
    capacity: int,
    max_items: int | None,
) -> list[tuple[int, int]]:
    """Cuts a run into runs within the limits, so that the fewest tokens are computed twice, then of similar sizes.

    A cut costs the tokens that the sample after it shares with the one before. A longer sample gets a run of its own.
    """
    first, last = run
    if (
        all(shared[first + 1 : last])
        and max(sum(lens[first:last]) - sum(shared[first + 1 : last]), sum(loads[first:last])) <= capacity
        and (max_items is None or last - first <= max_items)
    ):
        return [run]  # any cut computes tokens twice
    best: list[tuple[int, int, int]] = [(0, 0, first)]  # tokens computed twice, sum of squares, start of the last run
    for end in range(first + 1, last + 1):
        computed, load, options = 0, 0, []
        for start in range(end - 1, first - 1, -1):
            computed += lens[start] - (shared[start + 1] if start + 1 < end else 0)
            load += loads[start]
            size = max(computed, load)
            if end - start > 1 and (size > capacity or (max_items is not None and end - start > max_items)):
                break
            twice, squares, _ = best[start - first]
            options.append((twice + (shared[start] if start > first else 0), squares + size * size, start))
            if not shared[start]:
                break  # a longer run shares nothing more
        best.append(min(options))
    cuts = [last]
    while cuts[-1] > first:
        cuts.append(best[cuts[-1] - first][2])
    return list(pairwise(cuts[::-1]))
