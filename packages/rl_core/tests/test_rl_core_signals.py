"""Mismatch metrics, KL controllers, token rewards, overlong shaping and dynamic sampling."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from plinth_testing.strategies import lengths, seeds
from rl_core import (
    AdaptiveKL,
    FixedKL,
    effective_sample_size,
    informative_groups,
    mismatch_metrics,
    overlong_keep,
    overlong_penalty,
    returns_to_go,
    segment_sum,
    select_groups,
    token_rewards,
)

PROPERTY = settings(deadline=None, derandomize=True, max_examples=60)
lens_strategy = lengths()


def rows(seed: int, count: int, num: int, scale: float = 1.0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return list(scale * torch.randn(num, count, generator=generator, dtype=torch.float64))


@PROPERTY
@given(seeds(), st.integers(1, 50))
def test_mismatch_against_numpy(seed: int, count: int) -> None:
    trainer, rollout = rows(seed, count, 2, scale=0.3)
    metrics = mismatch_metrics(trainer, rollout, percentiles=(0, 12.5, 50, 99, 100))
    gap = (trainer - rollout).numpy()
    ratio = np.exp(gap)
    assert metrics["num_tokens"] == count
    assert metrics["abs_mean"] == pytest.approx(np.abs(gap).mean())
    assert metrics["kl_k1"] == pytest.approx(-gap.mean(), abs=1e-12)
    assert metrics["kl_k3"] == pytest.approx((ratio - 1 - gap).mean(), abs=1e-12)
    assert metrics["ess"] == pytest.approx(ratio.sum() ** 2 / (count * (ratio**2).sum()))
    for percentile in (0, 12.5, 50, 99, 100):
        assert metrics[f"ratio_p{percentile:g}"] == pytest.approx(np.percentile(ratio, percentile))
    assert metrics["ratio_min"] <= metrics["ratio_p50"] <= metrics["ratio_max"]


@PROPERTY
@given(seeds(), lens_strategy, st.randoms(use_true_random=False))
def test_mismatch_does_not_depend_on_order(seed: int, lens: list[int], random: object) -> None:
    trainer, rollout = rows(seed, sum(lens), 2, scale=0.3)
    order = list(range(len(lens)))
    random.shuffle(order)  # type: ignore[attr-defined]
    shuffled = [torch.cat([x.split(lens)[i] for i in order]) for x in (trainer, rollout)]
    want = mismatch_metrics(trainer, rollout, response_lens_S=torch.tensor(lens))
    got = mismatch_metrics(*shuffled, response_lens_S=torch.tensor(lens)[order])
    assert got == pytest.approx(want, rel=1e-11, abs=1e-12)


@PROPERTY
@given(seeds(), lens_strategy)
def test_equal_log_probs_have_no_mismatch(seed: int, lens: list[int]) -> None:
    (log_probs,) = rows(seed, sum(lens), 1)
    metrics = mismatch_metrics(log_probs, log_probs, response_lens_S=torch.tensor(lens))
    for name, value in metrics.items():
        if name != "num_tokens":
            assert value == (1.0 if "ratio" in name or "ess" in name else 0.0), name


@PROPERTY
@given(st.lists(st.floats(0, 1e3, allow_subnormal=False), min_size=1, max_size=30), st.floats(1e-3, 1e3))
def test_effective_sample_size_bounds(weights: list[float], scale: float) -> None:
    row = torch.tensor(weights, dtype=torch.float64)
    size = effective_sample_size(row)
    assert 1.0 / len(weights) - 1e-9 <= size <= 1.0 + 1e-9
    if float(row.square().sum()) > 1e-200:
        assert effective_sample_size(scale * row) == pytest.approx(size)


def test_sequence_mismatch_survives_huge_ratios() -> None:
    trainer, rollout = torch.zeros(2000), torch.full((2000,), -5.0)
    metrics = mismatch_metrics(trainer, rollout, response_lens_S=torch.tensor([1999, 1]))
    assert all(math.isfinite(value) for value in metrics.values())
    assert metrics["seq_ess"] == pytest.approx(0.5)


# KL controllers

coefficients = st.floats(0, 10)


@PROPERTY
@given(coefficients, st.floats(0.01, 10), st.floats(1, 1e5), st.floats(-1, 100), st.integers(1, 10_000))
def test_adaptive_kl_moves_toward_the_target(
    coefficient: float, target: float, horizon: float, kl: float, num_samples: int
) -> None:
    before = AdaptiveKL(coefficient=coefficient, target=target, horizon=horizon)
    after = before.updated(kl, num_samples)
    assert after.coefficient >= 0.0
    assert (after.target, after.horizon) == (target, horizon)
    if kl > target:
        assert after.coefficient >= coefficient
    if kl < target:
        assert after.coefficient <= coefficient
    assert abs(after.coefficient - coefficient) <= coefficient * 0.2 * num_samples / horizon + 1e-12


@PROPERTY
@given(coefficients, st.floats(-1, 100), st.integers(1, 1000))
def test_fixed_kl_does_not_change(coefficient: float, kl: float, num_samples: int) -> None:
    assert FixedKL(coefficient=coefficient).updated(kl, num_samples).coefficient == coefficient


def test_adaptive_kl_hand_values() -> None:
    controller = AdaptiveKL(coefficient=0.2, target=6.0, horizon=10_000)
    assert controller.updated(9.0, 256).coefficient == pytest.approx(0.2 * (1 + 0.2 * 256 / 10_000))
    assert controller.updated(6.3, 256).coefficient == pytest.approx(0.2 * (1 + 0.05 * 256 / 10_000))


# token rewards


@PROPERTY
@given(seeds(), lens_strategy, st.floats(0, 2))
def test_token_rewards_sum_to_the_score_and_the_kl_penalty(seed: int, lens: list[int], coefficient: float) -> None:
    lens_S = torch.tensor(lens)
    (scores,), (kl,) = rows(seed, len(lens), 1), rows(seed + 1, sum(lens), 1)
    rewards = token_rewards(scores, lens_S, kl_K=kl, kl_coefficient=coefficient)
    want = torch.where(lens_S > 0, scores, 0.0) - coefficient * segment_sum(kl, lens_S)
    torch.testing.assert_close(segment_sum(rewards, lens_S), want, rtol=1e-11, atol=1e-12)
    without_kl = token_rewards(scores, lens_S)
    assert int((without_kl != 0).sum()) <= len(lens)
    # without a discount the return of every token is the score of its sequence
    torch.testing.assert_close(
        returns_to_go(without_kl, lens_S), torch.repeat_interleave(scores, lens_S), rtol=0, atol=1e-12
    )


@PROPERTY
@given(seeds(), lens_strategy, st.floats(0, 1))
def test_returns_to_go_against_a_loop(seed: int, lens: list[int], gamma: float) -> None:
    (rewards,) = rows(seed, sum(lens), 1)
    want = []
    for part in rewards.split(lens):
        running, backwards = 0.0, []
        for value in reversed(part.tolist()):
            running = value + gamma * running
            backwards.append(running)
        want += backwards[::-1]
    assert returns_to_go(rewards, torch.tensor(lens), gamma=gamma).tolist() == pytest.approx(want, abs=1e-12)


# DAPO


@PROPERTY
@given(
    st.lists(st.integers(0, 300), min_size=1, max_size=20), st.integers(1, 200), st.integers(1, 200), st.floats(0, 2)
)
def test_overlong_penalty_falls_from_zero_to_its_limit(lens: list[int], a: int, b: int, penalty: float) -> None:
    buffer_length, max_length = sorted((a, b))
    lens_N = torch.tensor(sorted(lens))
    shaped = overlong_penalty(
        lens_N, max_length=max_length, buffer_length=buffer_length, penalty=penalty, dtype=torch.float64
    )
    assert bool(((shaped <= 0) & (shaped >= -penalty)).all())
    assert bool((shaped.diff() <= 0).all())
    for length, value in zip(sorted(lens), shaped.tolist(), strict=True):
        if length <= max_length - buffer_length:
            assert value == 0.0
        elif length >= max_length:
            assert value == pytest.approx(-penalty)
        else:
            want = penalty * (max_length - buffer_length - length) / buffer_length
            assert value == pytest.approx(want, abs=1e-12)


def test_overlong_filter() -> None:
    assert overlong_keep(torch.tensor([True, False])).tolist() == [False, True]


@st.composite
def generated(draw: st.DrawFn) -> tuple[Tensor, Tensor]:
    """Scores 0 or 1 of complete groups, with the samples of the groups mixed."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=8))
    ids = draw(st.permutations([group for group, size in enumerate(sizes) for _ in range(size)]))
    scores = draw(st.lists(st.sampled_from([0.0, 1.0]), min_size=len(ids), max_size=len(ids)))
    return torch.tensor(scores), torch.tensor(ids)


@PROPERTY
@given(generated())
def test_informative_groups_have_right_and_wrong_samples(made: tuple[Tensor, Tensor]) -> None:
    scores, ids = made
    keep = informative_groups(scores, ids)
    for group in ids.unique().tolist():
        number_right = float(scores[ids == group].sum())
        informative = 0 < number_right < int((ids == group).sum())
        assert set(keep[ids == group].tolist()) == {informative}


@PROPERTY
@given(generated(), st.integers(1, 8))
def test_selection_takes_whole_informative_groups_in_order(made: tuple[Tensor, Tensor], wanted: int) -> None:
    scores, ids = made
    selection = select_groups(scores, ids, wanted)
    keep = informative_groups(scores, ids)
    chosen = ids[selection.index].unique().tolist()
    assert len(chosen) == selection.num_groups
    assert selection.num_groups + selection.num_missing == wanted
    assert selection.num_groups + selection.num_surplus + selection.num_dropped == len(ids.unique())
    for group in chosen:
        places = (ids == group).nonzero().squeeze(1)
        assert bool(keep[places].all())
        assert set(places.tolist()) <= set(selection.index.tolist())
    assert selection.index.tolist() == sorted(selection.index.tolist())
    if selection.num_missing:
        assert set(selection.index.tolist()) == set(keep.nonzero().squeeze(1).tolist())


@PROPERTY
@given(generated(), generated(), st.integers(1, 8))
def test_more_generation_only_adds_groups(
    first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor], wanted: int
) -> None:
    before = select_groups(*first, wanted)
    scores = torch.cat([first[0], second[0]])
    ids = torch.cat([first[1], second[1] + 100])
    after = select_groups(scores, ids, wanted)
    assert set(before.index.tolist()) <= set(after.index.tolist())
    assert after.num_missing <= before.num_missing
    if before.num_missing == 0:
        assert torch.equal(after.index, before.index)


def test_no_samples_have_no_informative_group() -> None:
    assert informative_groups(torch.zeros(0), torch.zeros(0, dtype=torch.int64)).tolist() == []
