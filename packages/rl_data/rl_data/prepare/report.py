"""What `prepare_data` found and did; the data card shows it."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from .minhash import Bands

MAX_EXAMPLES = 5

UNUSABLE = "unusable"
SHORT_PROMPT = "prompt too short"
LONG_PROMPT = "prompt too long"
LONG_RESPONSE = "response too long"
CONTAMINATED = "contains a held-out prompt"
CONTAMINATED_KEPT = "contains a held-out prompt and is kept"
EXACT = "duplicate of a prompt"
NEAR = "near duplicate of a prompt"
CONFLICT = "duplicate with another ground truth"
REASONS = (UNUSABLE, SHORT_PROMPT, LONG_PROMPT, LONG_RESPONSE, CONTAMINATED, EXACT, NEAR)
"""Why rows are dropped; each dropped row is counted once."""


@dataclass(frozen=True, kw_only=True)
class Input:
    """A file that was read. `num_rows` counts its usable rows."""

    file: str
    layout: str
    num_rows: int
    num_bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Output:
    """A file that was written."""

    name: str
    num_rows: int
    num_bytes: int
    sha256: str


@dataclass(frozen=True)
class Example:
    """A row that was dropped, or reported: its place, its text, and what it was compared with."""

    place: str
    text: str
    other: str = ""


@dataclass
class Removed:
    """Counts of rows by reason, with the first few of each."""

    counts: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[Example]] = field(default_factory=dict)

    def add(self, reason: str, example: Example) -> None:
        """Count one row."""
        self.counts[reason] += 1
        examples = self.examples.setdefault(reason, [])
        if len(examples) < MAX_EXAMPLES:
            examples.append(example)


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """Statistics of lengths: the rows in each bin of powers of two, from 0 on."""

    bins: Sequence[tuple[int, int, int]]
    """(first, last, number of rows)"""
    quantiles: Mapping[str, int]


def summarize(lengths: NDArray[np.uint32]) -> Lengths:
    """The statistics of at least one length."""
    exponents = np.ceil(np.log2(lengths.astype(np.float64) + 1)).astype(np.int64)
    counts = np.bincount(exponents)
    bins = [((1 << power) // 2, (1 << power) - 1, int(count)) for power, count in enumerate(counts)]
    first = next(index for index, (_, _, count) in enumerate(bins) if count)
    ordered = np.sort(lengths)
    names = {"smallest": 0.0, "median": 0.5, "95%": 0.95, "largest": 1.0}
    # The smallest length that at least this share of the rows does not exceed: a length that occurs.
    places = {name: max(0, int(np.ceil(share * len(ordered))) - 1) for name, share in names.items()}
    return Lengths(bins=bins[first:], quantiles={name: int(ordered[place]) for name, place in places.items()})


@dataclass(frozen=True, kw_only=True)
class Report:
    """The result of `prepare_data`."""

    command: str
    inputs: Sequence[Input]
    held_out: Sequence[Input]
    outputs: Sequence[Output]
    removed: Removed
    notes: Sequence[str]
    """Lines about what was chosen or left out."""
    bands: Bands | None
    """What finds near duplicates; None if nothing looks for them."""
    unit: str
    """Of lengths: tokens or characters."""
    prompt_lengths: Lengths
    response_lengths: Lengths | None
    """None if no row has a response."""
    num_responses: int
    num_ground_truths: int
    data_sources: Mapping[str, int]
    columns: Mapping[str, str]
    """Arrow types of the columns written."""
    samples: Sequence[str]
    """The first training rows, as indented JSON."""

    @property
    def num_read(self) -> int:
        """Rows of all inputs, unusable ones included."""
        return sum(given.num_rows for given in self.inputs) + self.removed.counts[UNUSABLE]

    @property
    def num_kept(self) -> int:
        """Rows of all outputs."""
        return sum(output.num_rows for output in self.outputs)
