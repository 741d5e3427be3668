"""Duplicates, split and contamination as pure functions, which may not depend on the order of the rows."""

import random
from collections.abc import Iterable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_data.prepare.duplicates import (
    Hashes,
    HeldOut,
    NearDuplicates,
    digest,
    firsts,
    normalized,
    numbers_and_operators,
    tokens,
)

WORDS = st.lists(st.sampled_from("abcdefgh"), max_size=12)
ROWS = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6), st.integers(0, 6)), min_size=1, max_size=30)
Rows = list[tuple[int, int, int]]


def digests(texts: Iterable[str]) -> Hashes:
    return np.array(list(map(digest, texts)))


def kept(rows: Rows) -> list[int]:
    """Positions of the rows to keep: duplicates agree in the first or the second number; the third is content."""
    first = firsts(np.array([row[:2] for row in rows]), digests(map(str, rows)))
    return np.flatnonzero(first == np.arange(len(rows))).tolist()


def connected(rows: Rows) -> set[frozenset[int]]:
    """Connected rows, by search: groups of duplicates, of which at least one row is kept."""
    components: set[frozenset[int]] = set()
    for start in range(len(rows)):
        group, waiting = {start}, [start]
        while waiting:
            row = rows[waiting.pop()]
            near = {i for i, other in enumerate(rows) if other[0] == row[0] or other[1] == row[1]}
            waiting += near - group
            group |= near
        components.add(frozenset(group))
    return components


@given(ROWS, st.randoms(use_true_random=False))
def test_of_each_group_rows_that_share_no_key_are_kept_whatever_the_order(rows: Rows, rng: random.Random) -> None:
    chosen = kept(rows)
    assert all(group & set(chosen) for group in connected(rows))
    for column in (0, 1):
        values = {}
        for row in chosen:
            values.setdefault(rows[row][column], set()).add(rows[row])
        assert all(len(same) == 1 for same in values.values())
    shuffled = rng.sample(rows, len(rows))
    left = sorted(rows[row] for row in chosen)
    assert left == sorted(shuffled[row] for row in kept(shuffled))
    assert kept(left) == list(range(len(left))), "a second pass drops nothing"


@pytest.mark.parametrize(("num_changed", "least", "most"), [(0, 1.0, 1.0), (1, 0.4, 0.8), (7, 0.0, 0.1)])
def test_near_duplicates_share_a_key_about_as_often_as_documented(num_changed: int, least: float, most: float) -> None:
    """One word of 60 changed is a similarity of 0.84, seven are one of at most 0.3."""
    near, rng = NearDuplicates(0.8), random.Random(0)
    shared = 0
    for _ in range(40):
        text = [str(rng.random()) for _ in range(60)]
        other = [
            str(rng.random()) if index % 8 == 4 and index // 8 < num_changed else word
            for index, word in enumerate(text)
        ]
        shared += any(
            first == second for first, second in zip(near.hashes(text, ""), near.hashes(other, ""), strict=True)
        )
    assert least <= shared / 40 <= most


def test_bands_share_a_key_only_where_the_numbers_agree() -> None:
    near = NearDuplicates(0.3)
    text = "tom has 3 apples and 4 pears in his bag"
    keys = near.hashes(tokens(text), "3 4")
    assert keys == near.hashes(tokens(text), "3 4")
    assert not {*keys} & {*near.hashes(tokens(text), "4 3")}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a well-known 3-sided x - y = 12.5", "3 - = 12 5"),
        ("no numbers, no operators.", ""),
        ("$\\frac{1}{2}$ + x^2 < 3", "1 2 + ^ 2 < 3"),
    ],
)
def test_numbers_and_operators(text: str, expected: str) -> None:
    assert numbers_and_operators(text) == expected


def test_normalized_text_and_tokens() -> None:
    assert normalized("  Tom\thas\n3\u00a0APPLES\uff01 ") == "tom has 3 apples!"
    assert tokens("tom's x+1 \u5929\u6c142") == ["tom", "'", "s", "x", "+", "1", "\u5929", "\u6c14", "2"]


@given(st.lists(WORDS, min_size=1, max_size=6), st.lists(WORDS, min_size=1, max_size=6), st.integers(1, 4))
def test_contamination_is_the_largest_share_of_a_prompts_ngrams(
    prompts: list[list[str]], texts: list[list[str]], n: int
) -> None:
    def grams(text: list[str]) -> set[tuple[str, ...]]:
        return {tuple(text[i : i + n]) for i in range(max(1, len(text) - n + 1))}

    held_out = HeldOut(n=n, share=0.5)
    for index, prompt in enumerate(prompts):
        held_out.add(str(index), prompt)
    for text in texts:
        shares = [len(grams(prompt) & grams(text)) / len(grams(prompt)) for prompt in prompts]
        name, share = held_out.contained(text)
        assert bool(name) == (max(shares) >= 0.5)
        if name:
            assert share == pytest.approx(max(shares)) == pytest.approx(shares[int(name)])
