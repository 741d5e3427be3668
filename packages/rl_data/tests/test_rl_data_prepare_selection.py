"""Duplicates, split and contamination as pure functions: what may not depend on the order of the rows, and what may."""

import random
from collections.abc import Sequence
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_data.prepare.minhash import NUM_PERMUTATIONS, SHINGLE, Bands, band_keys, choose_bands, signatures
from rl_data.prepare.overlap import HeldOut
from rl_data.prepare.selection import is_validation, keepers, ranks
from rl_data.prepare.text import U64, NGrams, digests, mixed, normalized, numbers_and_operators, tokens

WORDS = st.lists(st.sampled_from("abcdefgh"), max_size=12)
ROWS = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6), st.integers(0, 6)), min_size=1, max_size=30)


def u64(values: Sequence[int]) -> U64:
    return np.array(values, np.uint64)


def kept(rows: Sequence[tuple[int, int, int]]) -> list[int]:
    """Positions of the rows to keep: duplicates agree in the first or the second number; the third is content."""
    columns = [partial(u64, [row[column] for row in rows]) for column in (0, 1)]
    rank = ranks(digests(list(map(str, rows))))
    return [int(row) for row in np.flatnonzero(keepers(rank, columns) == rank)]


def groups(rows: Sequence[tuple[int, int, int]]) -> set[frozenset[int]]:
    """Connected rows, by search: the definition that `keepers` has to agree with."""
    found: set[frozenset[int]] = set()
    for start in range(len(rows)):
        group, waiting = {start}, [start]
        while waiting:
            row = rows[waiting.pop()]
            near = {i for i, other in enumerate(rows) if other[0] == row[0] or other[1] == row[1]}
            waiting += near - group
            group |= near
        found.add(frozenset(group))
    return found


@given(ROWS)
def test_one_row_of_each_group_is_kept(rows: list[tuple[int, int, int]]) -> None:
    chosen = kept(rows)
    assert all(len(group & set(chosen)) == 1 for group in groups(rows))


@given(ROWS, st.randoms(use_true_random=False))
def test_the_rows_kept_do_not_depend_on_their_order(rows: list[tuple[int, int, int]], rng: random.Random) -> None:
    shuffled = rng.sample(rows, len(rows))
    assert sorted(rows[row] for row in kept(rows)) == sorted(shuffled[row] for row in kept(shuffled))


@given(ROWS)
def test_a_second_pass_over_the_kept_rows_drops_nothing(rows: list[tuple[int, int, int]]) -> None:
    left = [rows[row] for row in kept(rows)]
    assert kept(left) == list(range(len(left)))


@given(st.lists(st.integers(0, 2**64 - 1), min_size=1, unique=True), st.integers(0, 2**63), st.floats(0.01, 0.99))
def test_the_split_depends_on_nothing_but_prompt_and_seed(prompts: list[int], seed: int, share: float) -> None:
    together = is_validation(u64(prompts), seed, share)
    alone = [is_validation(u64([prompt]), seed, share)[0] for prompt in prompts]
    assert together.tolist() == alone
    assert not (together & ~is_validation(u64(prompts), seed, min(1.0, share + 0.01))).any(), (
        "a larger share keeps them"
    )


@pytest.mark.parametrize("share", [0.0, 0.05, 0.5])
def test_the_split_has_its_share_and_another_seed_another_one(share: float) -> None:
    prompts = digests([f"prompt {number}" for number in range(20_000)])
    first, second = is_validation(prompts, 0, share), is_validation(prompts, 1, share)
    assert abs(first.mean() - share) < 0.01
    assert share == 0 or abs((first & second).mean() - share**2) < 0.01


@given(st.lists(st.integers(0, 2**64 - 1), unique=True))
def test_mixing_is_a_bijection(values: list[int]) -> None:
    assert len(set(mixed(u64(values)).tolist())) == len(values)


@given(st.lists(WORDS, min_size=1, max_size=8), st.integers(1, 6))
def test_ngrams_of_several_texts_are_those_of_each(texts: list[list[str]], n: int) -> None:
    together = NGrams(texts, n)
    parts = np.split(together.hashes, together.starts[1:])
    assert [part.tolist() for part in parts] == [NGrams([text], n).hashes.tolist() for text in texts]
    assert [len(part) for part in parts] == [max(1, len(text) - n + 1) for text in texts]
    assert together.owners().tolist() == [number for number, part in enumerate(parts) for _ in part]
    for text, part in zip(texts, parts, strict=True):
        windows = [tuple(text[i : i + n]) for i in range(max(1, len(text) - n + 1))]
        assert len(set(part.tolist())) == len(set(windows)), "different n-grams, different hashes"


@settings(max_examples=30)
@given(st.integers(0, 2**32), st.integers(0, 40))
def test_signatures_agree_as_often_as_the_jaccard_similarity(seed: int, num_changed: int) -> None:
    rng = random.Random(seed)
    text = [str(rng.random()) for _ in range(40)]
    other = [str(rng.random()) if index < num_changed else word for index, word in enumerate(text)]
    shingles = NGrams([text, other], SHINGLE)
    first, second = (set(part.tolist()) for part in np.split(shingles.hashes, shingles.starts[1:]))
    similarity = len(first & second) / len(first | second)
    agree = np.mean([values[0] == values[1] for values in signatures(shingles)])
    # Five standard deviations of a mean of 128 trials, at most 0.22.
    assert abs(agree - similarity) < 5 * (0.25 / NUM_PERMUTATIONS) ** 0.5


@pytest.mark.parametrize("similarity", [0.5, 0.7, 0.8, 0.9, 1.0])
def test_bands_find_what_is_more_similar_and_little_else(similarity: float) -> None:
    bands = choose_bands(similarity)
    assert 1 <= bands.num_bands * bands.rows <= NUM_PERMUTATIONS
    assert bands.probability(1.0) == 1.0
    assert bands.probability(max(0.0, similarity - 0.25)) < 0.1
    assert bands.probability(min(1.0, similarity + 0.12)) > 0.9


def test_bands_share_a_key_only_where_the_numbers_agree() -> None:
    texts = ["tom has 3 apples and 4 pears in his bag", "tom has 4 apples and 3 pears in his bag"]
    shingles = NGrams([tokens(text) for text in (*texts, texts[0])], SHINGLE)
    must_agree = digests([numbers_and_operators(text) for text in (*texts, texts[0])])
    keys = np.array(band_keys(shingles, must_agree, Bands(32, 1)))
    assert (keys[:, 0] == keys[:, 2]).all()
    assert not (keys[:, 0] == keys[:, 1]).any()


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
    assert tokens("tom's x+1 \u5929\u6c14\u597d2") == [
        "tom",
        "'",
        "s",
        "x",
        "+",
        "1",
        "\u5929",
        "\u6c14",
        "\u597d",
        "2",
    ]


def held_out(*texts: str, share: float = 0.7) -> HeldOut:
    return HeldOut([tokens(normalized(text)) for text in texts], n=8, share=share)


QUESTION = "Natalia sold clips to 48 of her friends in April, and then she sold half as many clips in May."


def test_a_held_out_prompt_is_found_within_a_longer_text_and_not_in_another() -> None:
    texts = [
        f"Think step by step. {QUESTION} " + "Explain each step. " * 50,
        "An entirely different question.",
        QUESTION,
    ]
    found = held_out("Some other text that is long enough to have n-grams.", QUESTION).found_in(
        [tokens(normalized(text)) for text in texts]
    )
    assert found == {0: (1, 1.0), 2: (1, 1.0)}


def test_the_share_decides_how_much_of_a_prompt_must_occur() -> None:
    half = QUESTION.split(" and ")[0]
    text = [tokens(normalized(half))]
    assert held_out(QUESTION, share=0.2).found_in(text).keys() == {0}
    assert held_out(QUESTION, share=0.7).found_in(text) == {}


@given(st.lists(WORDS, min_size=1, max_size=6), st.lists(WORDS, min_size=1, max_size=6), st.integers(1, 4))
def test_contamination_is_the_largest_share_of_a_prompts_ngrams(
    prompts: list[list[str]], texts: list[list[str]], n: int
) -> None:
    def grams(text: list[str]) -> set[tuple[str, ...]]:
        return {tuple(text[i : i + n]) for i in range(max(1, len(text) - n + 1))}

    found = HeldOut(prompts, n=n, share=0.5).found_in(texts)
    for number, text in enumerate(texts):
        shares = [len(grams(prompt) & grams(text)) / len(grams(prompt)) for prompt in prompts]
        assert (number in found) == (max(shares) >= 0.5)
        if number in found:
            prompt, share = found[number]
            assert share == pytest.approx(max(shares)) == pytest.approx(shares[prompt])
