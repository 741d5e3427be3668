"""Prompts that duplicate others or contain held-out ones: their tokens, n-grams and MinHash signatures."""

import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Sequence
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

Hashes = NDArray[np.int64]
NUM_PERMUTATIONS, SHINGLE = 128, 5

# One token per character in scripts without spaces between words.
_CJK = r"\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff"
_TOKEN = re.compile(rf"[{_CJK}]|[^\W{_CJK}]+|[^\w\s]")
_NUMBER_OR_OPERATOR = re.compile(r"\d+|[+*/^=<>×÷√]|-(?![a-z]{2})")


def normalized(text: str) -> str:
    """The text without differences of case, of spaces and of compatible Unicode characters (NFKC)."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def tokens(text: str) -> list[str]:
    """Words, numbers, and single punctuation marks of a normalized text; single characters of Chinese and Japanese."""
    return _TOKEN.findall(text)


def numbers_and_operators(text: str) -> str:
    """The numbers and operators of a normalized text in order; a hyphen in a word is none."""
    return " ".join(_NUMBER_OR_OPERATOR.findall(text))


def ngrams(words: Sequence[str], n: int) -> list[str]:
    """The distinct n-grams of a text in order; a text of fewer than n tokens is one n-gram."""
    return list(dict.fromkeys(" ".join(words[start : start + n]) for start in range(max(1, len(words) - n + 1))))


def digest(*parts: str | bytes) -> int:
    """64-bit hash, the same in every process; signed, as Arrow's columns of integers."""
    data = b"\n".join(part.encode() if isinstance(part, str) else part for part in parts)
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "little", signed=True)


class HeldOut:
    """Held-out prompts, found in others by their n-grams.

    A text contains a prompt if at least `share` of the prompt's n-grams occur in it, also within a longer text. PaLM
    (arXiv:2204.02311, section 8) uses 70% of 8-grams.
    """

    def __init__(self, *, n: int = 8, share: float = 0.7) -> None:
        self._n, self._share = n, share
        self._sizes: dict[str, int] = {}
        self._owners: defaultdict[str, list[str]] = defaultdict(list)

    def add(self, name: str, words: Sequence[str]) -> None:
        """Adds the tokens of a prompt."""
        distinct = ngrams(words, self._n)
        self._sizes[name] = len(distinct)
        for ngram in distinct:
            self._owners[ngram].append(name)

    def contained(self, words: Sequence[str]) -> tuple[str, float]:
        """The prompt that a text contains most of, and the share of its n-grams; ("", 0) if it contains none."""
        counts = Counter(owner for ngram in ngrams(words, self._n) for owner in self._owners.get(ngram, ()))
        shares = [(count / self._sizes[owner], owner) for owner, count in counts.items()]
        share, name = max(shares, default=(0.0, ""))
        return (name, share) if share >= self._share else ("", 0.0)


class NearDuplicates:
    """Hashes of near duplicates: datasketch's MinHash of a text, cut into bands of values.

    Texts that agree in all values of a band are near duplicates. The bands become hashes on the disk, because an index
    of datasketch keeps kilobytes per row in memory.
    """

    def __init__(self, similarity: float = 0.8) -> None:
        from datasketch import MinHash, MinHashLSH

        index = MinHashLSH(threshold=similarity, num_perm=NUM_PERMUTATIONS)
        self.num_bands, self.num_values = int(index.b), int(index.r)
        self._empty = MinHash(num_perm=NUM_PERMUTATIONS)

    def hashes(self, words: Sequence[str], must_agree: str) -> list[int]:
        """A hash per band: near duplicates share one, for which their `must_agree` has to be equal."""
        signature = self._empty.copy()
        signature.update_batch([ngram.encode() for ngram in ngrams(words, SHINGLE)])
        bands = signature.hashvalues[: self.num_bands * self.num_values].reshape(self.num_bands, -1)
        return [digest(band.tobytes(), must_agree) for band in bands]


def firsts(hashes: Hashes, contents: Hashes) -> Hashes:
    """The row with the smallest hash of its content that shares a hash with it, for each row of hashes [rows, columns].

    The rows that are their own first are kept. They do not depend on the order of rows, at least one of them is in
    each group of duplicates, and no two of them share a hash, so another pass over them drops nothing.
    """
    order = np.argsort(contents, kind="stable")
    ranks = np.arange(len(hashes))
    for column in hashes[order].T:
        _, first, inverse = np.unique(column, return_index=True, return_inverse=True)
        ranks = np.minimum(ranks, first[inverse])
    rows = np.empty_like(order)
    rows[order] = order[ranks]
    return rows
