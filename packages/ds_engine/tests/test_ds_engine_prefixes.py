"""Shared prefixes: a tree whose prefixes are computed once equals every sequence computed whole."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from ds_engine_architectures import HYBRIDS, PACKED, tiny_architecture, write_architecture
from ds_engine_testkit import distance, token_loss
from ds_engine_trees import DEEP, GROUP, draw_tree, tree_batch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ds_engine import BatchError, EngineConfig, LoraConfig, OptimConfig, PlanMismatchError, ZeroConfig
from ds_engine.agreement import _checksum
from ds_engine.model.loading import load_model
from ds_engine.model.packed_model import install_packed_forward, packed_inputs
from ds_engine.model.prefix_tree import gather_rows
from ds_engine.model.sequence_parallel import SequenceGroup
from ds_engine.model.trial import try_model
from plinth_testing import RankPool, raises

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> dict[str, Any]:
    """In fp64, but for norms and rotations: one attends to all tokens, one to windows of 8 tokens in some layers."""
    windows = write_architecture(tmp_path_factory.mktemp("windows"), "gemma3_text", PACKED["gemma3_text"])
    made = {}
    for name, folder in (("full", tiny_model), ("windows", windows)):
        made[name] = load_model(str(folder), EngineConfig(dtype="float32"), device=CPU, ds_config={}).double()
        install_packed_forward(made[name], log_prob_in_fp64)
    return made


def log_prob_in_fp64(
    hidden_KH: Tensor, weight_VH: Tensor, targets_K: Tensor, temperature: float, soft_cap: float = torch.inf
) -> tuple[Tensor, Tensor]:
    logits_KV = hidden_KH @ weight_VH.T
    if soft_cap < torch.inf:
        logits_KV = soft_cap * torch.tanh(logits_KV / soft_cap)
    log_p_KV = (logits_KV / temperature).log_softmax(-1)
    return log_p_KV.gather(1, targets_K[:, None])[:, 0], -(log_p_KV.exp() * log_p_KV).sum(-1)


def outputs_and_gradients(model: Any, batch: Any, *, share: bool) -> tuple[Tensor, dict[str, Tensor]]:
    inputs, _ = packed_inputs(batch, device=CPU, kernel="sdpa", prefixes=batch.prefixes if share else None)
    model.zero_grad()
    rows_RK = model(packed=inputs)
    token_loss(rows_RK[0], rows_RK[1], batch.columns["weights"]).backward()
    return rows_RK.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("kind", ["full", "windows"])
@given(data=st.data())
@settings(deadline=None, max_examples=25)
def test_outputs_and_gradients_equal_those_of_whole_sequences(
    models: dict[str, Any], kind: str, data: st.DataObject
) -> None:
    parents = draw_tree(data)
    lengths = data.draw(st.lists(st.integers(1, 9), min_size=len(parents), max_size=len(parents)))
    batch = tree_batch(
        parents, [n + (parent < 0) for n, parent in zip(lengths, parents, strict=True)], seed=len(parents)
    )
    ours, expected = (outputs_and_gradients(models[kind], batch, share=share) for share in (True, False))
    torch.testing.assert_close(ours[0], expected[0], rtol=1e-6, atol=1e-6)  # norms and rotations are in fp32
    for name, gradient in expected[1].items():
        assert distance(ours[1][name], gradient) < 1e-6, name


def test_only_computed_tokens_reach_the_model() -> None:
    batch = tree_batch(*GROUP, seed=0)
    inputs, num_targets = packed_inputs(batch, device=CPU, kernel="sdpa", prefixes=batch.prefixes)
    assert inputs.input_ids_1T.shape == (1, sum(GROUP[1]))
    assert num_targets == len(batch.target_ids_K)
    assert inputs.position_ids_1T[0].tolist() == [
        *range(5),
        *range(9),
        *range(5, 9),
        5,
        *range(5, 12),
        *range(9, 15),
        9,
        10,
    ]


@pytest.mark.parametrize("sp", [2, 3])
def test_ranks_of_a_sequence_group_share_the_computed_tokens(sp: int) -> None:
    """Padding at the end is a root of its own."""
    batch = tree_batch(*DEEP, seed=0)
    groups = [SequenceGroup(group=None, rank=rank, size=sp) for rank in range(sp)]  # type: ignore[arg-type]
    parts = [
        packed_inputs(batch, device=CPU, kernel="flash4", sp_group=group, prefixes=batch.prefixes)[0]
        for group in groups
    ]
    whole, _ = packed_inputs(batch, device=CPU, kernel="flash4", prefixes=batch.prefixes)
    joined = torch.cat([part.input_ids_1T[0] for part in parts])
    assert joined[: sum(DEEP[1])].equal(whole.input_ids_1T[0])
    assert len(joined) == -(-sum(DEEP[1]) // sp) * sp
    for part in parts:
        assert sum(part.packing.borders.lengths) == len(joined)
        assert part.packing.crossings is not None
        assert part.packing.crossings.table_C[1:].equal(whole.packing.crossings.table_C[1:])


def test_gradients_of_rows_are_summed_in_fp32_and_a_fixed_order() -> None:
    rows = torch.randint(50, (4000,), generator=torch.Generator().manual_seed(0))
    x = torch.randn(50, 3, 4, dtype=torch.bfloat16, requires_grad=True)
    grad = torch.randn(4000, 3, 4, generator=torch.Generator().manual_seed(1)).bfloat16()
    (first,) = torch.autograd.grad(gather_rows(x, rows), x, grad)
    (second,) = torch.autograd.grad(gather_rows(x, rows), x, grad)
    assert first.equal(second)
    exact = torch.zeros(50, 3, 4, dtype=torch.float64).index_add_(0, rows, grad.double())
    torch.testing.assert_close(first.double(), exact, rtol=2**-8, atol=0)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("parents_N", (-1, 0, -1, 0, 0, 1, 1)),  # not level by level
        ("parents_N", (-1, -1, 0, 0, 1, 0, 1)),  # children not in their parents' order
        ("parents_N", (-1, -1, 3, 0, 0, 1, 1)),  # a parent behind its child
        ("parents_N", (-1, -1, 0)),
        ("cu_seqlens_N1", torch.tensor([0, 5, 14, 18, 19, 26, 32, 40], dtype=torch.int32)),
        ("place_T", torch.zeros(60, dtype=torch.int64)),
    ],
)
def test_what_is_no_tree_of_the_batch_is_refused(field: str, value: Any) -> None:
    batch = tree_batch(*GROUP, seed=0)
    assert batch.prefixes is not None
    with raises(BatchError):
        packed_inputs(batch, device=CPU, kernel="sdpa", prefixes=replace(batch.prefixes, **{field: value}))


def test_models_are_tried_with_a_shared_prefix() -> None:
    for name in ("llama", "gemma3_text", "deepseek_v3"):
        assert try_model(tiny_architecture(name, PACKED[name])).why_not_shared == "", name
    for name, changes in (("phi3", PACKED["phi3"]), ("mamba", HYBRIDS["mamba"])):
        trial = try_model(tiny_architecture(name, changes))
        assert trial.why_not_shared, name
    assert "without shared prefixes" in str(try_model(tiny_architecture("phi3", PACKED["phi3"])))


SETUPS = {
    "stage-2-recomputation": {"zero": ZeroConfig(stage=2), "gradient_checkpointing": True},
    "stage-3-sp": {"zero": ZeroConfig(stage=3, param_persistence_elements=0), "sequence_parallel": 2},
    "stage-3-recomputation": {
        "zero": ZeroConfig(stage=3, param_persistence_elements=0),
        "gradient_checkpointing": True,
    },
    "lora-nf4": {"zero": ZeroConfig(stage=2), "lora": LoraConfig(rank=4, base_format="nf4")},
}


@pytest.mark.slow
@pytest.mark.parametrize("setup", SETUPS)
def test_a_step_of_real_ranks_equals_one_without_sharing(two_ranks: RankPool, tiny_model: Path, setup: str) -> None:
    optim = OptimConfig(lr=3e-3, eps=1e-4, grad_clip=1.0)
    config = EngineConfig(optim=optim, dtype="float32", **SETUPS[setup])
    trees = [[(*GROUP, 1), (*DEEP, 2)], [(*DEEP, 3), (*GROUP, 4)]]
    per_rank = [
        {"steps": [[trees[0 if config.sequence_parallel > 1 else rank][m]] for m in range(2)]} for rank in range(2)
    ]
    shared, whole = (
        two_ranks.run("train_trees", per_rank, model_path=str(tiny_model), config=config, share=share)
        for share in (True, False)
    )
    assert shared[0]["shares"] is True
    assert shared[0]["copies"] is True, "the kernel on a CPU gathers"
    for ours, expected in zip(shared, whole, strict=True):
        assert distance(ours["outputs"], expected["outputs"]) < 1e-6
        torch.testing.assert_close(ours["stats"], expected["stats"], rtol=1e-5, atol=1e-7)
    for name, weight in whole[0]["weights"].items():
        assert distance(shared[0]["weights"][name], weight) < 1e-6, name


@pytest.mark.slow
@pytest.mark.parametrize("sp", [1, 2])
def test_ranks_of_which_one_has_prefixes_end_in_an_error_if_they_share_sequences(
    two_ranks: RankPool, tiny_model: Path, sp: int
) -> None:
    """Replicas compute their own sequences, each as it likes."""
    config = EngineConfig(dtype="float32", sequence_parallel=sp, zero=ZeroConfig(stage=3, param_persistence_elements=0))
    per_rank = [{"steps": [[(*GROUP, 1)]], "share": rank == 0} for rank in range(2)]
    results = two_ranks.run("train_trees", per_rank, model_path=str(tiny_model), config=config)
    if sp == 2:
        assert [type(error) for error in results] == [PlanMismatchError] * 2
    else:
        assert distance(results[0]["outputs"], results[1]["outputs"]) < 1e-6


def test_ranks_that_share_sequences_compare_all_of_a_tree() -> None:
    """Equal nodes with other parents attend to other tokens."""
    batch = tree_batch([-1, -1, 0], [4, 4, 2], seed=1)
    assert batch.prefixes is not None
    trees = [replace(batch.prefixes, parents_N=(-1, -1, parent)) for parent in (0, 1)]
    assert len({_checksum([replace(batch, prefixes=tree)]) for tree in trees}) == 2
