"""Ulysses: dp x sp real ranks against plain PyTorch in one process, and the pure functions that divide the work."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import ds_engine_testkit
import pytest
import torch
from ds_engine_testkit import Reference, Sample, assert_equal, make_batch, make_samples, reference_training
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig

from ds_engine import (
    EngineConfig,
    EngineConfigError,
    LoraConfig,
    ModelShape,
    PlanMismatchError,
    estimate_memory,
)
from ds_engine.model.packed_model import packed_inputs
from ds_engine.model.sequence_parallel import SequenceGroup, check_model_heads, kv_copies
from plinth_testing import RankPool, raises, write_tiny_model

STEPS = [make_samples(n, seed=s) for n, s in ((7, 1), (5, 2), (6, 3))]


def config(stage: int, sp: int, **extra: Any) -> EngineConfig:
    return ds_engine_testkit.config(stage, zero={"step_each_micro": stage == 2}, sequence_parallel=sp, **extra)


def steps_of(rank: int, world_size: int, sp: int, num_micro: int) -> list[list[list[Sample]]]:
    """Round robin over the dp replicas, then over micro batches, of which the last stays empty."""
    dp, number = world_size // sp, rank // sp
    return [[samples[number::dp][m :: num_micro - 1] for m in range(num_micro - 1)] + [[]] for samples in STEPS]


@pytest.fixture(scope="module")
def reference(tiny_model: Path) -> Reference:
    return reference_training(tiny_model, STEPS)


def check_training(
    ranks: RankPool, model: Path, expected: Reference, settings_: EngineConfig, num_micro: int, *, within: float = 1e-5
) -> None:
    sp = settings_.sequence_parallel
    per_rank = [{"steps": steps_of(rank, ranks.size, sp, num_micro)} for rank in range(ranks.size)]
    results = ranks.run("train", per_rank, model_path=str(model), config=settings_)
    stats = results[0]["stats"]
    assert all(result["stats"] == stats for result in results)
    assert_equal(results, expected, within=within)
    assert [s.metrics["tokens"] for s in stats] == [sum(len(s.ids) - s.num_prompt for s in step) for step in STEPS]
    assert stats[0].num_empty_micro_batches >= ranks.size // sp
    assert list(results[0]["weights"]) == list(expected[0])
    assert all(not result["weights"] for result in results[1:])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "num_micro", "extra"),
    [(1, 2, {}), (3, 4, {}), (3, 3, {"gradient_checkpointing": True, "collective_guard": "lockstep"})],
)
def test_two_ranks_share_every_micro_batch(
    two_ranks: RankPool, tiny_model: Path, reference: Reference, stage: int, num_micro: int, extra: dict[str, object]
) -> None:
    check_training(two_ranks, tiny_model, reference, config(stage, 2, **extra), num_micro)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize(("stage", "sp"), [(1, 2), (3, 2), (2, 4)], ids=lambda value: str(value))
def test_four_ranks_equal_one_process(
    four_ranks: RankPool, tiny_model: Path, reference: Reference, stage: int, sp: int
) -> None:
    """With sp=4 and two key/value heads each head is on two ranks."""
    check_training(four_ranks, tiny_model, reference, config(stage, sp), 3)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize(
    ("stage", "dtype", "grad_clip"),
    [(1, "float32", 0.1), (2, "bfloat16", None), (3, "float32", 0.1)],
)
def test_ranks_that_hold_padding_only(
    four_ranks: RankPool, tmp_path: Path, stage: int, dtype: str, grad_clip: float | None
) -> None:
    """Three norms of two elements each have a parameter group of their own: rank 3 holds nothing of it, and at stage 3
    ranks 2 and 3 hold nothing of any of them."""
    sizes = {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 2}
    model = write_tiny_model(tmp_path, "llama", hidden_size=2, num_hidden_layers=1, **sizes)
    optim = {"grad_clip": grad_clip, "weight_decay": 0.1}
    expected = reference_training(model, STEPS, **optim)
    assert min(expected[2]) > 0.1, "clipping has something to do in every step"
    within = 1e-5 if dtype == "float32" else 3e-2
    check_training(four_ranks, model, expected, config(stage, 1, optim=optim, dtype=dtype), 3, within=within)


@pytest.mark.slow
def test_log_probs_equal_those_of_one_rank_each(two_ranks: RankPool, tiny_model: Path) -> None:
    micro = [STEPS[0], STEPS[1][:1], [], [Sample(ids=[5, 6], num_prompt=1, weight=1.0)]]
    shared = two_ranks.run(
        "train", model_path=str(tiny_model), config=config(3, 2), steps=[], log_prob_samples=micro, temperature=0.7
    )
    alone = two_ranks.run(
        "train", model_path=str(tiny_model), config=config(2, 1), steps=[], log_prob_samples=micro, temperature=0.7
    )
    for rank in range(2):
        for ours, expected in zip(shared[rank]["outputs"], alone[0]["outputs"], strict=True):
            torch.testing.assert_close(ours.log_probs_K, expected.log_probs_K, rtol=0, atol=1e-6)
            torch.testing.assert_close(ours.entropy_K, expected.entropy_K, rtol=0, atol=2e-6)


@pytest.mark.slow
def test_value_heads_and_adapters_train_the_same(two_ranks: RankPool, tiny_model: Path) -> None:
    calls = [
        ("train_values", {"value_samples": [STEPS[0], []]}, {}),
        ("train_adapters", {"samples": STEPS[0]}, {"lora": LoraConfig(rank=4)}),
    ]
    for function, given_, extra in calls:
        results = []
        for sp in (1, 2):
            per_rank = [{"steps": steps_of(rank, 2, sp, 2)} for rank in range(2)]
            settings_ = config(2, sp, **extra)
            results.append(two_ranks.run(function, per_rank, model_path=str(tiny_model), config=settings_, **given_))
        apart, together = (ranks[0] for ranks in results)
        losses = [[s.loss for s in result["stats"]] for result in (apart, together)]
        assert losses[1] == pytest.approx(losses[0], rel=1e-5)
        tensors = apart.get("weights") or apart["adapters"]
        others = together.get("weights") or together["adapters"]
        for name, tensor in tensors.items():
            assert float((others[name] - tensor).norm()) <= 1e-5 * float(tensor.norm()), name


@pytest.mark.slow
def test_unsupported_settings_are_refused_on_every_rank(two_ranks: RankPool, tiny_model: Path) -> None:
    different = [{"steps": [[STEPS[rank]]]} for rank in range(2)]
    for error in two_ranks.run("train", different, model_path=str(tiny_model), config=config(2, 2)):
        assert isinstance(error, PlanMismatchError)
        assert (error.field, error.value) == ("sequence_parallel", 2)
    for error in two_ranks.run("train", model_path=str(tiny_model), config=config(2, 4), steps=[]):
        assert isinstance(error, EngineConfigError)
        assert (error.field, error.value) == ("sequence_parallel", 4)


# ---------------------------------------------------------------- pure parts


def test_plans_refuse_the_head_counts_that_runs_refuse() -> None:
    """Two key/value heads are copied for six ranks; twelve query heads cannot be divided by eight."""
    model = {
        "model_type": "llama", "vocab_size": 64, "hidden_size": 96, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 12, "num_key_value_heads": 2,
    }  # fmt: skip
    shape, loaded = ModelShape.read(model), LlamaConfig(**model)

    def checks(sp: int) -> list[Callable[[], object]]:
        settings_ = EngineConfig(sequence_parallel=sp)
        return [
            lambda: check_model_heads(loaded, sp),
            lambda: estimate_memory(shape, settings_, tokens_per_micro_batch=64),
        ]

    for check in checks(6):
        check()
    for check in checks(8):
        with raises(EngineConfigError, field="sequence_parallel", value=8, allowed="one of [1, 2, 3, 4, 6, 12]"):
            check()


@settings(deadline=None, derandomize=True)
@given(kv=st.integers(1, 12), sharing=st.integers(1, 12), sp=st.integers(1, 16))
def test_query_heads_are_on_the_rank_of_their_key_heads(kv: int, sharing: int, sp: int) -> None:
    heads = kv * sharing
    if heads % sp:
        return
    copies = kv_copies(heads, kv, sp)
    repeated = [head for head in range(kv) for _ in range(copies)]
    per_rank, kv_per_rank = heads // sp, kv * copies // sp
    for rank in range(sp):
        local_kv = repeated[rank * kv_per_rank : (rank + 1) * kv_per_rank]
        for number in range(per_rank):
            assert local_kv[number // (per_rank // kv_per_rank)] == (rank * per_rank + number) // sharing


@pytest.mark.parametrize("sp", [2, 3, 4])
def test_slices_are_those_of_the_padded_row(sp: int) -> None:
    batch = make_batch(STEPS[0])
    cpu = torch.device("cpu")
    groups = [SequenceGroup(group=None, rank=rank, size=sp) for rank in range(sp)]  # type: ignore[arg-type]
    parts = [packed_inputs(batch, device=cpu, kernel="sdpa", sp_group=group)[0] for group in groups]
    ids = torch.cat([part.input_ids_1T[0] for part in parts])
    num_tokens = len(batch.input_ids_T)
    assert torch.equal(ids[:num_tokens], batch.input_ids_T)
    assert len(ids) == -(-num_tokens // sp) * sp == sum(parts[0].packing.borders.lengths)
    assert len({part.input_ids_1T.shape for part in parts}) == 1
    assert parts[0].packing.borders.lengths[: len(STEPS[0])] == tuple(batch.cu_seqlens_S1.diff().tolist())
    targets = [part.target_ids_K[: len(part.share.own_k)] for part in parts]  # a rank without one has a stand-in
    assert torch.equal(torch.cat(targets), batch.target_ids_K)
