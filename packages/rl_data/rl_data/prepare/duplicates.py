"""Prompts that duplicate others or contain held-out ones: their tokens, n-grams and MinHash signatures."""

import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

U64 = NDArray[np.uint64]
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
    """64-bit hash, the same in every process."""
    return int.from_bytes(blake2b(data.encode() if isinstance(data, str) else data, digest_size=8).digest(), "little")


def digests(texts: Iterable[str]) -> U64:
    """`digest` of each text."""
    return np.array(list(map(digest, texts)), np.uint64)


class HeldOut:
    """Held-out prompts, found in others by their n-grams.

    A text contains a prompt if at least `share` of the prompt's n-grams occur in it, also within a longer text. The
    direction matters: a long text with a held-out question in it shares few of its own n-grams. PaLM
    (arXiv:2204.02311, section 8) uses 70% of 8-grams.
    """

    def __init__(self, *, n: int, share: float) -> None:
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
    """Finds near duplicates without comparing all pairs: datasketch's MinHash, and bands of its values.

    Texts that agree in all values of a band are near duplicates, which happens with probability 1 - (1 - s^r)^b for
    texts of Jaccard similarity s, b bands and r values in each. The bands become hashes in a column each, not an index
    of datasketch in memory, which takes kilobytes per row.
    """

    def __init__(self, similarity: float) -> None:
        from datasketch import MinHashLSH

        index = MinHashLSH(threshold=min(similarity, _MAX_THRESHOLD), num_perm=NUM_PERMUTATIONS)
        self.num_bands, self.num_values = int(index.b), int(index.r)

    def probability(self, similarity: float) -> float:
        """The probability that two texts of this Jaccard similarity are near duplicates."""
        return float(1 - (1 - similarity**self.num_values) ** self.num_bands)

    def keys(self, texts: Sequence[Sequence[str]], must_agree: Sequence[str]) -> U64:
        """Keys [texts, bands]: near duplicates share a key, for which their `must_agree` has to be equal."""
        from datasketch import MinHash

        shingles = ([ngram.encode() for ngram in ngrams(words, SHINGLE)] for words in texts)
        signatures = MinHash.generator(shingles, num_perm=NUM_PERMUTATIONS)
        keys = np.empty((len(texts), self.num_bands), np.uint64)
        for row, (signature, agree) in enumerate(zip(signatures, must_agree, strict=True)):
            bands = signature.hashvalues[: self.num_bands * self.num_values].reshape(self.num_bands, -1)
            keys[row] = [digest(band.tobytes() + agree.encode()) for band in bands]
        return keys


def groups(keys: U64) -> NDArray[np.int32]:
    """The group of each row of keys: rows share the key of a column, or are connected by a chain of such rows."""
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    edges = [np.empty((2, 0), np.int64)]
    for column in keys.T:
        order = np.argsort(column, kind="stable")
        same = np.flatnonzero(column[order[1:]] == column[order[:-1]])
        edges.append(np.stack([order[same], order[same + 1]]))
    pairs = np.concatenate(edges, axis=1)
    graph = coo_array((np.ones(pairs.shape[1], np.int8), (pairs[0], pairs[1])), shape=(len(keys), len(keys)))
    labels: NDArray[np.int32] = connected_components(graph, directed=False)[1]
    return labels


def keepers(labels: NDArray[np.int32], contents: U64) -> NDArray[np.int64]:
    """For each row the row of its group that is kept: the one whose content has the smallest hash.

    So the rows kept do not depend on the order of rows, and another pass over them drops nothing.
    """
    order = np.argsort(contents, kind="stable")
    _, firsts = np.unique(labels[order], return_index=True)
    kept: NDArray[np.int64] = order[firsts][labels]
    return kept


def is_validation(prompts: U64, seed: int, share: float) -> NDArray[np.bool_]:
    """A mask of the prompts, given as hashes, for validation; it depends on nothing but the prompt and the seed."""
    mixed = _mixed(prompts ^ _mixed(np.array([seed % 2**64], np.uint64)))
    mask: NDArray[np.bool_] = (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53 < share
    return mask


def _mixed(values: U64) -> U64:
    """A bijection of 64-bit integers that changes half of the bits (the finalizer of splitmix64)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
