"""Contamination: rows that contain a held-out prompt, found by n-grams.

A row contains a held-out prompt if at least a share of the prompt's distinct n-grams occurs in the row's prompt, also
within a longer text. The direction matters: a long row with a held-out question in it shares few of its own n-grams.
PaLM (arXiv:2204.02311, section 8) uses 70% of 8-grams.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from .text import U64, NGrams


class HeldOut:
    """The n-grams of held-out prompts, in memory: 16 bytes per n-gram."""

    def __init__(self, prompts: Sequence[list[str]], *, n: int, share: float) -> None:
        """`prompts` are lists of tokens, at least one."""
        self.n, self._share = n, share
        ngrams = NGrams(prompts, n)
        pairs = np.unique(np.stack([ngrams.hashes, ngrams.owners().astype(np.uint64)]), axis=1)
        self._hashes, self._owners = pairs[0], pairs[1].astype(np.int64)
        self._num_ngrams = np.bincount(self._owners, minlength=len(prompts))

    def found_in(self, texts: Sequence[list[str]]) -> dict[int, tuple[int, float]]:
        """For each contaminated text the held-out prompt it contains most of, and the share of its n-grams."""
        ngrams = NGrams(texts, self.n)
        owners = ngrams.owners()
        is_known = np.isin(ngrams.hashes, self._hashes)
        hashes, owners = ngrams.hashes[is_known], owners[is_known]
        known_texts, starts = np.unique(owners, return_index=True)
        most = [self._most(np.unique(part)) for part in np.split(hashes, starts[1:])] if len(known_texts) else []
        return {int(text): best for text, best in zip(known_texts, most, strict=True) if best[1] >= self._share}

    def _most(self, hashes: U64) -> tuple[int, float]:
        """The held-out prompt that has the largest share of its n-grams among `hashes`, and this share."""
        firsts = np.searchsorted(self._hashes, hashes, "left")
        lasts = np.searchsorted(self._hashes, hashes, "right")
        owners: NDArray[np.int64] = np.concatenate(
            [self._owners[first:last] for first, last in zip(firsts, lasts, strict=True)]
        )
        prompts, counts = np.unique(owners, return_counts=True)
        shares = counts / self._num_ngrams[prompts]
        best = int(np.argmax(shares))
        return int(prompts[best]), float(shares[best])
