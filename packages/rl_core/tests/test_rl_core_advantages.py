"""Group advantages, GAE, REINFORCE++ and whitening: algebraic properties, and plain loops as oracles."""

import statistics
from collections import defaultdict

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from plinth_testing.strategies import seeds
from rl_core import (
    ADVANTAGES,
    broadcast_to_tokens,
    dr_grpo_advantages,
    gae,
    group_advantages,
    masked_whiten,
    reinforce_pp_advantages,
    reinforce_pp_baseline_advantages,
    remax_advantages,
    returns_to_go,
    rloo_advantages,
)
from rl_core.advantages.whiten import _merged, _moments

PROPERTY = settings(deadline=None, derandomize=True, max_examples=40)
ESTIMATORS = {
    "grpo": lambda s, g: group_advantages(s, g, eps=0.0),
    "grpo_eps": group_advantages,
    "dr_grpo": dr_grpo_advantages,
    "rloo": rloo_advantages,
}

scores_strategy = st.lists(st.floats(-10, 10, allow_subnormal=False, width=32), min_size=1, max_size=20)


@st.composite
def grouped(draw: st.DrawFn) -> tuple[Tensor, Tensor]:
    """Scores and group ids in any order; groups differ in size and may have one sample."""
    scores = draw(scores_strategy)
    ids = draw(st.lists(st.integers(-3, 3), min_size=len(scores), max_size=len(scores)))
    return torch.tensor(scores, dtype=torch.float64), torch.tensor(ids)


@st.composite
def spread_groups(draw: st.DrawFn) -> tuple[Tensor, Tensor]:
    """Like `grouped`, with scores on a grid of 1/4, so that the spread of a group is 0 or at least 1/4."""
    _, ids = draw(grouped())
    quarters = draw(st.lists(st.integers(-40, 40), min_size=len(ids), max_size=len(ids)))
    return torch.tensor(quarters, dtype=torch.float64) / 4, ids


def members(ids: Tensor) -> list[list[int]]:
    places = defaultdict(list)
    for place, group in enumerate(ids.tolist()):
        places[group].append(place)
    return list(places.values())


every_estimator = pytest.mark.parametrize("name", ESTIMATORS)


def by_loop(name: str, scores: list[float]) -> list[float]:
    """The advantages of one group by their definition."""
    mean = sum(scores) / len(scores)
    if name == "rloo":
        return [s - (sum(scores) - s) / max(1, len(scores) - 1) if len(scores) > 1 else 0.0 for s in scores]
    if name == "dr_grpo" or min(scores) == max(scores):
        return [s - mean for s in scores]
    return [(s - mean) / (statistics.stdev(scores) + (1e-6 if name == "grpo_eps" else 0.0)) for s in scores]


@every_estimator
@PROPERTY
@given(spread_groups())
def test_group_advantages_against_a_loop(name: str, made: tuple[Tensor, Tensor]) -> None:
    scores, ids = made
    advantages = ESTIMATORS[name](scores, ids)
    for places in members(ids):
        want = by_loop(name, scores[places].tolist())
        assert advantages[places].tolist() == pytest.approx(want, rel=1e-10, abs=1e-10)


@every_estimator
@PROPERTY
@given(score=st.floats(-3, 3), size=st.integers(1, 9))
def test_equal_scores_give_exact_zeros(name: str, score: float, size: int) -> None:
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        scores = torch.full((size,), score, dtype=torch.float64).to(dtype)
        advantages = ESTIMATORS[name](scores, torch.zeros(size, dtype=torch.int64))
        assert torch.equal(advantages, torch.zeros(size, dtype=advantages.dtype))
        assert advantages.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


@every_estimator
@PROPERTY
@given(grouped())
def test_fp32_agrees_with_fp64(name: str, made: tuple[Tensor, Tensor]) -> None:
    scores, ids = made
    torch.testing.assert_close(
        ESTIMATORS[name](scores.float(), ids).double(), ESTIMATORS[name](scores, ids), rtol=1e-6, atol=1e-6
    )


def test_remax_subtracts_the_score_of_the_greedy_response() -> None:
    scores, greedy = torch.tensor([1.0, 0.25, 0.0]), torch.tensor([0.5, 0.5, 1.0])
    assert remax_advantages(scores, greedy).tolist() == [0.5, -0.25, -1.0]


# GAE


@st.composite
def rollouts(draw: st.DrawFn) -> tuple[Tensor, Tensor, Tensor, Tensor, float, float]:
    """rewards_K, values_K, lens_S, bootstrap_S, gamma, lam"""
    lens = torch.tensor(draw(st.lists(st.integers(0, 8), min_size=1, max_size=7)))
    generator = torch.Generator().manual_seed(draw(seeds()))
    total = int(lens.sum())
    rewards, values = torch.randn(2, total, generator=generator, dtype=torch.float64)
    bootstrap = torch.randn(len(lens), generator=generator, dtype=torch.float64)
    unit = st.one_of(st.sampled_from([0.0, 1.0]), st.floats(0, 1))
    return rewards, values, lens, bootstrap, draw(unit), draw(unit)


@PROPERTY
@given(rollouts(), st.booleans())
def test_gae_against_a_loop(made: tuple[Tensor, Tensor, Tensor, Tensor, float, float], has_ended: bool) -> None:
    rewards, values, lens, bootstrap, gamma, lam = made
    last_S = None if has_ended else bootstrap
    advantages, returns = gae(rewards, values, lens, gamma=gamma, lam=lam, bootstrap_values_S=last_S)
    want, start = [], 0
    for length, after in zip(lens.tolist(), [0.0] * len(lens) if last_S is None else last_S.tolist(), strict=True):
        running, following, backwards = 0.0, after, []
        for t in reversed(range(start, start + length)):
            running = float(rewards[t]) + gamma * following - float(values[t]) + gamma * lam * running
            following = float(values[t])
            backwards.append(running)
        want += backwards[::-1]
        start += length
    assert advantages.tolist() == pytest.approx(want, abs=1e-12)
    torch.testing.assert_close(returns, advantages + values, rtol=0, atol=1e-12)


# whitening and REINFORCE++


@PROPERTY
@given(st.integers(2, 200), seeds(), st.floats(0.01, 100), st.floats(-1000, 1000))
def test_whiten_mean_zero_variance_one(count: int, seed: int, scale: float, shift: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    values = shift + scale * torch.randn(count, generator=generator, dtype=torch.float64)
    mask = torch.rand(count, generator=generator) < 0.7
    white = masked_whiten(values, mask, eps=0.0)
    assert torch.equal(white[~mask], torch.zeros(int((~mask).sum()), dtype=torch.float64))
    if int(mask.sum()) > 1:
        assert abs(float(white[mask].mean())) < 1e-9 * max(1.0, abs(shift) / scale)
        assert float(white[mask].std()) == pytest.approx(1.0, abs=1e-9)


@PROPERTY
@given(st.integers(1, 60), seeds(), st.integers(1, 6), st.floats(-1e6, 1e6))
def test_whiten_moments_merge_over_any_split(count: int, seed: int, num_parts: int, shift: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    values = shift + torch.randn(count, generator=generator, dtype=torch.float64)
    part_of = torch.randint(0, num_parts, (count,), generator=generator)
    rows = [_moments(values[part_of == part], None) for part in range(num_parts)]
    merged = _merged(torch.tensor(rows, dtype=torch.float64))
    whole = _moments(values, None)
    assert merged[0] == whole[0] == count
    assert merged[1] == pytest.approx(whole[1], rel=1e-12, abs=1e-12)
    assert merged[2] == pytest.approx(whole[2], rel=1e-8, abs=1e-9)


@PROPERTY
@given(st.floats(-5, 5, width=32), st.lists(st.integers(0, 8), min_size=1, max_size=3))
def test_whiten_without_spread(value: float, counts: list[int]) -> None:
    values = torch.full((sum(counts),), value)
    assert torch.equal(masked_whiten(values, eps=0.0), torch.zeros(sum(counts)))
    parts = torch.tensor([_moments(part.double(), None) for part in values.split(counts)], dtype=torch.float64)
    assert _merged(parts)[2] == 0.0


@PROPERTY
@given(rollouts())
def test_reinforce_pp_is_whitened_returns(made: tuple[Tensor, Tensor, Tensor, Tensor, float, float]) -> None:
    rewards, _, lens, _, gamma, _ = made
    advantages = reinforce_pp_advantages(rewards, lens, gamma=gamma)
    torch.testing.assert_close(
        advantages, masked_whiten(returns_to_go(rewards, lens, gamma=gamma)), rtol=1e-12, atol=1e-12
    )


@PROPERTY
@given(spread_groups(), st.floats(0.01, 100), st.data())
def test_reinforce_pp_baseline_ignores_the_scale_of_the_batch(
    made: tuple[Tensor, Tensor], scale: float, data: st.DataObject
) -> None:
    scores, ids = made
    lens = torch.tensor(data.draw(st.lists(st.integers(0, 5), min_size=len(ids), max_size=len(ids))))
    plain = reinforce_pp_baseline_advantages(scores, ids, lens)
    torch.testing.assert_close(reinforce_pp_baseline_advantages(scores * scale, ids, lens), plain, rtol=1e-5, atol=1e-5)
    assert plain.shape == broadcast_to_tokens(scores, lens).shape


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo", "reinforce_pp_baseline"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_advantages_of_the_largest_scores_are_finite(name: str, dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max
    inputs = {"group_ids_N": torch.zeros(4, dtype=torch.int64), "response_lens_N": torch.ones(4, dtype=torch.int64)}
    for lowest in (0.0, -largest):
        scores_N = torch.tensor([largest, largest, largest, lowest], dtype=dtype)
        advantages_N = ADVANTAGES[name].estimate(inputs | {"scores_N": scores_N})
        assert bool(advantages_N.isfinite().all())
        assert advantages_N.sign().tolist() == [1, 1, 1, -1]
