import pickle
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_data import DataError, RewardConfig, UnknownDataSourceError, gsm8k_score, register_reward, reward_for
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
        ("#### 72" + "x" * 294, "72", 0.0, 1.0),
        ("#### 72" + "x" * 293, "72", 1.0, 1.0),
    ],
)
def test_gsm8k_cases(text: str, truth: str, strict: float, flexible: float) -> None:
    assert gsm8k_score(text, truth, STRICT) == strict
    assert gsm8k_score(text, truth, FLEXIBLE) == flexible


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
        assert answer is None or re.fullmatch(r"-?[0-9]*(\.[0-9]+)?", answer)


def test_registry() -> None:
    assert isinstance(reward_for("openai/gsm8k"), Gsm8kReward)
    assert reward_for("gsm8k", FLEXIBLE) == Gsm8kReward(method="flexible", format_score=0.1)
    with pytest.raises(UnknownDataSourceError, match=r"nowhere.*openai/gsm8k"):
        reward_for("nowhere")
    register_reward("test/format", MultipleChoiceReward)
    register_reward("test/format", MultipleChoiceReward)
    assert reward_for("test/format") == MultipleChoiceReward()
    with pytest.raises(ValueError, match="already has a reward"):
        register_reward("test/format", Gsm8kReward)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [({"method": "lenient"}, "strict, flexible"), ({"score": float("nan")}, "score"), ({"format_score": 1e999}, "fin")],
)
def test_bad_reward_config(arguments: dict[str, object], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        RewardConfig(**arguments)  # type: ignore[arg-type]


def test_errors_pickle() -> None:
    error = pickle.loads(pickle.dumps(DataError("message", file="f", row=3, column="c")))
    assert (str(error), error.file, error.row, error.column) == ("message", "f", 3, "c")
