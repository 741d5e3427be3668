"""pass@k and majority votes against enumeration; bootstrap intervals against their definition and their coverage."""

from itertools import combinations
from math import comb

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_core import bootstrap_mean, majority_vote, pass_at_k

PROPERTY = settings(deadline=None, derandomize=True, max_examples=60)
FEW = 200


@st.composite
def counts(draw: st.DrawFn) -> tuple[int, int, int]:
    """(right samples, samples, k)."""
    num_samples = draw(st.integers(1, 8))
    return draw(st.integers(0, num_samples)), num_samples, draw(st.integers(1, num_samples))


@given(counts())
@PROPERTY
def test_pass_at_k_is_the_mean_over_all_choices_of_k_samples(drawn: tuple[int, int, int]) -> None:
    right, num_samples, k = drawn
    marks = [index < right for index in range(num_samples)]
    expected = np.mean([any(chosen) for chosen in combinations(marks, k)])
    assert pass_at_k([right], [num_samples], k) == pytest.approx(expected, abs=1e-12)


@given(st.integers(1, 500), st.data())
@PROPERTY
def test_pass_at_k_is_exact_for_many_samples(num_samples: int, data: st.DataObject) -> None:
    right, k = data.draw(st.integers(0, num_samples)), data.draw(st.integers(1, num_samples))
    expected = 1 - comb(num_samples - right, k) / comb(num_samples, k)
    assert pass_at_k([right], [num_samples], k)[0] == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    ("votes", "is_right", "expected"),
    [
        ([0, 1, 0], [True, False, True], 1.0),
        ([0, 1, 1], [True, False, False], 0.0),
        ([0, 1], [True, False], 0.5),  # a tie, broken at random
        ([0, 1, 2, 2, 1], [False, True, False, False, True], 0.5),
        ([-1, -1, -1, 3], [False, False, False, True], 1.0),  # no answer, no vote
        ([-1, -1], [False, False], 0.0),
        ([], [], 0.0),
        ([0, 0], [True, False], 0.5),  # the same answer, of which one response has a wrong form
    ],
)
def test_the_majority_is_right_or_not(votes: list[int], is_right: list[bool], expected: float) -> None:
    assert majority_vote(votes, is_right) == expected


ANSWERS = st.lists(st.tuples(st.integers(-1, 3), st.booleans()), max_size=8)


@given(ANSWERS, st.permutations(range(4)), st.randoms(use_true_random=False))
@PROPERTY
def test_names_of_answers_and_the_order_of_samples_do_not_matter(
    samples: list[tuple[int, bool]], names: list[int], random: "np.random.Generator"
) -> None:
    expected = majority_vote([vote for vote, _ in samples], [right for _, right in samples])
    assert 0 <= expected <= 1
    renamed = [(vote if vote < 0 else names[vote], right) for vote, right in samples]
    random.shuffle(renamed)
    assert majority_vote([vote for vote, _ in renamed], [right for _, right in renamed]) == pytest.approx(expected)


VALUES = st.lists(st.floats(-10, 10, width=32), min_size=1, max_size=12)


@given(VALUES, st.floats(0.1, 3), st.floats(-2, 2), st.integers(0, 5))
@PROPERTY
def test_an_interval_repeats_lies_in_the_range_and_follows_scale_and_shift(
    values: list[float], scale: float, shift: float, seed: int
) -> None:
    interval = bootstrap_mean(values, num_resamples=FEW, seed=seed)
    assert interval == bootstrap_mean(values, num_resamples=FEW, seed=seed)
    assert min(values) - 1e-9 <= interval.low <= interval.high <= max(values) + 1e-9
    assert interval.num_values == len(values)
    moved = bootstrap_mean(np.array(values, np.float64) * scale + shift, num_resamples=FEW, seed=seed)
    expected = [interval.mean * scale + shift, interval.low * scale + shift, interval.high * scale + shift]
    np.testing.assert_allclose([moved.mean, moved.low, moved.high], expected, atol=1e-6)


def test_resamples_in_parts_are_all_used(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = bootstrap_mean(range(50), num_resamples=2000)
    monkeypatch.setattr("rl_core.evaluation._VALUES_AT_ONCE", 50 * 64)
    parts = bootstrap_mean(range(50), num_resamples=2000)
    assert [parts.low, parts.high] == pytest.approx([whole.low, whole.high], abs=0.4)
    assert parts.mean == whole.mean == 24.5


@pytest.mark.parametrize("confidence", [0.8, 0.95])
def test_an_interval_covers_the_true_mean_as_often_as_it_says(confidence: float) -> None:
    rng = np.random.default_rng(1)
    intervals = [
        bootstrap_mean(rng.random(80) < 0.3, num_resamples=FEW, confidence=confidence, seed=seed) for seed in range(400)
    ]
    covered = np.mean([one.low <= 0.3 <= one.high for one in intervals])
    # 400 trials: three standard errors are 0.06 and 0.033.
    assert covered == pytest.approx(confidence, abs=0.06 if confidence < 0.9 else 0.033)
