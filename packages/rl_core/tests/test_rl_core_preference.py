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
@given(seeds(), SIZES, BETAS, st.floats(0.0, 0.49))
def test_dpo_and_ipo_against_a_loop(seed: int, count: int, beta: float, smoothing: float) -> None:
    chosen, rejected = rows(seed, count, 2)
    gaps = [c - r for c, r in zip(floats(chosen), floats(rejected), strict=True)]
    expected = [-(1 - smoothing) * math.log(sigmoid(beta * h)) - smoothing * math.log(sigmoid(-beta * h)) for h in gaps]
    assert floats(dpo_loss(chosen, rejected, beta=beta, label_smoothing=smoothing)) == pytest.approx(expected, abs=1e-9)
    squares = [(h - 0.5 / beta) ** 2 for h in gaps]
    assert floats(dpo_loss(chosen, rejected, kind="ipo", beta=beta)) == pytest.approx(squares, rel=1e-9, abs=1e-9)


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


def test_low_precision_is_computed_in_float32() -> None:
    half = torch.tensor([0.1, 0.2], dtype=torch.bfloat16)
    assert bradley_terry_loss(half, half, torch.ones(2)).dtype == torch.float32
    assert dpo_loss(half, half).dtype == torch.float32
    assert kto_loss(half, torch.tensor([True, False]), 0.1).dtype == torch.float32
