"""Gradients that overflow: the step is left out on every rank and at every stage, and fp16's loss scale follows."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from ds_engine_testkit import config, make_samples, pairwise_cases, reference_training, used
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_engine import EngineConfig, EngineConfigError
from ds_engine.zero.optimizer_step import LossScale, check_fp16
from plinth_testing import RankPool, raises

# Small losses: at the scale fp16 starts with, ordinary ones overflow by themselves.
STEPS = [[replace(s, weight=s.weight / 32) for s in make_samples(4, seed=n)] for n in range(5)]
START = 2.0**16
SETUPS = {
    "dtype": ("float16", "bfloat16"),
    "stage": (1, 2, 3),
    "optimizer": ("none", "cpu"),
    "fp32_grad_accum": (True, False),
    "step_each_micro": (False, True),
    "grad_clip": (1.0, None),
    "weight_decay": (0.0, 0.1),
}
"""Every pair of values occurs in a test (plinth_testing.covering)."""


def distance(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    flat_a, flat_b = (torch.cat([x[name].flatten() for name in a]) for x in (a, b))
    return float((flat_a - flat_b).norm() / flat_b.norm())


@pytest.mark.slow
@pytest.mark.parametrize("case", pairwise_cases(SETUPS, num_short=5))
def test_overflow_on_one_rank(two_ranks: RankPool, tiny_model: Path, case: dict[str, Any]) -> None:
    """Rank 1's second loss exceeds fp16's range (or is infinite): the step is skipped on both ranks."""
    start = config(case["stage"], dtype=case["dtype"], optimizer=case["optimizer"])
    zero = replace(start.zero, fp32_grad_accum=case["fp32_grad_accum"], step_each_micro=case["step_each_micro"])
    optim = replace(start.optim, grad_clip=case["grad_clip"], weight_decay=case["weight_decay"])
    half = 5e-3 if case["fp32_grad_accum"] and not case["step_each_micro"] else 2e-2
    setup = replace(start, zero=zero, optim=optim)
    check_overflow(two_ranks, tiny_model, setup, tolerance=half if case["dtype"] == "float16" else 5e-2)


def check_overflow(two_ranks: RankPool, tiny_model: Path, config: EngineConfig, *, tolerance: float) -> None:
    """`tolerance` is relative, of norms and weights from those of one process in fp32."""
    dtype, optim = config.dtype, config.optim
    too_much = 1e30 if dtype == "float16" else math.inf
    per_rank = [
        {
            "steps": [[samples[rank::4], samples[rank + 2 :: 4]] for samples in STEPS],
            "factors": [1.0, too_much if rank == 1 else 1.0, 1.0, 1.0, 1.0],
        }
        for rank in range(2)
    ]
    kept = "averaged_gradients"  # stage 3 clears them itself
    with used(two_ranks, "loss scale in float16", but=("cur_scale", kept if config.zero.stage == 3 else "")):
        results = two_ranks.run("train_with_overflow", per_rank, model_path=str(tiny_model), config=config, window=2)
    stats, weights = results[0]
    for mine, theirs in zip(stats, results[1][0], strict=True):
        assert mine.grad_norm == theirs.grad_norm
        assert (mine.step_applied, mine.loss_scale) == (theirs.step_applied, theirs.loss_scale)
    assert [s.step_applied for s in stats] == [True, False, True, True, True]
    assert stats[1].grad_norm == math.inf
    assert all(torch.equal(tensor, weights[0][name]) for name, tensor in weights[1].items())
    scales = [START, START, START / 2, START / 2, START] if dtype == "float16" else [1.0] * 5
    assert [s.loss_scale for s in stats] == scales
    # What is left is training without that step, also where the scale has just been raised again.
    good = [STEPS[0], *STEPS[2:]]
    options = {"grad_clip": optim.grad_clip, "weight_decay": optim.weight_decay}
    expected, _, norms = reference_training(tiny_model, good, **options)
    assert [s.grad_norm for s in stats if s.step_applied] == pytest.approx(norms, rel=tolerance)
    assert distance(weights[-1], expected) < tolerance


@pytest.mark.slow
def test_upstream_halves_a_gradient_when_it_raises_the_scale(two_ranks: RankPool, tiny_model: Path) -> None:
    """DeepSpeed doubles its scale inside the third and fifth step, which then use half their gradients. Ours do not.

    With optimizer offload, where clipping and unscaling are DeepSpeed's own."""
    expected, _, norms = reference_training(tiny_model, STEPS)
    per_rank = [
        {"steps": [[samples[rank::2]] for samples in STEPS], "factors": [1.0] * len(STEPS)} for rank in range(2)
    ]
    common = {"model_path": str(tiny_model), "config": config(3, dtype="float16", optimizer="cpu")}
    with used(two_ranks, "loss scale in float16", but=("averaged_gradients",)):
        stats, weights = two_ranks.run("train_with_overflow", per_rank, window=2, **common)[0]
    assert [s.grad_norm for s in stats] == pytest.approx(norms, rel=5e-3)
    stats, upstream = two_ranks.run("train_with_overflow", per_rank, window=10**9, upstream_window=2, **common)[0]
    assert stats[2].grad_norm == pytest.approx(norms[2] / 2, rel=5e-3)
    assert 5 * distance(weights[-1], expected) < distance(upstream[-1], expected)


@given(overflows=st.lists(st.booleans(), max_size=40), window=st.integers(1, 5))
@settings(deadline=None, derandomize=True)
def test_loss_scale_follows_deepspeeds_scaler(overflows: list[bool], window: int) -> None:
    """DeepSpeed's scaler only lowers the scale here: halved by each overflow, doubled after `window` good steps."""
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler

    from ds_engine.zero.ds_config import deepspeed_config

    section = deepspeed_config(config(2, dtype="float16"), device_type="cpu")["fp16"]
    scaler = DynamicLossScaler(
        init_scale=2.0 ** section["initial_scale_power"],
        scale_window=section["loss_scale_window"],
        min_scale=2.0**-60,
        delayed_shift=section["hysteresis"],
        consecutive_hysteresis=False,
    )
    scale = LossScale(SimpleNamespace(loss_scaler=scaler, loss_scale=None), window=window)
    expected, num_good = START, 0
    for overflow in overflows:
        with patch("deepspeed.runtime.fp16.loss_scaler.dist.get_rank", return_value=1):  # it wants to log on rank 0
            scaler.update_scale(overflow)
        scale.after_step()
        num_good = 0 if overflow else num_good + 1
        expected *= 0.5 if overflow else 2.0 if num_good % window == 0 else 1.0
        assert scaler.cur_scale == expected


def test_frozen_and_plain_models_have_no_scale() -> None:
    assert LossScale(None).value == 1.0
    LossScale(None).after_step()


def test_fp16_is_refused_where_the_device_lacks_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    from deepspeed.accelerator import get_accelerator

    monkeypatch.setattr(get_accelerator(), "is_fp16_supported", lambda: None)
    check_fp16("bfloat16", "cpu")
    with raises(EngineConfigError, field="dtype", value="float16"):
        check_fp16("float16", "cpu")
