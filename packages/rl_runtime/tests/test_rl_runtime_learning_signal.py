"""A step that teaches nothing is named: when, why, and what helps."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rl_runtime_samples import sample

from rl_runtime.rollout.scoring import Scorer
from rl_runtime.rollout.scoring_config import RewardTermConfig, ScoringConfig
from rl_runtime.training.learning_signal import AnswerReader, LearningSignal, differ
from rollout_vllm import Sample

SCORES = st.lists(st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=1, max_size=3), min_size=1, max_size=3)


def samples_of(groups: Sequence[Sequence[float]], *, cut: bool = False) -> list[Sample]:
    reason = "length" if cut else "stop"
    return [
        sample(2, group=number, score=score, finish_reason=reason)
        for number, scores in enumerate(groups)
        for score in scores
    ]


def lines_of(steps: Sequence[list[Sample]], *, compares_group: bool = True, answers: bool | None = None) -> list[str]:
    """The lines of these steps; `answers`: whether the reward finds one, None: it looks for none."""
    lines: list[str] = []
    reader = AnswerReader(
        has_answer=lambda samples: None if answers is None else [answers] * len(samples),
        read=lambda _: "" if answers is None else "the answer 7" if answers else "no answer",
        advice=lambda _: "reward.method=flexible takes the last number",
    )
    signal = LearningSignal(lines.append, reader, compares_group=compares_group)
    for number, step in enumerate(steps, 1):
        signal.check(number, step)
    return lines


@given(groups=SCORES, compares_group=st.booleans())
def test_a_line_comes_if_and_only_if_every_advantage_is_zero(groups: list[list[float]], compares_group: bool) -> None:
    compared = groups if compares_group else [[score for scores in groups for score in scores]]
    means = [(scores, sum(scores) / len(scores)) for scores in compared]
    is_zero = all(abs(score - mean) < 1e-9 for scores, mean in means for score in scores)
    assert differ(samples_of(groups), compares_group=compares_group) != is_zero
    assert bool(lines_of([samples_of(groups)], compares_group=compares_group)) == is_zero


@given(st.lists(st.booleans(), max_size=12))
def test_it_is_said_in_the_first_and_the_third_of_steps_in_a_row(teaches: list[bool]) -> None:
    lines = lines_of([samples_of([[0.0, 1.0]] if one else [[1.0, 1.0]]) for one in teaches])
    in_a_row = [next((n for n in range(i + 1) if teaches[i - n]), i + 1) for i in range(len(teaches))]
    said = [i + 1 for i, count in enumerate(in_a_row) if count in (1, 3)]
    assert [int(line.split()[2]) for line in lines] == said


def test_the_line_has_the_most_specific_reason_a_response_and_the_key_that_helps() -> None:
    one = replace(samples_of([[0.0, 0.0]])[0], text="so it is 7 apples")
    for step, answers, reason, key in (
        (samples_of([[0.0, 0.0]], cut=True), False, "were cut", "sampling.max_tokens"),
        ([one], False, "no answer in any", "reward.method=flexible"),
        ([one], True, "the score of all 1 responses is 0", "reward.format_score"),
        ([replace(one, score=1.0)] * 2, True, "no response has another score", "sampling.n"),
    ):
        (line,) = lines_of([step], answers=answers)
        assert line.startswith("warning: step 1 teaches nothing: ")
        assert reason in line
        assert key in line
        assert ("reads the answer 7" if answers else "reads no answer") in line
        assert step[0].text in line


def test_a_cut_step_is_named_although_its_scores_differ() -> None:
    (line,) = lines_of([samples_of([[0.0, 1.0]], cut=True)])
    assert line.startswith("warning: step 1: all 2 responses were cut")


def test_a_greedy_baseline_is_what_a_sample_is_compared_with() -> None:
    one = samples_of([[1.0]])[0]
    assert differ([replace(one, baseline_score=0.0)], compares_group=False)
    assert not differ([replace(one, baseline_score=1.0)], compares_group=False)


@pytest.mark.parametrize(
    ("config", "texts", "expected", "read"),
    [
        (ScoringConfig(), ["it is 7", "#### 8"], [False, True], "no answer"),
        (ScoringConfig(method="flexible"), ["it is 7", "none"], [True, False], "the answer 7"),
        (ScoringConfig(terms={"a": RewardTermConfig(function="length", options={"target": 5})}), ["7"], None, ""),
    ],
)
def test_the_reward_says_what_it_reads(
    config: ScoringConfig, texts: list[str], expected: list[bool] | None, read: str
) -> None:
    one = sample(2)
    items = [replace(one, text=text, prompt=replace(one.prompt, data_source="openai/gsm8k")) for text in texts]
    with Scorer(config) as scorer:
        assert asyncio.run(scorer.has_answer(items)) == expected
        assert scorer.read_answer(items[0]) == read
        assert ("reward.method=flexible" in scorer.advice(items[0])) == (config == ScoringConfig())
