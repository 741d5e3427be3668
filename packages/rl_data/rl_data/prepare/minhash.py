"""MinHash signatures and their bands, which find near duplicates without comparing all pairs.

A signature has the smallest hash of a text's shingles under each of `NUM_PERMUTATIONS` permutations; two texts agree in
one of them with the probability of their Jaccard similarity s (Broder, 1997, "On the resemblance and containment of
documents"). The signature is cut into b bands of r values. Texts that agree in all values of a band are near
duplicates, which happens with probability 1 - (1 - s^r)^b (Indyk and Motwani, 1998). datasketch has all this, but
depends on SciPy, which nothing else here needs.
"""

from dataclasses import dataclass

import numpy as np

from .text import U64, NGrams, combined

NUM_PERMUTATIONS = 128
SHINGLE = 5
"""Tokens per shingle."""


@dataclass(frozen=True)
class Bands:
    """The number of bands and of values (`rows`) in each."""

    num_bands: int
    rows: int

    def probability(self, similarity: float) -> float:
        """The probability that two texts of this Jaccard similarity are near duplicates."""
        return float(1 - (1 - similarity**self.rows) ** self.num_bands)


def choose_bands(similarity: float) -> Bands:
    """The bands with the smallest sum of false positives and false negatives around a Jaccard similarity.

    The sums are integrals of the probability below the similarity and of its complement above, as in datasketch.
    """
    if similarity == 1:
        return Bands(1, NUM_PERMUTATIONS)
    lengths = range(1, NUM_PERMUTATIONS + 1)
    possible = [Bands(num, rows) for rows in lengths for num in range(1, NUM_PERMUTATIONS // rows + 1)]
    return min(possible, key=lambda bands: _error(bands, similarity))


def _error(bands: Bands, similarity: float) -> float:
    grid = (np.arange(200) + 0.5) / 200
    found = 1 - (1 - grid**bands.rows) ** bands.num_bands
    return float(np.where(grid < similarity, found, 1 - found).sum())


def signatures(shingles: NGrams) -> list[U64]:
    """The smallest hashes: for each permutation one value per text."""
    rng = np.random.Generator(np.random.PCG64(0))
    # Multiplication by an odd number and addition are bijections of 64-bit integers.
    factors = rng.integers(0, 2**64, NUM_PERMUTATIONS, np.uint64) | np.uint64(1)
    offsets = rng.integers(0, 2**64, NUM_PERMUTATIONS, np.uint64)
    return [
        np.minimum.reduceat(shingles.hashes * factor + offset, shingles.starts)
        for factor, offset in zip(factors, offsets, strict=True)
    ]


def band_keys(shingles: NGrams, must_agree: U64, bands: Bands) -> list[U64]:
    """For each band one key per text; texts with an equal key in one band are near duplicates.

    Args:
        must_agree: one hash per text; texts of different hashes are never near duplicates.
    """
    values = signatures(shingles)
    return [
        combined([must_agree, *values[band * bands.rows : (band + 1) * bands.rows]]) for band in range(bands.num_bands)
    ]
