"""Metrics of held-out prompts: failures have no value, and the names of the metrics."""

import json
import math
from dataclasses import asdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_runtime import PromptResult, SampleResult, Validation, prompt_metrics, sample_counts

PROPERTY = settings(deadline=None, derandomize=True, max_examples=60)


def result(marks: list[bool], *, num_failed: int = 0, votes: list[int] | None = None) -> PromptResult:
    samples = [
        SampleResult(
            index=i, response="r", score=float(right), is_right=right, finish_reason="stop", num_tokens=1, num_turns=1
        )
        for i, right in enumerate(marks)
    ]
    return PromptResult(
        prompt_id="p",
        prompt="q",
        ground_truth="1",
        data_source="gsm8k",
        samples=tuple(samples),
        votes=None if votes is None else tuple(votes),
        failures=("server gone",) * num_failed,
    )


@pytest.mark.parametrize(
    ("num_samples", "expected"), [(1, (1,)), (2, (1, 2)), (6, (1, 2, 4, 6)), (8, (1, 2, 4, 8)), (9, (1, 2, 4, 8, 9))]
)
def test_the_sample_counts_are_powers_of_two_and_n(num_samples: int, expected: tuple[int, ...]) -> None:
    assert sample_counts(num_samples) == expected


@given(st.lists(st.lists(st.booleans(), max_size=6), min_size=1, max_size=6), st.integers(1, 6))
@PROPERTY
def test_failed_samples_neither_lower_nor_raise_a_metric(marks: list[list[bool]], k: int) -> None:
    whole = prompt_metrics([result(own) for own in marks], num_samples=6, pass_at=[k])
    holes = prompt_metrics([result(own, num_failed=6 - len(own)) for own in marks], num_samples=6, pass_at=[k])
    for name, values in whole.items():
        np.testing.assert_array_equal(values, holes[name])
    assert np.isnan(whole[f"pass@{k}"]).tolist() == [len(own) < k for own in marks]
    assert np.isnan(whole["mean@6"]).tolist() == [not own for own in marks]


def test_a_prompt_without_votes_has_no_majority() -> None:
    results = [result([True, False, True], votes=[0, 1, 0]), result([True]), result([], num_failed=3, votes=[])]
    found = prompt_metrics(results, num_samples=3, pass_at=[1])
    assert found["maj@3"][0] == 1.0
    assert np.isnan(found["maj@3"][1:]).all()
    assert "maj@3" not in prompt_metrics(results[1:], num_samples=3, pass_at=[1])
    assert "maj@1" not in prompt_metrics([result([True], votes=[0])], num_samples=1, pass_at=[1])


def test_a_validation_counts_samples_that_nobody_reported() -> None:
    validation = Validation(prompts=(result([True, False]), result([])), num_samples_per_prompt=2)
    assert (validation.num_samples, validation.num_failed, validation.failure) == (2, 2, "")
    assert validation.accuracy == 0.5
    assert set(validation.metrics()) == {
        *("val/accuracy", "val/score/mean", "val/num_samples", "val/num_failed", "val/pass@2")
    }
    assert all(math.isfinite(value) for value in validation.metrics().values())


def test_results_are_json() -> None:
    found = json.loads(json.dumps(asdict(result([True], num_failed=1, votes=[0]))))
    assert found["samples"][0]["is_right"] is True
    assert found["failures"] == ["server gone"]
