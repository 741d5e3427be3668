"""The gradient norm is that of DeepSpeed and of fp64, in whatever dtype gradients are kept."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ds_engine_testkit import distance, make_samples, used

from ds_engine import EngineConfig, OptimConfig, ZeroConfig
from ds_engine.zero.optimizer_step import _square_norm
from plinth_testing import RankPool


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_norms_are_not_rounded_to_the_gradients_dtype(dtype: torch.dtype) -> None:
    """Elements are near fp16's maximum, where the loss scale puts them; their norm exceeds it."""
    generator = torch.Generator().manual_seed(0)
    gradients = [(6e4 * torch.rand(n, generator=generator)).to(dtype) for n in (1000, 1, 37)]
    expected = sum(gradient.double().square().sum() for gradient in gradients)
    square = _square_norm([*gradients, None, torch.empty(0, dtype=dtype)], "cpu")
    assert square.dtype == torch.float64
    assert float(square) == pytest.approx(float(expected), rel=1e-6)


@pytest.mark.parametrize("is_flat", [True, False])
def test_norms_of_large_gradients_are_those_of_fp64(is_flat: bool) -> None:
    """An embedding on a CPU, where torch's fp32 norm of 2**23 elements is off by 2e-4."""
    gradient = torch.randn(2**12, 2**11, generator=torch.Generator().manual_seed(0))
    gradients: Any = SimpleNamespace(flat_partition=gradient.flatten()) if is_flat else [gradient]
    assert float(_square_norm(gradients, "cpu")) == pytest.approx(float(gradient.double().square().sum()), rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "grad_clip"), [(1, None), (3, 1.0)])
def test_bf16_gradients_are_clipped_as_by_deepspeed(
    two_ranks: RankPool, tiny_model: Path, stage: int, grad_clip: float | None
) -> None:
    """Without fp32 accumulation, two parameter groups."""
    config = EngineConfig(
        zero=ZeroConfig(stage=stage, fp32_grad_accum=False, param_persistence_elements=0),
        optim=OptimConfig(lr=3e-3, eps=1e-4, weight_decay=0.1, grad_clip=grad_clip),
    )
    per_rank = [{"steps": [[make_samples(2, seed=rank), make_samples(1, seed=rank + 2)]] * 2} for rank in range(2)]
    common = {"model_path": str(tiny_model), "config": config}
    theirs = two_ranks.run("train_with_deepspeeds_norms", per_rank, **common)[0]
    patch = "gradient norm of stage 3" if stage == 3 else "gradient norm of stages 1 and 2"
    with used(two_ranks, patch, but=("check_overflow",) if stage == 3 else ()):  # it is called in fp16 only
        ours = two_ranks.run("train", per_rank, **common)[0]
    assert ours["stats"][0].grad_norm == pytest.approx(theirs["stats"][0].grad_norm, rel=1e-6)
    assert theirs["stats"][0].grad_norm > 1
    assert all(distance(ours["weights"][name], weight) < 2e-3 for name, weight in theirs["weights"].items())
