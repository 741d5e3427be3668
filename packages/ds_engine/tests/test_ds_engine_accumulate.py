"""Gradients that wait for a step of their own: any split over calls gives the bits of one mini batch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from ds_engine_testkit import make_samples

from ds_engine import (
    EngineConfig,
    EngineConfigError,
    EngineError,
    LoraConfig,
    OffloadConfig,
    OptimConfig,
    SharedBase,
    StepSettings,
    ZeroConfig,
)
from plinth_testing import RankPool, raises

pytestmark = pytest.mark.slow
OPTIM = OptimConfig(lr=3e-3, betas=(0.9, 0.95), eps=1e-4, weight_decay=0.1, grad_clip=0.05)


def config(stage: int, offload: str, dtype: str, lora: LoraConfig | None = None) -> EngineConfig:
    zero = ZeroConfig(stage=stage, offload=OffloadConfig(optimizer=offload), param_persistence_elements=0)
    return EngineConfig(zero=zero, optim=OPTIM, dtype=dtype, lora=lora)


@pytest.mark.parametrize(
    ("stage", "offload", "dtype", "lora"),
    [
        (2, "none", "bfloat16", None),
        (2, "none", "bfloat16", LoraConfig(rank=4)),
        (2, "cpu", "bfloat16", None),
        (3, "none", "bfloat16", None),
        (3, "cpu", "float32", None),
    ],
)
def test_steps_in_parts_with_settings_of_their_own_equal_mini_batches(
    two_ranks: RankPool, tiny_model: Path, stage: int, offload: str, dtype: str, lora: LoraConfig | None
) -> None:
    """The engine in parts is built with other settings than each step then gives."""
    per_rank = [
        {"steps": [[make_samples(2, seed=10 * n + 3 * micro + rank) for micro in range(3)] for n in range(3)]}
        for rank in range(2)
    ]
    whole = config(stage, offload, dtype, lora)
    other = replace(whole, optim=OptimConfig(lr=1.0, weight_decay=0.5, grad_clip=None))
    settings = StepSettings(lr=3e-3, betas=(0.9, 0.95), eps=1e-4, weight_decay=0.1, grad_clip=0.05)
    common = {"model_path": str(tiny_model)}
    expected = two_ranks.run("train", per_rank, config=whole, **common)
    results = two_ranks.run("train_in_parts", per_rank, config=other, settings=settings, **common)
    for result, one in zip(results, expected, strict=True):
        assert result["norms"] == [stats.grad_norm for stats in one["stats"]]
        assert result["weights"].keys() == one["weights"].keys()
        assert all(torch.equal(result["weights"][name], weight) for name, weight in one["weights"].items())
    assert all(norm > 0.05 for norm in results[0]["norms"]), "clipping acts"
    assert results[0]["losses"] == pytest.approx([stats.loss for stats in expected[0]["stats"]], rel=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_adapters_over_one_base_train_as_if_alone(
    two_ranks: RankPool, tiny_model: Path, tmp_path: Path, dtype: str
) -> None:
    """Of several ranks and layers, with gradients of one waiting while another steps; also from saved states."""
    loras = (LoraConfig(rank=4), LoraConfig(rank=8, alpha=8, target_modules=("q_proj", "down_proj")))
    configs = [replace(config(2, "none", dtype, lora), seed=seed) for seed, lora in enumerate(loras)]
    steps = [
        {"steps": [[make_samples(2, seed=10 * n + 3 * micro + rank) for micro in range(2)] for n in range(4)]}
        for rank in range(2)
    ]
    common = {"model_path": str(tiny_model), "configs": configs}
    apart, mixed = (
        two_ranks.run("train_side_by_side", steps, folder=str(tmp_path / str(way)), alternates=way, **common)
        for way in (False, True)
    )
    for rank in range(2):
        first, second = mixed[rank]
        assert first["places"] == second["places"], "the base is there once"
        for alone, one in zip(apart[rank], mixed[rank], strict=True):
            assert (one["losses"], one["norms"], one["again"]) == (alone["losses"], alone["norms"], alone["again"])
            assert one["weights"].keys() == alone["weights"].keys()
            assert all(torch.equal(one["weights"][name], weight) for name, weight in alone["weights"].items())
    assert mixed[0][0]["norms"] != mixed[0][1]["norms"]
    assert mixed[0][0]["losses"][0] != mixed[0][0]["losses"][2]


@pytest.mark.parametrize(("change", "field"), [({"lora": None}, "base"), ({"zero": ZeroConfig(stage=3)}, "zero.stage")])
def test_weights_that_cannot_be_shared_are_refused_by_name(change: dict[str, object], field: str) -> None:
    engine = replace(config(2, "none", "float32", LoraConfig(rank=4)), **change)  # type: ignore[arg-type]
    with raises(EngineConfigError, field=field):
        SharedBase().model("folder", engine, "lm", lambda: pytest.fail("it is loaded"))


@pytest.mark.parametrize(("stage", "offload"), [(2, "none"), (3, "cpu")])
def test_a_forgotten_optimizer_steps_as_a_new_one(
    two_ranks: RankPool, tiny_model: Path, stage: int, offload: str
) -> None:
    per_rank = [{"samples": [make_samples(2, seed=rank), make_samples(2, seed=2 + rank)]} for rank in range(2)]
    common = {"model_path": str(tiny_model), "config": config(stage, offload, "float32")}
    new, forgotten, kept = (
        two_ranks.run("step_after_another", per_rank, forgets=forgets, **common)[0] for forgets in (None, True, False)
    )
    assert all(torch.equal(forgotten[name], weight) for name, weight in new.items())
    assert not all(torch.equal(kept[name], weight) for name, weight in new.items())


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"zero": ZeroConfig(stage=1)}, "zero.stage"),
        ({"zero": ZeroConfig(stage=2, step_each_micro=True)}, "zero.step_each_micro"),
        ({"optim": OptimConfig(name="sgd", lr=0.1)}, "optim.name"),
    ],
)
def test_settings_that_cannot_wait_are_refused_by_name(
    two_ranks: RankPool, tiny_model: Path, change: dict[str, object], field: str
) -> None:
    engine = replace(config(2, "none", "float32"), **change)  # type: ignore[arg-type]
    per_rank = [{"steps": [[make_samples(1, seed=rank)]]} for rank in range(2)]
    settings = StepSettings(lr=1e-3)
    errors = two_ranks.run("train_in_parts", per_rank, config=engine, settings=settings, model_path=str(tiny_model))
    assert all(isinstance(error, EngineError) and error.field == field for error in errors)
