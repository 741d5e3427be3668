"""A step that teaches nothing is named: when, why, and what helps."""

from collections.abc import Sequence
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st
from rl_runtime_samples import sample

from rl_runtime.training.learning_signal import LearningSignal, differ
from rollout_vllm import Sample

SCORES = st.lists(st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=1, max_size=3), min_size=1, max_size=3)


def samples_of(groups: Sequence[Sequence[float]], *, cut: bool = False) -> list[Sample]:
    reason = "length" if cut else "stop"
    return [
        sample(2, group=number, score=score, finish_reason=reason)
        for number, scores in enumerate(groups)
        for score in scores
    ]


def lines_of(steps: Sequence[list[Sample]], *, compares_group: bool = True) -> list[str]:
    lines: list[str] = []
    signal = LearningSignal(lines.append, compares_group=compares_group)
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
    for step, reason, key in (
        (samples_of([[0.0, 0.0]], cut=True), "were cut", "sampling.max_tokens"),
        ([one], "the score of all 1 responses is 0", "reward.method=flexible"),
        ([replace(one, score=1.0)] * 2, "no response has another score", "sampling.n"),
    ):
        (line,) = lines_of([step])
        assert line.startswith("warning: step 1 teaches nothing: ")
        assert reason in line
        assert key in line
        assert step[0].text in line


def test_a_cut_step_is_named_although_its_scores_differ() -> None:
    (line,) = lines_of([samples_of([[0.0, 1.0]], cut=True)])
    assert line.startswith("warning: step 1: all 2 responses were cut")


def test_a_greedy_baseline_is_what_a_sample_is_compared_with() -> None:
    one = samples_of([[1.0]])[0]
    assert differ([replace(one, baseline_score=0.0)], compares_group=False)
    assert not differ([replace(one, baseline_score=1.0)], compares_group=False)
