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
from rl_runtime.training.learning_signal import LearningSignal, differ, ends_in_thoughts
from rollout_vllm import Sample

SCORES = st.lists(st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=1, max_size=3), min_size=1, max_size=3)


def samples_of(groups: Sequence[Sequence[float]], *, cut: bool = False) -> list[Sample]:
    reason = "length" if cut else "stop"
    return [
        sample(2, group=number, score=score, finish_reason=reason)
        for number, scores in enumerate(groups)
        for score in scores
    ]


def lines_of(steps: Sequence[list[Sample]], *, compares_group: bool = True, answer: str = "7") -> list[str]:
    lines: list[str] = []
    signal = LearningSignal(
        lines.append,
        compares_group=compares_group,
        finds_answers=lambda _: answer != "no answer",
        read_answer=lambda _: answer,
    )
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
def test_it_is_said_in_the_first_step_and_in_the_third_of_steps_in_a_row(teaches: list[bool]) -> None:
    lines = lines_of([samples_of([[0.0, 1.0]] if one else [[1.0, 1.0]]) for one in teaches])
    in_a_row = [next((n for n in range(i + 1) if teaches[i - n]), i + 1) for i in range(len(teaches))]
    first = in_a_row.index(1) if 1 in in_a_row else None
    said = [i + 1 for i, count in enumerate(in_a_row) if i == first or count == 3]
    assert [int(line.split()[2]) for line in lines] == said


def test_the_line_has_the_most_specific_reason_a_response_and_the_key_that_helps() -> None:
    one = replace(samples_of([[0.0, 0.0]])[0], text="so it is 7 apples")
    for step, answer, reason, key in (
        (samples_of([[0.0, 0.0]], cut=True), "no answer", "were cut", "sampling.max_tokens"),
        ([one], "no answer", "finds no answer in any of 1 responses", "data.system_prompt"),
        ([one], "7", "the score of all 1 responses is 0", "reward.format_score"),
        ([replace(one, score=1.0)] * 2, "7", "no response has another score", "sampling.n"),
    ):
        (line,) = lines_of([step], answer=answer)
        assert line.startswith("warning: step 1 teaches nothing: ")
        assert reason in line
        assert key in line
        assert f"{step[0].text!r}, in which the reward reads {answer}: score" in line


@pytest.mark.parametrize(
    ("text", "thinks"),
    [("<think>well", True), ("<think>well</think>7", False), ("<think></think><think>well", True), ("7", False)],
)
def test_a_step_that_is_cut_in_thoughts_names_the_key_that_turns_them_off(text: str, thinks: bool) -> None:
    samples = [replace(one, text=text) for one in samples_of([[0.0, 0.0]], cut=True)]
    (line,) = lines_of([samples])
    assert ("data.chat_template_kwargs.enable_thinking=false" in line) == thinks == ends_in_thoughts(text)


def test_wrong_answers_are_shown_by_one_of_them() -> None:
    samples = [
        replace(one, text=text) for one, text in zip(samples_of([[0.0, 0.0]]), ("I see", "it is 7"), strict=True)
    ]
    lines: list[str] = []
    signal = LearningSignal(
        lines.append, compares_group=True, finds_answers=lambda some: any("7" in one.text for one in some)
    )
    signal.check(1, samples)
    assert "'it is 7'" in lines[0]


def test_a_cut_step_is_named_although_its_scores_differ() -> None:
    (line,) = lines_of([samples_of([[0.0, 1.0]], cut=True)])
    assert line.startswith("warning: step 1: all 2 responses were cut")


def test_a_step_without_answers_is_named_although_its_scores_differ() -> None:
    (line,) = lines_of([samples_of([[0.0, 1.0]])], answer="no answer")
    assert line.startswith("warning: step 1: the reward finds no answer in any of 2 responses")


def test_answers_are_sought_until_a_step_has_some_and_again_where_all_scores_are_0() -> None:
    asked: list[int] = []

    def finds_answers(_: Sequence[Sample]) -> bool:
        asked.append(step)
        return step > 1

    signal = LearningSignal(lambda _: None, compares_group=True, finds_answers=finds_answers)
    for step, scores in enumerate(([0.0, 1.0], [0.0, 1.0], [0.0, 1.0], [0.0, 0.0]), 1):
        signal.check(step, samples_of([scores]))
    assert asked == [1, 2, 4, 4], "and once more for the response that is shown"


def test_a_greedy_baseline_is_what_a_sample_is_compared_with() -> None:
    one = samples_of([[1.0]])[0]
    assert differ([replace(one, baseline_score=0.0)], compares_group=False)
    assert not differ([replace(one, baseline_score=1.0)], compares_group=False)


LENGTH = RewardTermConfig(function="length", options={"target": 5})
STRICT = RewardTermConfig(function="gsm8k", options={"method": "strict"})


@pytest.mark.parametrize(
    ("config", "texts", "finds", "read"),
    [
        (ScoringConfig(), ["it is 7", "#### 8"], True, "no answer (reward.method=flexible reads the last number)"),
        (ScoringConfig(), ["it is 7", "it is 8"], False, "no answer (reward.method=flexible reads the last number)"),
        (ScoringConfig(method="flexible"), ["it is 7", "none"], True, "the answer 7"),
        (ScoringConfig(method="flexible"), ["none", "none"], False, "no answer"),
        (
            ScoringConfig(terms={"a": STRICT, "b": LENGTH}),
            ["7", "8"],
            False,
            "no answer (reward.terms.a.options.method=flexible reads the last number)",
        ),
        (ScoringConfig(terms={"b": LENGTH}), ["none"], True, ""),
    ],
)
def test_the_reward_says_what_it_reads(config: ScoringConfig, texts: list[str], finds: bool, read: str) -> None:
    items = [sample(2, group=number, text=text) for number, text in enumerate(texts)]
    with Scorer(config) as scorer:
        assert asyncio.run(scorer.finds_answers(items)) == finds
        assert scorer.read_answer(items[0]) == read
        by_itself = replace(items[0], turn_rewards=items[0].log_probs)
        assert asyncio.run(scorer.finds_answers([by_itself]))
        assert scorer.read_answer(by_itself) == ""
