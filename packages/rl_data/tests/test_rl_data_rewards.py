"""Rewards of the registry but GSM8K: math, multiple choice, format, length; options; huge texts."""

import json
import pickle
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plinth_testing import raises
from rl_data import DataConfigError, DataError, make_reward
from rl_data.rewards.code import last_code_block, read_tests


@dataclass(frozen=True)
class Fields:
    ground_truth: str = ""
    extra: Mapping[str, Any] = field(default_factory=dict)


def score(name: str, text: str, truth: str = "", num_tokens: int = 0, **options: Any) -> float:
    reward = make_reward(name, options)
    facts = {"num_tokens": num_tokens} if name == "length" else {}
    value: float = pickle.loads(pickle.dumps(reward))(text, Fields(truth), **facts)
    return value


@pytest.mark.parametrize(
    ("text", "truth", "expected"),
    [
        ("so \\boxed{\\frac{1}{2}}", "1/2", 1.0),
        ("so \\boxed{\\frac12}", "0.5", 1.0),
        ("The answer is $0.5$.", "\\frac{1}{2}", 1.0),
        ("\\boxed{-5}", "-5", 1.0),
        ("\\boxed{5}", "-5", 0.1),
        ("\\boxed{50\\%}", "50", 1.0),
        ("\\boxed{0.5}", "50\\%", 1.0),
        ("\\boxed{10\\text{ cm}}", "10", 1.0),
        ("\\boxed{1,234}", "1234", 1.0),
        ("\\boxed{\\boxed{12}}", "12", 1.0),
        ("\\boxed{\\frac{\\sqrt{2}}{2}}", "\\frac{1}{\\sqrt{2}}", 1.0),
        ("\\boxed{2, 1}", "\\{1, 2\\}", 1.0),
        ("\\boxed{[0, 1)}", "[0,1)", 1.0),
        ("\\boxed{(0, 1]}", "[0,1)", 0.1),
        ("\\boxed{10} or \\boxed{11}", "11", 0.1),  # a list of guesses is a set, which is not 11
        ("\\boxed{3}", '["2", "3"]', 1.0),
        ("\\boxed{3}", "[1, 2, 3]", 1.0),
        ("\\boxed{[-2,7]}", "[-2, 7]", 1.0),  # an interval, not two right answers
        ("\\boxed{7}", "[-2, 7]", 0.1),
        ("\\boxed{(-2,7)}", "[-2, 7]", 0.1),
        ("\\boxed{7}", '["-2", "7"]', 1.0),
        ("\\boxed{x = 3}", "3", 1.0),
        ("\\boxed{x + y}", "y + x", 1.0),
        ("\\boxed{9^{9^{9^{9}}}}", "1", 0.1),  # too large to evaluate
        ("\\boxed{\u0663}", "3", 0.1),
        ("no number", "3", 0.0),
        ("", "3", 0.0),
        ("None", "3", 0.0),
        ("\\boxed{3}" + " " * 2000, "3", 0.0),
    ],
)
def test_math_compares_values(text: str, truth: str, expected: float) -> None:
    assert score("math", text, truth, format_score=0.1) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("\\boxed{B}", 1.0),
        ("\\boxed{\\text{(B)}}", 1.0),
        ("\\boxed{C} no, \\boxed{B}", 1.0),
        ("The answer is B.", 1.0),
        ("the answer is (b)", 1.0),
        ("the answer is b, as", 1.0),
        ("the answer is b \nA long day", 1.0),
        ("the answer is a prime number\n(B)", 1.0),
        ("the answer is a prime number", 0.0),
        ("Answer: B", 1.0),
        ("Answer: **B**", 1.0),
        ("#### B", 1.0),
        ("thinking\nB", 1.0),
        ("thinking\n**B.**", 1.0),
        ("A) cat\nB) dog", 1.0),
        ("I like B vitamins and C", 0.0),
        ("A dog is best", 0.0),
        ("The answer is Beethoven", 0.0),
        ("Answer: C", 0.1),
        ("\\boxed{B} but the answer is C", 1.0),
        ("\u0412", 0.0),  # a Cyrillic letter
        ("", 0.0),
    ],
)
def test_multiple_choice_reads_the_letter(text: str, expected: float) -> None:
    assert score("multiple_choice", text, " (b) ", format_score=0.1) == expected


@pytest.mark.parametrize(
    ("options", "text", "expected"),
    [
        ({"pattern": "<think>.*</think>.*"}, "\n<think>a\nb</think> 3\n", 1.0),
        ({"pattern": "<think>.*</think>"}, "<think>a</think> 3", 0.0),
        ({"pattern": "<think>.*</think>", "match": "search"}, "so <think>a</think> 3", 1.0),
        ({"pattern": "a"}, "", 0.0),
    ],
)
def test_format_matches_whole_or_part(options: dict[str, Any], text: str, expected: float) -> None:
    assert score("format", text, **options) == expected


@settings(deadline=None, derandomize=True)
@given(st.integers(1, 1000), st.integers(0, 500), st.integers(0, 2000))
def test_length_falls_linearly(limit: int, margin: int, length: int) -> None:
    limited = score("length", "", num_tokens=length, limit=limit, margin=margin)
    assert limited == (1.0 if length <= limit else pytest.approx(max(0, 1 - (length - limit) / max(margin, 1e-9))))
    targeted = score("length", "x" * length, target=limit, unit="characters")
    assert targeted == pytest.approx(max(0, 1 - abs(length - limit) / limit))


@pytest.mark.parametrize("name", ["gsm8k", "math", "multiple_choice", "code", "length"])
@pytest.mark.parametrize("piece", ["1 ", "\\boxed{", "####", "answer is ", "```\n", "$", "-", "(" * 20, "\n* "])
def test_a_megabyte_of_text_is_scored_soon(name: str, piece: str) -> None:
    options = {"limit": 3} if name == "length" else {}
    begin = time.process_time()
    text = piece * (1_000_000 // len(piece))
    assert 0 <= score(name, text, "assert 0", **options) <= 1
    assert time.process_time() - begin < 10


@pytest.mark.parametrize(
    ("name", "field", "options"),
    [
        ("nonsense", None, {}),
        ("gsm8k", "metod", {"metod": "strict"}),
        ("gsm8k", "method", {"method": "lenient"}),
        ("math", "score", {"score": "1"}),
        ("math", "format_score", {"format_score": 2}),
        ("multiple_choice", "num_choices", {"num_choices": 27}),
        ("format", "pattern", {}),
        ("format", "pattern", {"pattern": "("}),
        ("format", "match", {"pattern": "a", "match": "part"}),
        ("length", "limit", {}),
        ("length", "limit", {"limit": 3, "target": 3}),
        ("length", "limit", {"limit": 0}),
        ("length", "limit", {"limit": True}),
        ("length", "margin", {"target": 3, "margin": 1}),
        ("length", "unit", {"limit": 3, "unit": "words"}),
        ("math", "score", {"score": float("inf")}),
        ("length", "target", {"target": float("inf")}),
        ("length", "margin", {"limit": 3, "margin": float("nan")}),
        ("code", "memory_mb", {"memory_mb": 0.5}),
        ("code", "num_processes", {"num_processes": 0.5}),
        ("code", "timeout_s", {"timeout_s": 0}),
        ("code", "column", {"column": ""}),
        ("code", "isolation", {"isolation": "none"}),
    ],
)
def test_wrong_options_are_refused(name: str, field: str | None, options: dict[str, Any]) -> None:
    with raises(DataConfigError, field=field):
        make_reward(name, options)


@pytest.mark.parametrize(
    ("name", "options", "truth", "extra", "problem"),
    [
        ("gsm8k", {}, "", {}, "no ground truth"),
        ("gsm8k", {}, "seven", {}, "no number"),
        ("gsm8k", {}, "[]", {}, "no number"),
        ("math", {}, " ", {}, "no ground truth"),
        ("math", {}, "\\pi", {}, ""),
        ("multiple_choice", {}, "F", {}, "no letter from A to E"),
        ("multiple_choice", {"num_choices": 6}, "(f)", {}, ""),
        ("format", {"pattern": "a"}, "", {}, ""),
        ("length", {"limit": 3}, "", {}, ""),
        ("code", {}, "", {}, "no tests"),
        ("code", {}, "assert f(1)", {}, ""),
        ("code", {"column": "tests"}, "", {}, "no column 'tests'"),
        ("code", {"column": "tests"}, "", {"tests": [{"input": "1"}]}, "neither Python code nor an input"),
        (
            "code",
            {"column": "tests"},
            "",
            {"tests": [{"input": "1", "output": None}]},
            "neither Python code nor an input",
        ),
        ("code", {"column": "tests"}, "", {"tests": ["assert f(1)"]}, ""),
    ],
)
def test_rows_that_no_response_can_satisfy(
    name: str, options: dict[str, Any], truth: str, extra: dict[str, Any], problem: str
) -> None:
    reason = make_reward(name, options).problem(truth, extra)
    assert problem in reason
    assert bool(reason) == bool(problem)


@pytest.mark.parametrize(
    ("text", "block"),
    [
        ("```python\na\nb\n```", "a\nb\n"),
        ("```\na\n```\n text\n```py\nb\n```\n", "b\n"),
        ("```\na\n```\n```\nnot closed", "a\n"),
        ("  ```\na\n  ```", "a\n"),
        ("no block", None),
        ("", None),
        ("```\n```", "\n"),
    ],
)
def test_the_last_closed_code_block(text: str, block: str | None) -> None:
    assert last_code_block(text) == block


def test_every_form_of_tests_is_read() -> None:
    pairs = {"inputs": ["1", ["2", "3"]], "outputs": ["4", 5]}
    for value in (pairs, json.dumps(pairs), [{"input": "1", "output": "4"}, {"input": "2\n3", "output": "5"}]):
        assert [(test.stdin, test.stdout) for test in read_tests(value)] == [("1", "4"), ("2\n3", "5")]
    assert [(test.stdin, test.stdout) for test in read_tests([{"input": None, "output": 3}])] == [("", "3")]
    assert [test.code for test in read_tests(["assert a", "assert b"])] == ["assert a", "assert b"]
    assert [test.code for test in read_tests("[x for x in y]")] == ["[x for x in y]"]
    for wrong in (None, [], {}, [1], {**pairs, "fn_name": "f"}, {"inputs": [1], "outputs": []}, 3):
        with pytest.raises(DataError):
            read_tests(wrong)


@pytest.mark.parametrize(
    ("name", "texts", "expected"),
    [
        ("gsm8k", ["#### 72", "so #### 72.00", "no answer", "#### 1,072", "#### 72", "#### 1072"], [0, 0, -1, 3, 0, 3]),
        ("multiple_choice", ["Answer: (B)", "I do not know", "\\boxed{C}", "**B.**"], [0, -1, 2, 0]),
        ("math", ["\\boxed{\\frac12}", "\\boxed{2}", "It is $0.5$.", "Unknown", "\\boxed{1/2}"], [0, 1, 0, -1, 0]),
        ("gsm8k", [], []),
    ],
)
def test_equal_answers_have_equal_votes(name: str, texts: list[str], expected: list[int]) -> None:
    assert make_reward(name).votes(texts) == expected  # type: ignore[attr-defined]


def test_a_length_in_tokens_needs_their_number() -> None:
    with raises(DataConfigError, field="num_tokens"):
        make_reward("length", {"limit": 3})("a long response", Fields())


def test_of_several_responses_one_that_fails_costs_no_other() -> None:
    reward = make_reward("length", {"limit": 2})
    none, one, three = reward.score_each(["a", "b", "c"], [Fields()] * 3, num_tokens=[None, 1, 3])
    assert isinstance(none, DataConfigError)
    assert (one, three) == (1, 0)
