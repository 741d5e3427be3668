"""Tiled MLPs compute the same: one module against itself, and real ranks at every stage."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from ds_engine_architectures import PACKED, tiny_architecture, write_architecture
from ds_engine_testkit import EPS, LR, assert_equal, distance, make_samples, reference_training
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.llama.modeling_llama import LlamaMLP

from ds_engine import (
    EngineConfig,
    EngineConfigError,
    LoraConfig,
    ModelError,
    ModelShape,
    OffloadConfig,
    OptimConfig,
    ZeroConfig,
    check_model,
)
from ds_engine.model.tiled_mlp import tile_mlps
from ds_engine.model.trial import try_model
from ds_engine.planning.memory_plan import estimate_memory
from plinth_testing import RankPool, raises
from plinth_testing.models import QWEN2_7B


class OneLayer(GradientCheckpointingLayer):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.mlp = LlamaMLP(LlamaConfig(hidden_size=32, intermediate_size=48))


@settings(deadline=None, derandomize=True, max_examples=25)
@given(tokens=st.integers(1, 40), tile=st.integers(1, 41), frozen=st.booleans(), rows=st.sampled_from([1, 2]))
def test_outputs_and_gradients_are_those_of_the_whole_mlp(tokens: int, tile: int, frozen: bool, rows: int) -> None:
    layer = OneLayer()
    layer.mlp.up_proj.weight.requires_grad_(not frozen)
    x = torch.randn(rows, tokens, 32, generator=torch.Generator().manual_seed(tokens))
    weights = [p for p in layer.mlp.parameters() if p.requires_grad]

    def results() -> list[torch.Tensor]:
        given_ = x.clone().requires_grad_()
        out = layer.mlp(given_)
        return [out.detach(), *torch.autograd.grad(out.sin().sum(), [given_, *weights])]

    whole = results()
    calls: list[int] = []
    layer.mlp.act_fn.register_forward_hook(lambda _, __, out: calls.append(out.shape[1]))
    tile_mlps(layer, tile)
    for ours, expected in zip(results(), whole, strict=True):
        assert distance(ours, expected) < 1e-5
    if rows * tokens > tile:
        assert max(calls) == tile, "never more than one tile at once"
        assert len(calls) == 2 * -(-rows * tokens // tile)


def test_bf16_gradients_of_many_tiles_are_as_near_to_fp32_as_those_of_one() -> None:
    """Summed in bf16, 64 tiles would be several times as far away."""
    layer = OneLayer()
    mlp = layer.mlp
    x = torch.randn(1, 512, 32, generator=torch.Generator().manual_seed(0)) + 0.5

    def gradient(dtype: torch.dtype) -> torch.Tensor:
        mlp.to(dtype)
        return torch.autograd.grad(mlp(x.to(dtype)).float().sum(), mlp.down_proj.weight)[0].float()

    exact, whole = gradient(torch.float32), gradient(torch.bfloat16)
    mlp.float()
    tile_mlps(layer, 8)
    assert distance(gradient(torch.bfloat16), exact) < 1.5 * distance(whole, exact)


def test_settings_that_tiles_cannot_serve_are_refused() -> None:
    nvme = OffloadConfig(optimizer="nvme", param="nvme", nvme_path="/tmp")
    for value, extra in (
        (-1, {}),
        (8, {"dropout": True}),
        (8, {"lora": LoraConfig(dropout=0.1)}),
        (8, {"zero": ZeroConfig(stage=3, offload=nvme)}),
    ):
        with raises(EngineConfigError, field="tiled_mlp", value=value):
            EngineConfig(tiled_mlp=value, **extra)
    with raises(ModelError):
        tile_mlps(torch.nn.Linear(1, 1), 8)


def test_architectures_are_tried_with_tiles(tmp_path: Path) -> None:
    """A mixture routes each token alone; OPT's layers have no module `mlp`, which is said before any process starts."""
    assert try_model(tiny_architecture("qwen3_moe", PACKED["qwen3_moe"])).why_not_tiled == ""
    folder = write_architecture(tmp_path, "opt", PACKED["opt"])
    with raises(EngineConfigError, field="tiled_mlp", value=8, allowed="0"):
        check_model(str(folder), EngineConfig(tiled_mlp=8))


SHAPE = ModelShape.read(QWEN2_7B)


@settings(deadline=None, derandomize=True)
@given(tokens=st.integers(2, 300_000), tile=st.sampled_from([1024, 4096, 16384]), compiled=st.booleans())
def test_smaller_tiles_are_planned_with_less(tokens: int, tile: int, compiled: bool) -> None:
    def peak(tiled: int) -> int:
        lora, recompute = LoraConfig(), {"gradient_checkpointing": True, "compile": compiled}
        config = EngineConfig(lora=lora, tiled_mlp=tiled, **recompute)
        return estimate_memory(SHAPE, config, tokens_per_micro_batch=tokens).device_bytes

    assert peak(tile) <= peak(2 * tile) <= peak(0)


# ----------------------------------------------------------------------- ranks

STEPS = [make_samples(n, seed=s) for n, s in ((7, 1), (5, 2))]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "extra"),
    [
        (2, {"gradient_checkpointing": True}),
        (3, {}),
        (3, {"gradient_checkpointing": True, "sequence_parallel": 2}),
        (3, {"lora": LoraConfig(rank=4), "gradient_checkpointing": True}),
    ],
    ids=str,
)
def test_ranks_train_as_without_tiles(two_ranks: RankPool, tiny_model: Path, stage: int, extra: dict) -> None:
    zero = ZeroConfig(stage=stage, param_persistence_elements=0)
    config = EngineConfig(zero=zero, optim=OptimConfig(lr=LR, eps=EPS), dtype="float32", **extra)
    share = 1 if config.sequence_parallel == 2 else 2
    per_rank = [
        {"steps": [[s[r % share :: 2 * share], s[share + r % share :: 2 * share]] for s in STEPS]} for r in range(2)
    ]
    function, given_ = ("train_adapters", {"samples": STEPS[0]}) if config.lora else ("train", {})
    run = partial(two_ranks.run, function, per_rank, model_path=str(tiny_model), **given_)
    tiled = run(config=replace(config, tiled_mlp=5))
    if config.lora:
        whole = run(config=config)[0]
        losses, norms = ([getattr(s, name) for s in whole["stats"]] for name in ("loss", "grad_norm"))
        assert_equal(tiled, (whole["adapters"], losses, norms), key="adapters")
    else:
        assert_equal(tiled, reference_training(tiny_model, STEPS))


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.parametrize("stage", [2, 3])
def test_compiled_layers_with_tiles_train_the_same(two_ranks: RankPool, tiny_model: Path, stage: int) -> None:
    config = EngineConfig(
        zero=ZeroConfig(stage=stage), optim=OptimConfig(lr=LR, eps=EPS), dtype="float32", compile=True
    )
    config = replace(config, gradient_checkpointing=True)
    per_rank = [{"steps": [[s[r::4], s[r + 2 :: 4]] for s in STEPS]} for r in range(2)]
    (whole, _), (tiled, graphs) = (
        two_ranks.run("train_traced", per_rank, model_path=str(tiny_model), config=replace(config, tiled_mlp=n))[0]
        for n in (0, 5)
    )
    assert [s.loss for s in tiled["stats"]] == pytest.approx([s.loss for s in whole["stats"]], rel=1e-6)
    for name, weight in whole["weights"].items():
        assert distance(tiled["weights"][name], weight) < 1e-5, name
    assert graphs < 20, "a number that does not grow with layers, tiles or batches"
