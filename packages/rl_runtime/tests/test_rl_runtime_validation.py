"""Metrics of held-out prompts: failures have no value, names of the metrics; validation in the rollout phase."""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rl_runtime_client_loops import CLOSES_LOOPS
from rl_runtime_scripted_client import ScriptedClient, phase
from rl_runtime_user_functions import Prompt

from plinth_testing import raises
from rl_runtime import PromptResult, SampleResult, Validation, prompt_metrics, sample_counts
from rl_runtime.errors import InputError
from rl_runtime.rollout.config import EpisodeConfig
from rl_runtime.rollout.scoring import Scorer
from rl_runtime.rollout.scoring_config import ScoringConfig
from rollout_vllm import Sample, SamplingConfig

pytestmark = CLOSES_LOOPS

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
    metrics = prompt_metrics(results, num_samples=3, pass_at=[1])
    assert metrics["maj@3"][0] == 1.0
    assert np.isnan(metrics["maj@3"][1:]).all()
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


def test_a_validation_with_several_samples_has_pass_at_k_and_the_majority(scorer: Scorer) -> None:
    # Right is 2. The third prompt lost three samples, so that it has no pass@2 and no pass@4.
    client = ScriptedClient([[2, 3, 2, 3], [3, 3, 2, 4], [2]], n=4)
    done: list[None] = []
    result = phase(client, scorer).validate(
        [Prompt("a"), Prompt("b"), Prompt("c")], SamplingConfig(n=4), step=0, on_scored=lambda: done.append(None)
    )
    assert len(done) == 3
    assert [one.prompt_id for one in result.prompts] == ["a", "b", "c"]
    assert [one.votes for one in result.prompts] == [(0, 1, 0, 1), (0, 0, 2, 3), (0,)]
    assert (result.num_samples, result.num_failed, result.failure) == (9, 3, "server gone")
    assert result.prompts[2].failures == ("server gone",) * 3
    metrics = result.metrics()
    assert metrics["val/accuracy"] == metrics["val/score/mean"] == pytest.approx(4 / 9)
    assert metrics["val/pass@2"] == pytest.approx((5 / 6 + 1 / 2) / 2)
    assert metrics["val/pass@4"] == 1.0
    assert metrics["val/maj@4"] == pytest.approx((0.5 + 0.0 + 1.0) / 3)


def test_a_validation_completes_all_scores_at_once(scorer: Scorer) -> None:
    """As a reward model does; who is right, and the metrics, follow from the completed scores."""
    asked: list[int] = []

    def finish(samples: Sequence[Sample]) -> list[Sample]:
        asked.append(len(samples))
        return [replace(one, score=float(one.response_ids[0]) - 2.5, reward_terms={"model": 1.0}) for one in samples]

    result = phase(ScriptedClient([[2, 4], [], [3, 2]], n=2), scorer).validate(
        [Prompt("a"), Prompt("b"), Prompt("c")], SamplingConfig(n=2), step=0, finish=finish
    )
    assert asked == [4]
    assert [[s.score for s in prompt.samples] for prompt in result.prompts] == [[-0.5, 1.5], [], [0.5, -0.5]]
    assert [prompt.num_right for prompt in result.prompts] == [1, 0, 0]
    assert result.score_mean == 0.25
    assert {name for prompt in result.prompts for s in prompt.samples for name in s.terms} == {"model"}


def test_a_validation_with_one_sample_has_the_metrics_it_always_had(scorer: Scorer) -> None:
    result = phase(ScriptedClient([[2], []], n=1), scorer).validate(
        [Prompt("a"), Prompt("b")], SamplingConfig(n=1), step=0
    )
    assert result.metrics() == {"val/accuracy": 1.0, "val/score/mean": 1.0, "val/num_samples": 1, "val/num_failed": 1}
    assert result.prompts[0].votes is None


def test_a_function_has_no_answers_to_vote_on() -> None:
    with Scorer(ScoringConfig(function="rl_runtime_user_functions:length_reward")) as own:
        result = phase(ScriptedClient([[2, 2]], n=2), own).validate([Prompt("a")], SamplingConfig(n=2), step=0)
    assert result.prompts[0].votes is None
    assert not any("maj" in name for name in result.metrics())


def test_an_episode_that_scores_itself_has_no_answers_to_vote_on(scorer: Scorer) -> None:
    episode = EpisodeConfig(function="rl_runtime_user_functions:rewards_itself")
    result = phase(ScriptedClient([], n=2), scorer, episode=episode).validate(
        [Prompt("a")], SamplingConfig(n=2, max_tokens=8), step=0
    )
    assert [sample.score for sample in result.prompts[0].samples] == [0.25, 0.25]
    assert result.prompts[0].votes is None


def test_a_function_of_the_user_finds_the_answers_to_vote_on() -> None:
    reward = ScoringConfig(
        function="rl_runtime_user_functions:length_reward", answer="rl_runtime_user_functions:last_word"
    )
    with Scorer(reward) as own:
        result = phase(ScriptedClient([[2, 4, 3, 2]], n=4), own).validate([Prompt("a")], SamplingConfig(n=4), step=0)
    assert result.prompts[0].votes == (0, -1, 2, 0)
    with raises(InputError, field="reward.answer", value="json:loads_"):
        Scorer(replace(reward, answer="json:loads_"))
