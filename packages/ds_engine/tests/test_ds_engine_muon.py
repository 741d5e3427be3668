"""Muon: whole matrices from the ranks' pieces, the step of one process at every stage, AdamW for everything else."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from ds_engine_testkit import EPS, LR, assert_equal, distance, make_samples, reference_training
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM

from ds_engine import EngineConfig, LoraConfig, OffloadConfig, OptimConfig, ZeroConfig, estimate_memory
from ds_engine.model.loading import load_model
from ds_engine.model.small_copy import small_config
from ds_engine.optimizers import MATRIX_ROUND
from ds_engine.zero import muon
from ds_engine.zero.muon import Matrix, assign, orthogonalized, rounds
from ds_engine.zero.optimizer import parameter_groups
from plinth_testing import RankPool

STEPS = [make_samples(n, seed=s) for n, s in ((7, 1), (5, 2), (6, 3))]


def config(stage: int, *, offload: str = "none", dtype: str = "float32", **settings: Any) -> EngineConfig:
    optim: dict[str, Any] = {"name": "muon", "lr": LR, "eps": EPS, "weight_decay": 0.1}
    return EngineConfig(
        zero=ZeroConfig(
            stage=stage,
            offload=OffloadConfig(optimizer=offload),
            param_persistence_elements=40,
            deepspeed=settings.pop("deepspeed", {}),
        ),
        optim=OptimConfig(**(optim | settings.pop("optim", {}))),
        dtype=dtype,
        **settings,
    )


def per_rank(num_micro: int = 2) -> list[dict[str, Any]]:
    """Steps in which the ranks have different samples."""
    return [{"steps": [[s[rank::2][m::num_micro] for m in range(num_micro)] for s in STEPS]} for rank in range(2)]


# ------------------------------------------------------------------ one process


@pytest.mark.parametrize("shape", [(8, 24), (24, 8), (16, 16), (3, 8, 12)])
def test_the_iteration_pulls_singular_values_to_one_and_keeps_the_vectors(shape: tuple[int, ...]) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    result = orthogonalized(matrix, 5)
    left, _, right = torch.linalg.svd(matrix, full_matrices=False)
    values = torch.linalg.svdvals(result)
    assert values.max() < 1.3
    assert values.median() > 0.6
    inner = left.mT @ result @ right.mT
    assert torch.allclose(inner, torch.diag_embed(torch.diagonal(inner, dim1=-2, dim2=-1)), atol=1e-4)


def test_the_iteration_in_bfloat16_is_that_of_torch() -> None:
    for shape in ((8, 24), (24, 8)):
        weight = torch.nn.Parameter(torch.zeros(shape))
        weight.grad = torch.randn(shape, generator=torch.Generator().manual_seed(2))
        optimizer = torch.optim.Muon([weight], lr=1.0, weight_decay=0.0, momentum=0.0, nesterov=False)
        optimizer.step()
        expected = -weight.detach() / math.sqrt(max(1.0, shape[0] / shape[1]))
        assert torch.allclose(orthogonalized(weight.grad.bfloat16(), 5).float(), expected, atol=1e-2)


def test_matrices_of_one_shape_are_iterated_together() -> None:
    generator = torch.Generator().manual_seed(3)
    matrices = [torch.randn(shape, generator=generator) for shape in ((4, 6), (6, 4), (4, 6), (2, 4, 6), (6, 4))]
    with patch.object(muon, "orthogonalized", wraps=orthogonalized) as iterated:
        results = muon._by_shape(matrices, 5)
    assert [call.args[0].shape for call in iterated.call_args_list] == [(2, 4, 6), (2, 6, 4), (1, 2, 4, 6)]
    for matrix, result in zip(matrices, results, strict=True):
        assert torch.allclose(result.view(matrix.shape), orthogonalized(matrix, 5), atol=1e-5)


@given(st.lists(st.integers(1, 100), max_size=20), st.integers(1, 8))
def test_owners_share_the_work(costs: list[int], num_ranks: int) -> None:
    owners = assign(costs, num_ranks)
    loads = [sum(c for c, owner in zip(costs, owners, strict=True) if owner == rank) for rank in range(num_ranks)]
    assert sum(loads) == sum(costs)
    assert max(loads) - min(loads) <= max(costs, default=0)


@given(st.lists(st.integers(1, 3 * MATRIX_ROUND), max_size=20), st.integers(1, 4))
def test_a_round_is_bounded(sizes: list[int], num_ranks: int) -> None:
    matrices = [Matrix(shape=(1, size), cuts=((0, size),), offset=0) for size in sizes]
    taken = list(rounds(matrices, num_ranks))
    assert [matrix for each in taken for matrix in each] == matrices
    for each in taken:
        assert len(each) == 1 or sum(m.shape[1] for m in each) <= num_ranks * MATRIX_ROUND


def test_adamw_steps_embeddings_heads_and_vectors(untied_model: Path) -> None:
    model = load_model(str(untied_model), EngineConfig(dtype="float32"), device=torch.device("cpu"), ds_config={})
    names = {id(p): name for name, p in model.named_parameters()}
    groups = parameter_groups(model, OptimConfig(name="muon", weight_decay=0.1))
    matrices = {names[id(p)] for group in groups if group.get("matrices") for p in group["params"]}
    assert matrices == {n for n in names.values() if "_proj" in n}
    assert {"model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"} <= set(names.values()) - matrices
    assert [(group["weight_decay"], group.get("matrices", False)) for group in groups] == [
        (0.1, True),
        (0.1, False),
        (0.0, False),
    ]


@pytest.mark.parametrize("model_type", ["gpt_oss", "mamba", "kimi_linear", "zamba", "qwen3_moe"])
def test_vectors_of_several_dimensions_are_no_matrices(model_type: str) -> None:
    """Biases of experts, decays of recurrences: an iteration over all of them would mix what is apart."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(small_config(AutoConfig.for_model(model_type)))
    names = {id(p): name.rpartition(".")[2] for name, p in model.named_parameters()}
    groups = parameter_groups(model, OptimConfig(name="muon", weight_decay=0.1))
    for key in ("matrices", "weight_decay"):
        matrices = {names[id(p)] for group in groups if group.get(key) for p in group["params"]}
        assert matrices, key
        assert {name for name in matrices if "weight" not in name} <= {"gate_up_proj", "down_proj"}, key


def test_the_plan_counts_one_state_for_matrices_and_two_for_the_rest() -> None:
    shape = {
        "model_type": "llama", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }  # fmt: skip
    matrices, tables, norms = 4 * 32 * 32 + 3 * 32 * 64, 2 * 64 * 32, 3 * 32
    for stage in (1, 2, 3):
        setup = EngineConfig(zero=ZeroConfig(stage=stage), optim=OptimConfig(name="muon"))
        estimate = estimate_memory(shape, setup, tokens_per_micro_batch=8)
        assert estimate.num_trained == matrices + tables + norms
        assert estimate.optimizer.device == 8 * matrices + 12 * (tables + norms)


# -------------------------------------------------------------------- two ranks


@pytest.mark.slow
@pytest.mark.parametrize(
    "setup",
    [
        pytest.param(config(1), marks=pytest.mark.long),
        *(config(stage) for stage in (2, 3)),
        config(3, offload="cpu"),
        config(3, sequence_parallel=2),
        pytest.param(config(3, deepspeed={"sub_group_size": 3000}), marks=pytest.mark.long),
    ],
    ids=["1", "2", "3", "3-cpu", "3-sp", "3-sub-groups"],
)
def test_three_steps_equal_torchs_muon_in_one_fp32_process(
    two_ranks: RankPool, untied_model: Path, setup: EngineConfig
) -> None:
    expected = reference_training(untied_model, STEPS, weight_decay=0.1, muon=True)
    ranks = per_rank() if setup.sequence_parallel == 1 else [{"steps": [[s] for s in STEPS]}] * 2
    results = two_ranks.run("train", ranks, model_path=str(untied_model), config=setup)
    assert_equal(results, expected)
    adamw, _, _ = reference_training(untied_model, STEPS, weight_decay=0.1)
    name = "model.layers.0.mlp.up_proj.weight"
    assert distance(adamw[name], expected[0][name]) > 1e-3


@pytest.mark.slow
def test_a_run_resumes_bit_for_bit_and_with_the_settings_that_it_has_now(
    two_ranks: RankPool, tiny_model: Path, tmp_path: Path
) -> None:
    for stage in (2, 3):
        common = {"model_path": str(tiny_model), "config": config(stage, dtype="bfloat16")}
        whole = two_ranks.run("train", per_rank(), **common)[0]
        first = [{"steps": each["steps"][:2]} for each in per_rank()]
        two_ranks.run("train", first, save_to=str(tmp_path / f"{stage}"), **common)
        rest = [{"steps": each["steps"][2:]} for each in per_rank()]
        resumed = two_ranks.run("train", rest, load_from=str(tmp_path / f"{stage}"), **common)[0]
        assert resumed["stats"] == whole["stats"][2:]
        assert all(torch.equal(resumed["weights"][name], weight) for name, weight in whole["weights"].items()), stage
        common["config"] = config(stage, dtype="bfloat16", optim={"options": {"adam_lr": LR / 10}, "weight_decay": 0.5})
        changed = two_ranks.run("train", rest, load_from=str(tmp_path / f"{stage}"), **common)[0]["weights"]
        for name in ("model.norm.weight", "model.layers.0.mlp.up_proj.weight"):  # of AdamW, and a matrix
            assert not torch.equal(changed[name], whole["weights"][name]), (stage, name)


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "dtype"), [(2, "float16"), (3, "bfloat16")])
def test_a_step_that_overflows_changes_nothing(two_ranks: RankPool, tiny_model: Path, stage: int, dtype: str) -> None:
    """Momentum included: the step after the skipped one is that of a run without it, but for its loss scale."""
    # Small losses: at the scale fp16 starts with, ordinary ones overflow by themselves.
    small = [[replace(sample, weight=sample.weight / 32) for sample in samples] for samples in STEPS]
    steps = [[samples[0::2], samples[1::2]] for samples in small]
    without = [steps[0], steps[2]]
    common = {"model_path": str(tiny_model), "config": config(stage, dtype=dtype), "window": 1000}
    _, weights = two_ranks.run("train_with_overflow", steps=steps, factors=[1.0, math.inf, 1.0], **common)[0]
    _, expected = two_ranks.run("train_with_overflow", steps=without, factors=[1.0, 1.0], **common)[0]
    for name, weight in weights[0].items():
        assert torch.equal(weights[1][name], weight), name
        if dtype == "bfloat16":
            assert torch.equal(weights[2][name], expected[1][name]), name
        else:  # CPUs with fp16 products round gradients of half the scale in another way
            assert distance(weights[2][name] - weight, expected[1][name] - expected[0][name]) < 1e-2, name


@pytest.mark.slow
def test_adapters_are_matrices(two_ranks: RankPool, tiny_model: Path) -> None:
    lora = LoraConfig(rank=4, alpha=8, target_modules=("q_proj", "up_proj"))
    expected: list[dict[str, Any]] = []
    for stage in (2, 3):
        setup = config(stage, lora=lora, optim={"weight_decay": 0.0})
        result = two_ranks.run(
            "train_adapters", per_rank(), model_path=str(tiny_model), config=setup, samples=STEPS[0]
        )[0]
        expected.append(result)
    assert expected[0]["num_states"] == 0, "AdamW has none of them"
    for name, tensor in expected[0]["adapters"].items():
        assert distance(tensor, expected[1]["adapters"][name]) < 2e-5, name
        assert tensor.abs().sum() > 0, name
