"""Texts as duplicates and contamination are found in them: normalized, as tokens, and as hashes of n-grams."""

import re
import unicodedata
from collections.abc import Sequence
from hashlib import blake2b
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

U64 = NDArray[np.uint64]

# One token per character in scripts without spaces between words.
_CJK = r"\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff"
_TOKEN = re.compile(rf"[{_CJK}]|[^\W{_CJK}]+|[^\w\s]")
_NUMBER_OR_OPERATOR = re.compile(r"\d+|[+*/^=<>×÷√]|-(?![a-z]{2})")
# Odd constants with about as many ones as zeros: 2^64 divided by the golden ratio, and splitmix64's multipliers.
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1, _MIX_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)

_NO_TOKEN = 2**32
"""Fills up short texts; no CRC-32 has this value."""


def normalized(text: str) -> str:
    """The text without differences of case, of spaces and of compatible Unicode characters (NFKC)."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def tokens(text: str) -> list[str]:
    """Words, numbers, and single punctuation marks of a normalized text; single characters of Chinese and Japanese."""
    return _TOKEN.findall(text)


def numbers_and_operators(text: str) -> str:
    """The numbers and operators of a normalized text in order; a hyphen in a word is none."""
    return " ".join(_NUMBER_OR_OPERATOR.findall(text))


def digest(text: str) -> int:
    """64-bit hash of a text, the same in every process."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")


def digests(texts: Sequence[str]) -> U64:
    """`digest` of each text."""
    return np.fromiter(map(digest, texts), np.uint64, len(texts))


def mixed(values: U64) -> U64:
    """A bijection of 64-bit integers that changes half of the bits (the finalizer of splitmix64)."""
    values = (values ^ (values >> np.uint64(30))) * _MIX_1
    values = (values ^ (values >> np.uint64(27))) * _MIX_2
    return values ^ (values >> np.uint64(31))


def combined(columns: Sequence[U64]) -> U64:
    """One hash per row of several columns; their order matters."""
    total = np.zeros_like(columns[0])
    for column in columns:
        total = total * _GOLDEN + column
    return mixed(total)


class NGrams:
    """Hashes of the n-grams of several texts, one after another.

    Attributes:
        hashes: uint64 [total number of n-grams].
        starts: int64 [number of texts], where the n-grams of each text start. Each text has at least one: a text of
            fewer than n tokens is one n-gram of its own.
    """

    def __init__(self, texts: Sequence[list[str]], n: int) -> None:
        """`texts` are lists of tokens."""
        flat: list[int] = []
        for text in texts:
            flat += map(crc32, " ".join(text).encode().split(b" ")) if text else ()
            flat += [_NO_TOKEN] * (n - len(text))
        lengths = np.fromiter((max(len(text), n) for text in texts), np.int64, len(texts))
        self.hashes = _windows(np.array(flat, np.uint64), lengths, n)
        counts = lengths - (n - 1)
        self.starts = np.cumsum(counts) - counts

    def owners(self) -> NDArray[np.int64]:
        """The text of each n-gram."""
        return np.repeat(np.arange(len(self.starts)), np.diff(self.starts, append=len(self.hashes)))


def _windows(values: U64, lengths: NDArray[np.int64], n: int) -> U64:
    """The hash of each run of n values that lies within one text."""
    ends = np.cumsum(lengths)
    is_inside = np.ones(len(values), bool)
    for back in range(1, n):
        is_inside[ends - back] = False
    num_windows = len(values) - n + 1
    hashes = combined([values[shift : shift + num_windows] for shift in range(n)])
    inside: U64 = hashes[is_inside[:num_windows]]
    return inside
