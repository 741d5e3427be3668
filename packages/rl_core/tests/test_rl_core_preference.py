"""Preference losses against plain float64 formulas, and the properties that their papers state."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from plinth_testing.strategies import seeds
from rl_core import bradley_terry_loss, dpo_loss, kto_kl, kto_loss

PROPERTY = settings(deadline=None, derandomize=True, max_examples=40)
SIZES = st.integers(1, 12)
BETAS = st.floats(0.01, 2.0)


def rows(seed: int, count: int, num: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [row.requires_grad_() for row in 3.0 * torch.randn(num, count, generator=generator, dtype=torch.float64)]


def sigmoid(x: float) -> float:
    return 1.0 / (1.0 + math.exp(-x))


def floats(row: Tensor) -> list[float]:
    return [float(one) for one in row.detach()]


@PROPERTY
@given(seeds(), SIZES, st.floats(0.0, 0.5))
def test_bradley_terry_against_a_loop(seed: int, count: int, center: float) -> None:
    chosen, rejected, margins = rows(seed, count, 3)
    loss = bradley_terry_loss(chosen, rejected, margins.abs(), center_coef=center)
    triples = zip(floats(chosen), floats(rejected), floats(margins), strict=True)
    expected = [-math.log(sigmoid(c - r - abs(m))) + center * (c + r) ** 2 for c, r, m in triples]
    assert floats(loss) == pytest.approx(expected, rel=1e-9, abs=1e-9)


@PROPERTY
@given(seeds(), SIZES, st.floats(-50, 50))
def test_bradley_terry_sees_only_differences(seed: int, count: int, shift: float) -> None:
    chosen, rejected = rows(seed, count, 2)
    plain, shifted = bradley_terry_loss(chosen, rejected), bradley_terry_loss(chosen + shift, rejected + shift)
    torch.testing.assert_close(plain, shifted)
    # A margin is a constant added to the rejected reward.
    margin = torch.full_like(chosen, abs(shift) / 50)
    torch.testing.assert_close(
        bradley_terry_loss(chosen, rejected, margin), bradley_terry_loss(chosen, rejected + abs(shift) / 50)
    )
    gradients = torch.autograd.grad(plain.sum(), (chosen, rejected))
    assert (gradients[0] < 0).all()
    assert (gradients[1] > 0).all()
    torch.testing.assert_close(gradients[0], -gradients[1])


@PROPERTY
@given(seeds(), SIZES, BETAS, st.floats(0.0, 0.49))
def test_dpo_and_ipo_against_a_loop(seed: int, count: int, beta: float, smoothing: float) -> None:
    chosen, rejected = rows(seed, count, 2)
    gaps = [c - r for c, r in zip(floats(chosen), floats(rejected), strict=True)]
    expected = [-(1 - smoothing) * math.log(sigmoid(beta * h)) - smoothing * math.log(sigmoid(-beta * h)) for h in gaps]
    assert floats(dpo_loss(chosen, rejected, beta=beta, label_smoothing=smoothing)) == pytest.approx(expected, abs=1e-9)
    squares = [(h - 0.5 / beta) ** 2 for h in gaps]
    assert floats(dpo_loss(chosen, rejected, kind="ipo", beta=beta)) == pytest.approx(squares, rel=1e-9, abs=1e-9)


@PROPERTY
@given(seeds(), SIZES, BETAS)
def test_dpo_pushes_the_pair_apart_and_ipo_to_its_target(seed: int, count: int, beta: float) -> None:
    chosen, rejected = rows(seed, count, 2)
    of_chosen, of_rejected = torch.autograd.grad(dpo_loss(chosen, rejected, beta=beta).sum(), (chosen, rejected))
    assert (of_chosen < 0).all()
    assert (of_rejected > 0).all()
    (of_chosen,) = torch.autograd.grad(dpo_loss(chosen, rejected, kind="ipo", beta=beta).sum(), chosen)
    assert torch.equal(of_chosen.sign(), ((chosen - rejected).detach() - 0.5 / beta).sign())


@PROPERTY
@given(seeds(), SIZES, BETAS)
def test_losses_of_pairs_follow_their_permutation(seed: int, count: int, beta: float) -> None:
    chosen, rejected, margins = rows(seed, count, 3)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    for one in (
        lambda c, r, m: bradley_terry_loss(c, r, m, center_coef=0.1),
        lambda c, r, m: dpo_loss(c, r, beta=beta, label_smoothing=0.1),
        lambda c, r, m: dpo_loss(c, r, beta=beta, kind="ipo"),
        lambda c, r, m: kto_loss(c, r > 0, m.mean(), beta=beta),
    ):
        torch.testing.assert_close(
            one(chosen, rejected, margins)[order], one(chosen[order], rejected[order], margins[order])
        )


def test_values_at_equal_models_and_limits() -> None:
    zero, far = torch.zeros(3, dtype=torch.float64), torch.full((3,), 1e4, dtype=torch.float64)
    assert floats(bradley_terry_loss(zero, zero)) == pytest.approx([math.log(2)] * 3)
    assert floats(dpo_loss(zero, zero)) == pytest.approx([math.log(2)] * 3)
    assert floats(dpo_loss(zero, zero, kind="ipo", beta=0.5)) == [1.0] * 3
    assert floats(bradley_terry_loss(far, zero)) == [0.0] * 3
    assert floats(bradley_terry_loss(zero, far)) == [1e4] * 3  # no overflow: the loss becomes linear
    assert floats(dpo_loss(zero, far, beta=1.0)) == [1e4] * 3
    # With smoothing the best gap is finite: sigmoid(beta h) = 1 - e.
    best = torch.tensor([math.log(0.9 / 0.1) / 0.2], dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(dpo_loss(best, torch.zeros_like(best), beta=0.2, label_smoothing=0.1).sum(), best)
    assert float(gradient) == pytest.approx(0.0, abs=1e-12)


@PROPERTY
@given(seeds(), SIZES, BETAS, st.floats(0.1, 2.0), st.floats(0.1, 2.0))
def test_kto_against_a_loop(seed: int, count: int, beta: float, good: float, bad: float) -> None:
    log_ratios, labels, others = rows(seed, count, 3)
    is_desirable, kl = labels > 0, kto_kl(others)
    assert float(kl) == pytest.approx(max(0.0, sum(floats(others)) / count))
    assert not kl.requires_grad
    loss = kto_loss(log_ratios, is_desirable, kl, beta=beta, desirable_weight=good, undesirable_weight=bad)
    expected = [
        good * (1 - sigmoid(beta * (ratio - float(kl)))) if yes else bad * (1 - sigmoid(beta * (float(kl) - ratio)))
        for ratio, yes in zip(floats(log_ratios), is_desirable.tolist(), strict=True)
    ]
    assert floats(loss) == pytest.approx(expected, abs=1e-9)
    (gradient,) = torch.autograd.grad(loss.sum(), log_ratios)
    assert torch.equal(gradient < 0, is_desirable)
    assert bool((loss > 0).all())
    assert bool((loss < max(good, bad)).all())


@PROPERTY
@given(seeds(), SIZES, BETAS, st.floats(-5, 5))
def test_kto_sees_the_distance_to_the_reference_point(seed: int, count: int, beta: float, shift: float) -> None:
    log_ratios, labels = rows(seed, count, 2)
    plain = kto_loss(log_ratios, labels > 0, 0.0, beta=beta)
    torch.testing.assert_close(plain, kto_loss(log_ratios + shift, labels > 0, shift, beta=beta))
    # Labels the other way round mirror the values around 1/2.
    torch.testing.assert_close(kto_loss(log_ratios, labels <= 0, 0.0, beta=beta), 1.0 - plain)


def test_low_precision_is_computed_in_float32() -> None:
    half = torch.tensor([0.1, 0.2], dtype=torch.bfloat16)
    assert bradley_terry_loss(half, half, torch.ones(2)).dtype == torch.float32
    assert dpo_loss(half, half).dtype == torch.float32
    assert kto_loss(half, torch.tensor([True, False]), 0.1).dtype == torch.float32
