"""Batch arithmetic: which sample is computed where, and what DeepSpeed will count.

Words: the train batch holds the prompts of one step, a mini batch those of one optimizer step, a micro batch the
sequences of one forward/backward. dp replicas of sp ranks each; the sp ranks of a replica share every sequence.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from ..errors import BatchError
from .partition import Bins, balanced_partition, first_fit, level_bins

__all__ = ["MicroBatchPlan", "plan_micro_batches", "split_mini_batches"]

Item = TypeVar("Item")


@dataclass(frozen=True, kw_only=True)
class MicroBatchPlan:
    """Which samples each rank computes in each micro batch."""

    assignment: tuple[tuple[tuple[int, ...], ...], ...]
    """[rank][micro batch] -> sample indices; the same number of micro batches on every rank, each sample once."""
    num_samples: int

    @property
    def num_ranks(self) -> int:
        return len(self.assignment)

    @property
    def num_micro_batches(self) -> int:
        """Micro batches on each rank."""
        return len(self.assignment[0])

    def rank_samples(self, rank: int) -> tuple[int, ...]:
        """Sample indices of a rank in the order it computes them."""
        return tuple(index for micro in self.assignment[rank] for index in micro)

    def restore(self, results: Sequence[Sequence[Sequence[Item]]]) -> list[Item]:
        """Results laid out as [rank][micro batch][sample] back in the order of the samples.

        Raises `BatchError` when the layout is not this plan's.
        """
        ordered: dict[int, Item] = {}
        if len(results) != self.num_ranks:
            raise BatchError(f"results of {len(results)} ranks for a plan of {self.num_ranks}")
        for rank, (micros, rank_results) in enumerate(zip(self.assignment, results, strict=True)):
            got = [len(micro_results) for micro_results in rank_results]
            if got != [len(micro) for micro in micros]:
                raise BatchError(f"rank {rank}: {got} results per micro batch, planned {[len(m) for m in micros]}")
            for micro, micro_results in zip(micros, rank_results, strict=True):
                ordered.update(zip(micro, micro_results, strict=True))
        return [ordered[index] for index in range(self.num_samples)]


def plan_micro_batches(
    lengths: Sequence[int],
    *,
    num_ranks: int,
    token_budget: int | None = None,
    micro_batch_size: int | None = None,
) -> MicroBatchPlan:
    """Spread samples over ranks and micro batches, balanced by tokens. `num_ranks` is dp, `lengths` tokens a sample.

    * Every rank gets the same number of micro batches, every sample is computed exactly once.
    * `token_budget`: no micro batch holds more tokens; a single longer sample is alone in its own.
    * `micro_batch_size`: no micro batch holds more samples; without a budget their sizes also differ by at most one,
      and the count is ceil(samples / (num_ranks * micro_batch_size)). Both given: both limits hold.
    * A micro batch is empty only where there are fewer samples than num_ranks * count.
    * The k-th micro batches of all ranks are of similar size (they run in step), and the tokens of two ranks differ by
      at most the spread of the micro batches (largest minus smallest).

    Raises `BatchError`: no sample, no limit, a length or limit below 1.
    """
    lengths = [int(length) for length in lengths]
    if not lengths:
        raise BatchError("no samples to plan; give at least one")
    if min(lengths) < 1:
        raise BatchError(f"sample {lengths.index(min(lengths))} has length {min(lengths)}; lengths must be at least 1")
    for name, value in (
        ("num_ranks", num_ranks),
        ("token_budget", token_budget),
        ("micro_batch_size", micro_batch_size),
    ):
        if value is not None and value < 1:
            raise BatchError(f"{name}={value}: must be at least 1")
    if token_budget is not None:
        bins = _bins_within_budget(lengths, num_ranks, token_budget, micro_batch_size)
    elif micro_batch_size is not None:
        count = -(-len(lengths) // (num_ranks * micro_batch_size))
        bins = balanced_partition(lengths, num_ranks * count)
    else:
        raise BatchError("give token_budget or micro_batch_size")
    return MicroBatchPlan(assignment=_deal(bins, lengths, num_ranks), num_samples=len(lengths))


def split_mini_batches(num_prompts: int, mini_batch_size: int) -> tuple[tuple[int, ...], ...]:
    """Indices 0 … num_prompts - 1 in order, cut into mini batches of exactly `mini_batch_size`.

    Raises `BatchError` naming sizes that would do.
    """
    if num_prompts < 1 or mini_batch_size < 1 or num_prompts % mini_batch_size:
        raise BatchError(
            f"mini_batch_size={mini_batch_size} does not divide the {num_prompts} prompts of a step;"
            f" sizes that would do: {listed(nearest_divisors(num_prompts, mini_batch_size))}"
        )
    return tuple(tuple(range(start, start + mini_batch_size)) for start in range(0, num_prompts, mini_batch_size))


def nearest_divisors(number: int, wanted: int, limit: int = 4) -> list[int]:
    """Up to `limit` divisors of `number` nearest to `wanted`, in order."""
    divisors = [d for d in range(1, max(number, 1) + 1) if number % d == 0]
    return sorted(sorted(divisors, key=lambda d: (abs(d - wanted), d))[:limit])


def nearest_multiples(unit: int, wanted: int) -> list[int]:
    """The multiples of `unit` (at least one unit) just below and just above `wanted`."""
    below = wanted // unit * unit
    return [multiple for multiple in (below, below + unit) if multiple >= unit]


def listed(sizes: Sequence[int]) -> str:
    """Numbers as an error message names them."""
    return ", ".join(map(str, sizes))


def _bins_within_budget(lengths: Sequence[int], num_ranks: int, budget: int, max_items: int | None) -> Bins:
    """Non-empty bins under the limits, their number a multiple of `num_ranks` (empty ones only for want of samples)."""
    packed = first_fit(lengths, budget, max_items)
    num_bins = -(-len(packed) // num_ranks) * num_ranks
    # levelling fails on tight budgets; then first fit's own bins do, halved up to the multiple (random search never saw
    # levelling fail with a bin to spare, but nothing proves it)
    return level_bins(lengths, num_bins, budget, max_items) or _split_to(packed, lengths, num_bins)


def _split_to(bins: Bins, lengths: Sequence[int], num_bins: int) -> Bins:
    """Halve the bin with most tokens among those with several samples until there are `num_bins`."""
    bins = [list(members) for members in bins]
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


def _deal(bins: Bins, lengths: Sequence[int], num_ranks: int) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Deal bins to ranks in rounds, largest first; each round's largest goes to the rank with least so far."""
    sizes = [sum(lengths[i] for i in members) for members in bins]
    ranks = balanced_partition(sizes, num_ranks)
    return tuple(tuple(tuple(sorted(bins[place])) for place in rank) for rank in ranks)
