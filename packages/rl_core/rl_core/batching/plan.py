"""Mini-batch splits and micro-batch plans: which rank computes which sample in which micro batch.

A train batch holds the prompts of one step, a mini batch those of one optimizer step, a micro batch the sequences of
one forward/backward. There are dp replicas of sp ranks each; the sp ranks of a replica share every sequence.
Pure Python and deterministic.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import BatchError

Bins = list[list[int]]


@dataclass(frozen=True, kw_only=True)
class MicroBatchPlan:
    """The samples that each rank computes in each micro batch."""

    assignment: tuple[tuple[tuple[int, ...], ...], ...]
    """`[rank][micro batch]` -> sample indices; equally many micro batches on every rank, each sample once."""
    num_samples: int

    @property
    def num_ranks(self) -> int:
        return len(self.assignment)

    @property
    def num_micro_batches(self) -> int:
        """Micro batches on each rank."""
        return len(self.assignment[0])

    def rank_samples(self, rank: int) -> tuple[int, ...]:
        """Sample indices of a rank, in the order in which it computes them."""
        return tuple(index for micro in self.assignment[rank] for index in micro)


def plan_micro_batches(
    lengths: Sequence[int],
    *,
    num_ranks: int,
    token_budget: int | None = None,
    micro_batch_size: int | None = None,
) -> MicroBatchPlan:
    """Spread samples over `num_ranks` (dp) ranks and micro batches, balanced by tokens.

    `lengths` are the tokens of each sample. The plan guarantees:

    * Every rank gets the same number of micro batches, and every sample is computed exactly once.
    * `token_budget`: no micro batch holds more tokens, except that a longer sample gets a micro batch of its own.
    * `micro_batch_size`: no micro batch holds more samples. Without a budget their sizes also differ by at most one,
      and the count is ceil(samples / (num_ranks * micro_batch_size)). With both, both limits hold.
    * A micro batch is empty only if there are fewer samples than num_ranks * count.
    * The k-th micro batches of all ranks, which run at the same time, are of similar size. The tokens of two ranks
      differ by at most the spread of the micro batches (largest minus smallest).

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
    ranks = balanced_partition([sum(lengths[i] for i in members) for members in bins], num_ranks)
    assignment = tuple(tuple(tuple(sorted(bins[place])) for place in rank) for rank in ranks)
    return MicroBatchPlan(assignment=assignment, num_samples=len(lengths))


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


def first_fit(sizes: Sequence[int], capacity: int, max_items: int | None = None) -> Bins:
    """First-fit-decreasing bin packing: no bin exceeds `capacity` or `max_items`.

    An item larger than `capacity` gets a bin of its own. Without `max_items`, it uses at most 11/9 of the minimum
    number of bins, plus one (Johnson 1973).
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
    """Distribute item indices over `num_bins` bins of nearly equal sums within the limits; None if this fails.

    Greedy: largest item first, into the lightest bin that can take another item. An item larger than `capacity` gets a
    bin of its own. No bin is empty if there are at least `num_bins` items.
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


def _bins_within_budget(lengths: Sequence[int], num_ranks: int, budget: int, max_items: int | None) -> Bins:
    """Bins within the limits; their number is a multiple of `num_ranks`. Bins are empty only if samples are too few."""
    packed = first_fit(lengths, budget, max_items)
    num_bins = -(-len(packed) // num_ranks) * num_ranks
    # level_bins can fail on tight budgets; the bins of first_fit, some of them halved to reach the multiple, never do
    return level_bins(lengths, num_bins, budget, max_items) or _split_to(packed, lengths, num_bins)


def _split_to(bins: Bins, lengths: Sequence[int], num_bins: int) -> Bins:
    """Halve the bin with the most tokens that has several samples, until there are `num_bins` bins."""
    bins = list(bins)
    while len(bins) < num_bins:
        splittable = [place for place, members in enumerate(bins) if len(members) > 1]
        if not splittable:
            bins += [[] for _ in range(num_bins - len(bins))]
            break
        place = max(splittable, key=lambda p: (sum(lengths[i] for i in bins[p]), -p))
        members = bins.pop(place)
        halves = balanced_partition([lengths[i] for i in members], 2)
        bins += [[members[i] for i in half] for half in halves]
    return bins
