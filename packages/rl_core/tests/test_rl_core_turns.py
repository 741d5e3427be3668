"""Turns of a batch and their advantages, compared with plain loops over samples and turns."""

import statistics
from collections import defaultdict
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_core import (
    find_turns,
    gigpo_advantages,
    pack,
    turn_grpo_advantages,
    turn_rloo_advantages,
)

PROPERTY = settings(deadline=None, derandomize=True, max_examples=60)
quarters = st.integers(-8, 8).map(lambda number: number / 4)
episodes = st.lists(
    st.tuples(st.integers(0, 2), st.lists(st.tuples(quarters, st.integers(0, 2)), max_size=4)), min_size=1, max_size=7
)
"""Samples: the group, and (reward, state) of each turn."""
gammas = st.sampled_from([0.0, 0.5, 0.75, 1.0])


def tensors(made: list[tuple[int, list[tuple[float, int]]]]) -> dict[str, torch.Tensor]:
    turns = [turn for _, own in made for turn in own]
    return {
        "turn_rewards_U": torch.tensor([reward for reward, _ in turns], dtype=torch.float64),
        "turn_counts_N": torch.tensor([len(own) for _, own in made]),
        "group_ids_N": torch.tensor([group for group, _ in made]),
        "state_ids_U": torch.tensor([state for _, state in turns], dtype=torch.int64),
    }


def normalized(value: float, others: list[float]) -> float:
    """GRPO's advantage of a value among all that are compared."""
    if len(others) < 2 or min(others) == max(others):
        return 0.0
    return (value - statistics.fmean(others)) / (statistics.stdev(others) + 1e-6)


def by_loops(name: str, made: list[tuple[int, list[tuple[float, int]]]], gamma: float) -> list[float]:
    returns = [
        [sum(gamma ** (k - u) * own[k][0] for k in range(u, len(own))) for u in range(len(own))] for _, own in made
    ]
    compared: dict[Any, list[float]] = defaultdict(list)
    totals: dict[int, list[float]] = defaultdict(list)
    for (group, own), row in zip(made, returns, strict=True):
        totals[group].append(sum(reward for reward, _ in own))
        for number, (_, state) in enumerate(own):
            compared[group, state if name == "gigpo" else number].append(row[number])
    out = []
    for (group, own), row in zip(made, returns, strict=True):
        for number, (_, state) in enumerate(own):
            others = compared[group, state if name == "gigpo" else number]
            if name == "turn_rloo":
                num_others = len(others) - 1
                out.append(row[number] - (sum(others) - row[number]) / num_others if num_others else 0.0)
                continue
            out.append(normalized(row[number], others))
            if name == "gigpo":
                out[-1] += normalized(sum(reward for reward, _ in own), totals[group])
    return out


ESTIMATORS: dict[str, Any] = {
    "turn_grpo": turn_grpo_advantages,
    "turn_rloo": turn_rloo_advantages,
    "gigpo": gigpo_advantages,
}


def estimate(name: str, inputs: dict[str, torch.Tensor], gamma: float) -> torch.Tensor:
    states = {} if name == "gigpo" else {"state_ids_U"}
    result: torch.Tensor = ESTIMATORS[name](**{k: v for k, v in inputs.items() if k not in states}, gamma=gamma)
    return result


@pytest.mark.parametrize("name", ESTIMATORS)
@PROPERTY
@given(made=episodes, gamma=gammas)
def test_an_advantage_of_turns_is_that_of_a_loop_over_samples_and_turns(name: str, made: Any, gamma: float) -> None:
    advantages_U = estimate(name, tensors(made), gamma)
    assert advantages_U.dtype == torch.float64
    assert advantages_U.tolist() == pytest.approx(by_loops(name, made, gamma), rel=1e-9, abs=1e-9)


@PROPERTY
@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(0, 1), min_size=1, max_size=3),
            st.lists(st.tuples(st.integers(0, 1), st.booleans()), max_size=8),
        ),
        min_size=1,
        max_size=5,
    )
)
def test_turns_are_the_runs_of_targets_and_states_the_tokens_before_them(
    rows: list[tuple[list[int], list[tuple[int, bool]]]],
) -> None:
    """`rows`: prompts, and responses as (token, it was sampled)."""
    batch = pack(
        [prompt for prompt, _ in rows],
        [[token for token, _ in response] for _, response in rows],
        masks=[[sampled for _, sampled in response] for _, response in rows],
    )
    lens, counts, states = [], [], []
    for prompt, response in rows:
        counts.append(0)
        before, inside = list(prompt), False
        for token, sampled in response:
            if sampled and not inside:
                counts[-1] += 1
                lens.append(0)
                states.append(tuple(before))
                before = []
            if sampled:
                lens[-1] += 1
            else:
                before.append(token)
            inside = sampled
    turns = find_turns(batch)
    assert (turns.lens_U.tolist(), turns.counts_S.tolist()) == (lens, counts)
    ids = turns.state_ids_U.tolist()
    assert len(ids) == len(states)
    assert all((ids[i] == ids[j]) == (states[i] == states[j]) for i in range(len(ids)) for j in range(i))
