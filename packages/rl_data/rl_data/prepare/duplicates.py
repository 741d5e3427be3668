"""Prompts that duplicate others or contain held-out ones: their tokens, n-grams and MinHash signatures."""

import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Sequence
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

Keys = NDArray[np.int64]
_U64 = NDArray[np.uint64]
NUM_PERMUTATIONS, SHINGLE = 128, 5
_MAX_THRESHOLD = 0.98
"""Above it, 128 permutations cannot be divided into two bands, which datasketch needs."""

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


def digest(data: str | bytes) -> int:
    """64-bit hash, the same in every process; signed, as Arrow's columns of integers."""
    data = data.encode() if isinstance(data, str) else data
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "little", signed=True)


class HeldOut:
    """Held-out prompts, found in others by their n-grams.

    A text contains a prompt if at least `share` of the prompt's n-grams occur in it, also within a longer text. The
    direction matters: a long text with a held-out question in it shares few of its own n-grams. PaLM
    (arXiv:2204.02311, section 8) uses 70% of 8-grams.
    """

    def __init__(self, *, n: int = 8, share: float = 0.7) -> None:
        self._n, self._share = n, share
        self._sizes: list[int] = []
        self._owners: defaultdict[str, list[int]] = defaultdict(list)

    def add(self, words: Sequence[str]) -> None:
        """Adds the tokens of a prompt."""
        distinct = ngrams(words, self._n)
        for ngram in distinct:
            self._owners[ngram].append(len(self._sizes))
        self._sizes.append(len(distinct))

    def contained(self, words: Sequence[str]) -> tuple[int, float] | None:
        """The prompt that a text contains most of, and the share of its n-grams; None if it contains none."""
        if not self._sizes:
            return None
        counts = Counter(owner for ngram in ngrams(words, self._n) for owner in self._owners.get(ngram, ()))
        shares = [(count / self._sizes[owner], -owner) for owner, count in counts.items()]
        share, negative = max(shares, default=(0.0, 0))
        return (-negative, share) if shares and share >= self._share else None


class NearDuplicates:
    """Keys of near duplicates: datasketch's MinHash of a text, cut into bands of values.

    Texts that agree in all values of a band are near duplicates, which happens with probability 1 - (1 - s^r)^b for
    texts of Jaccard similarity s, b bands and r values in each. The bands become hashes on the disk, because an index
    of datasketch keeps kilobytes per row in memory.
    """

    def __init__(self, similarity: float) -> None:
        from datasketch import MinHash, MinHashLSH

        index = MinHashLSH(threshold=min(similarity, _MAX_THRESHOLD), num_perm=NUM_PERMUTATIONS)
        self.num_bands, self.num_values = int(index.b), int(index.r)
        self._empty = MinHash(num_perm=NUM_PERMUTATIONS)

    def keys(self, words: Sequence[str], must_agree: str) -> list[int]:
        """A key per band: near duplicates share one, for which their `must_agree` has to be equal."""
        signature = self._empty.copy()
        signature.update_batch([ngram.encode() for ngram in ngrams(words, SHINGLE)])
        bands = signature.hashvalues[: self.num_bands * self.num_values].reshape(self.num_bands, -1)
        return [digest(band.tobytes() + must_agree.encode()) for band in bands]


def firsts(keys: Keys, contents: Keys) -> NDArray[np.int64]:
    """For each row of keys [rows, columns], the row with the smallest hash of its content that shares a key with it.

    The rows that are their own first are kept. They do not depend on the order of rows, at least one of them is in
    each group of duplicates, and no two of them share a key, so another pass over them drops nothing.
    """
    order = np.argsort(contents, kind="stable")
    ranks = np.arange(len(keys))
    for column in keys[order].T:
        _, first, inverse = np.unique(column, return_index=True, return_inverse=True)
        ranks = np.minimum(ranks, first[inverse])
    rows = np.empty_like(order)
    rows[order] = order[ranks]
    return rows


def is_validation(prompts: Keys, seed: int, share: float) -> NDArray[np.bool_]:
    """A mask of the prompts, given as hashes, for validation; it depends on nothing but the prompt and the seed."""
    mixed = _mixed(prompts.view(np.uint64) ^ _mixed(np.array([seed % 2**64], np.uint64)))
    mask: NDArray[np.bool_] = (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53 < share
    return mask


def _mixed(values: _U64) -> _U64:
    """A bijection of 64-bit integers that changes half of the bits (the finalizer of splitmix64)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
