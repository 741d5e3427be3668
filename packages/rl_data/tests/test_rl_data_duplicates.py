"""Near duplicates, their numbers and words, and contamination as pure functions."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_data.prepare.duplicates import (
    HeldOut,
    NearDuplicates,
    normalized,
    numbers_and_operators,
    tokens,
)

WORDS = st.lists(st.sampled_from("abcdefgh"), max_size=12)


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
