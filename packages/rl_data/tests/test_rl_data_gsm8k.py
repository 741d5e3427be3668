from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plinth_testing import raises
from rl_data import (
    DataConfigError,
    DataError,
    RewardConfig,
    UnknownDataSourceError,
    gsm8k_score,
    make_reward,
    register_reward,
    reward_for,
)
from rl_data.files.table import Place
from rl_data.rewards.gsm8k import Gsm8kReward, extract_answer
from rl_data.rewards.multiple_choice import MultipleChoiceReward

STRICT = RewardConfig(method="strict", score=1.0, format_score=0.1)
FLEXIBLE = RewardConfig(method="flexible", score=1.0, format_score=0.1)


@pytest.mark.parametrize(
    ("text", "truth", "strict", "flexible"),
    [
        ("so\n#### 72", "72", 1.0, 1.0),
        ("so\n#### 73", "72", 0.1, 0.1),
        ("no marker, 72", "72", 0.0, 1.0),
        ("no marker, 72.", "72", 0.0, 1.0),
        ("nothing at all", "72", 0.0, 0.0),
        ("", "72", 0.0, 0.0),
        ("#### 1,234", "1234", 1.0, 1.0),
        ("#### 1,234", "1,234", 1.0, 1.0),
        ("#### $72", "72", 1.0, 1.0),
        ("#### $72.50.", "72.50", 1.0, 1.0),
        ("#### 72.00", "72", 1.0, 1.0),
        ("#### -5", "-5", 1.0, 1.0),
        ("#### -$5", "-5", 1.0, 1.0),
        ("#### 5", "-5", 0.1, 0.1),
        ("#### 3\n#### 72", "72", 1.0, 1.0),
        ("#### 72\n#### 3", "72", 0.1, 0.1),
        ("#### 72 then 9", "72", 1.0, 0.1),
        ("#### seventy", "72", 0.0, 0.0),
        ("####", "72", 0.0, 0.0),
        ("#### 7", "yes", 0.1, 0.1),
        ("72" + "x" * 300, "72", 0.0, 0.0),
        ("72" + "x" * 298, "72", 0.0, 1.0),
        ("#### 72" + "x" * 300, "72", 1.0, 0.0),
    ],
)
def test_gsm8k_cases(text: str, truth: str, strict: float, flexible: float) -> None:
    assert gsm8k_score(text, truth, STRICT) == strict
    assert gsm8k_score(text, truth, FLEXIBLE) == flexible


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("the total is 12345" + "." * 299, 12345),  # the window of 300 characters begins in the number
        ("x = -7" + "." * 299, -7),
        ("so 3/4", Fraction(3, 4)),
        ("3 / 4 of a cake", Fraction(3, 4)),
        ("1 1/2 cups", Fraction(3, 2)),
        ("\\frac{3}{4}", Fraction(3, 4)),
        ("1e3", 1000),
        ("2.5E-1.", Fraction(1, 4)),
        ("$70,000.00!", 70000),
        ("1{,}000", 1000),
        ("so it is \u221242", -42),
        ("10-7", 7),
        ("10 - -7", -7),
        ("so...5", 5),
        ("in 5kg", 5),
        ("the point is (3,4)", None),
        ("version 1.2.3", None),
        ("1/0", None),
        ("on 1/2/2026", None),
        ("1e9999", None),
        ("9" * 5000, None),
    ],
)
def test_a_number_is_read_whole_or_not_at_all(text: str, value: Any) -> None:
    assert extract_answer(text, "flexible") == value


@pytest.mark.parametrize(
    "written",
    ["  42", "**42**", "$42$", "\\$42", "+42", "€42", "$\\boxed{42}$", "\\(42\\)", "42\n" + "and so on " * 40],
)
def test_strict_reads_usual_spellings_anywhere(written: str) -> None:
    assert extract_answer(f"so\n#### {written}", "strict") == 42
    assert (
        extract_answer(f"#### \u2212{written.lstrip('+')}" if written[0] in "+€" else "#### \u221242", "strict") == -42
    )


def test_the_windows_of_other_rewards_begin_with_a_whole_word() -> None:
    """A cut number would be another answer, and a cut line would look like a line of one letter."""
    reward = make_reward("math")
    later = " and" * 499
    assert reward("so 345" + later, SimpleNamespace(ground_truth="345")) == 1.0
    assert reward("so 12345" + later, SimpleNamespace(ground_truth="2345")) == 0.0
    assert reward("so\n12345" + later, SimpleNamespace(ground_truth="12345")) == 1.0
    choice = make_reward("multiple_choice")
    assert choice.answer("not A) or " + "B) " + "x" * 997) is None
    assert choice.answer("so\nB) it is\n" + "x " * 498) == "B"


@settings(deadline=None, derandomize=True)
@given(
    st.integers(-(10**12), 10**12),
    st.integers(-(10**6), 10**6),
    st.booleans(),
    st.booleans(),
    st.text(alphabet="abc 0123456789.,#\n", max_size=400),
)
def test_an_answer_at_the_end_is_always_found(number: int, other: int, commas: bool, dollar: bool, before: str) -> None:
    written = f"{abs(number):,}" if commas else str(abs(number))
    written = ("-" if number < 0 else "") + ("$" if dollar else "") + written
    text = f"{before} #### {written}"
    for config in (STRICT, FLEXIBLE):
        assert gsm8k_score(text, str(number), config) == 1.0
        assert gsm8k_score(text, str(other), config) == (1.0 if other == number else 0.1)


@settings(deadline=None, derandomize=True)
@given(st.text(max_size=400))
def test_every_text_gets_one_of_three_scores(text: str) -> None:
    for config in (STRICT, FLEXIBLE):
        answer = extract_answer(text, config.method)
        assert gsm8k_score(text, "72", config) in (0.0, 0.1, 1.0)
        assert (gsm8k_score(text, "72", config) == 0.0) == (answer is None)


def test_registry() -> None:
    assert isinstance(reward_for("openai/gsm8k"), Gsm8kReward)
    assert reward_for("gsm8k", FLEXIBLE) == Gsm8kReward(method="flexible", format_score=0.1)
    with raises(UnknownDataSourceError, value="nowhere") as caught:
        reward_for("nowhere")
    assert "openai/gsm8k" in caught.value.allowed
    register_reward("test/format", MultipleChoiceReward)
    register_reward("test/format", MultipleChoiceReward)
    assert reward_for("test/format") == MultipleChoiceReward()
    with raises(DataConfigError, field="data_source", value="test/format"):
        register_reward("test/format", Gsm8kReward)


@pytest.mark.parametrize(
    ("field", "value"), [("method", "lenient"), ("score", float("nan")), ("score", 0), ("format_score", 1e999)]
)
def test_bad_reward_config(field: str, value: Any) -> None:
    with raises(DataConfigError, field=field):
        RewardConfig(**{field: value})


def test_an_error_says_place_problem_and_remedies() -> None:
    place = Place(file="a.jsonl", number=3, is_line=True)
    error = place.error("no answer", "Fill it in.", column="c", setting="data.columns.ground_truth=c")
    assert str(error) == "a.jsonl: line 3, column 'c': no answer. Fill it in. Or set data.columns.ground_truth=c."
    assert str(error.under("data.train")).startswith("data.train: a.jsonl: line 3, ")
    assert str(DataError("is a folder", file="a")) == "a: is a folder."
