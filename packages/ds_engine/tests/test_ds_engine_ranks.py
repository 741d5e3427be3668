"""Two real ranks: what the engine promises beyond the gradient itself."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from ds_engine_testkit import config, make_samples, used

from ds_engine import (
    BatchError,
    CheckpointError,
    EngineConfig,
    EngineError,
    OptimConfig,
    PlanMismatchError,
    ZeroConfig,
    estimate_memory,
)
from plinth_testing import RankPool

pytestmark = pytest.mark.slow


def test_upstream_loses_gradients_and_we_do_not(two_ranks: RankPool, tiny_model: Path) -> None:
    """Several backward() and one step() without boundaries: stages 1 and 2 keep only the last micro batch."""
    micro_batches = [[s] for s in make_samples(3, seed=1)]
    norms = two_ranks.run("naive_and_exact_norms", model_path=str(tiny_model), micro_batches=micro_batches)[0]
    for stage in (1, 2):
        assert norms[stage]["naive"] == pytest.approx(norms[stage]["last_alone"], rel=1e-5)
        assert abs(norms[stage]["naive"] / norms[stage]["true"] - 1) > 0.05
    for stage in (1, 2, 3):
        assert norms[stage]["engine"] == pytest.approx(norms[stage]["true"], rel=1e-5)


def test_unequal_micro_batch_counts_fail_at_once_on_all_ranks(two_ranks: RankPool, tiny_model: Path) -> None:
    samples = make_samples(3, seed=2)
    per_rank = [{"steps": [[samples]]}, {"steps": [[samples, samples]]}]
    for error in two_ranks.run("train", per_rank, model_path=str(tiny_model), config=config(2)):
        assert isinstance(error, PlanMismatchError)
        assert "{0: 1, 1: 2}" in str(error)


def test_micro_batches_that_an_engine_skips_are_counted(two_ranks: RankPool, tiny_model: Path) -> None:
    """None is skipped; a fault that skips the empty ones, on both ranks, shows in the count."""
    steps = [[[], make_samples(2, seed=2), make_samples(3, seed=3)], [make_samples(2, seed=4)]]
    for method, expected in (("train", [0, 0]), ("train_without_empty", [2, 0])):
        for result in two_ranks.run(method, model_path=str(tiny_model), config=config(1), steps=steps):
            assert [s.num_skipped_empty_micro_batches for s in result["stats"]] == expected
            assert [s.num_empty_micro_batches for s in result["stats"]] == [2, 0]


@pytest.mark.parametrize("stage", [2, 3])
def test_a_failed_mini_batch_is_not_added_to_the_next(one_rank: RankPool, tiny_model: Path, stage: int) -> None:
    """A failure before the first gradient leaves nothing behind; after it every further step fails."""
    samples = make_samples(5, seed=3)
    common = {"model_path": str(tiny_model), "config": config(stage)}
    refused, early, good, late, *after = one_rank.run("train_with_bad_losses", samples=samples, **common)[0]
    assert isinstance(refused, BatchError)
    assert refused.field == "cu_seqlens_S1"
    assert isinstance(early, BatchError)
    assert good == one_rank.run("train", steps=[[samples[:2], samples[2:]]], **common)[0]["stats"][0]
    assert isinstance(late, BatchError)
    assert len(after) == 2
    for error in after:
        assert type(error) is EngineError


def test_ranks_that_call_different_methods_fail_at_once(two_ranks: RankPool, tiny_model: Path) -> None:
    samples = make_samples(3, seed=2)
    per_rank = [{"steps": [[samples]]}, {"steps": [], "log_prob_samples": [samples]}]
    for error in two_ranks.run("train", per_rank, model_path=str(tiny_model), config=config(2)):
        assert isinstance(error, PlanMismatchError)
        assert "log_probs" in str(error)


@pytest.mark.parametrize("stage", [2, 3])
def test_losses_may_use_fewer_outputs_on_one_rank(two_ranks: RankPool, tiny_model: Path, stage: int) -> None:
    """Rank 0 ignores the entropy, rank 1 the whole output: same collectives, and only rank 0 adds a gradient."""
    samples = make_samples(4, seed=3)
    per_rank = [{"kind": "log_prob_only"}, {"kind": "constant"}]
    results = two_ranks.run(
        "train_with_loss",
        per_rank,
        model_path=str(tiny_model),
        config=config(stage),
        micro_batches=[samples[:2], samples[2:]],
    )
    assert results[0].grad_norm == pytest.approx(results[0].metrics["true_norm"], rel=1e-5)
    assert results[0] == results[1]


@pytest.mark.parametrize(("stage", "device", "model"), [(2, "none", "tiny_model"), (3, "cpu", "untied_model")])
def test_log_probs_and_tied_export(
    two_ranks: RankPool, request: pytest.FixtureRequest, stage: int, device: str, model: str
) -> None:
    samples, folder = make_samples(5, seed=4), request.getfixturevalue(model)
    per_rank = [{"log_prob_samples": [samples, []]}, {"log_prob_samples": [samples[:2], samples[2:]]}]
    setup = config(stage, optimizer=device, param=device)
    results = two_ranks.run("train", per_rank, model_path=str(folder), steps=[], temperature=0.8, config=setup)
    rank_0, rank_1 = (r["outputs"] for r in results)
    assert rank_0[1].log_probs_K.shape == (0,)
    joined = torch.cat([o.log_probs_K for o in rank_1])
    torch.testing.assert_close(rank_0[0].log_probs_K, joined, rtol=1e-5, atol=1e-6)
    expected = dict(transformers.AutoModelForCausalLM.from_pretrained(folder).named_parameters())
    assert list(results[0]["weights"]) == list(expected)
    assert all(torch.equal(results[0]["weights"][name], parameter) for name, parameter in expected.items())
    assert results[1]["weights"] == {}


@pytest.mark.parametrize(("stage", "dtype"), [(1, "bfloat16"), (3, "float32")])
def test_checkpoint_continues_exactly(
    two_ranks: RankPool, tiny_model: Path, tmp_path: Path, stage: int, dtype: str
) -> None:
    steps = [[make_samples(2, seed=s)] for s in range(4)]
    options = {"schedule": "linear", "warmup_steps": 2, "total_steps": 6}
    common = {"model_path": str(tiny_model), "config": config(stage, dtype=dtype, optim=options)}
    whole = two_ranks.run("train", steps=steps, **common)[0]
    with used(two_ranks, *(["ZeRO stage in checkpoints of BF16_Optimizer"] if stage == 1 else [])):
        two_ranks.run("train", steps=steps[:2], save_to=str(tmp_path), **common)
    resumed = two_ranks.run("train", steps=steps[2:], load_from=str(tmp_path), **common)[0]
    assert resumed["stats"] == whole["stats"][2:]
    for name, weight in whole["weights"].items():
        assert torch.equal(resumed["weights"][name], weight), name
    assert [s.lr for s in whole["stats"]] == pytest.approx([1.5e-3, 3e-3, 3e-3, 2.25e-3])


@pytest.mark.parametrize(
    ("stage", "dtype", "options"),
    [
        (2, "float32", {"gradient_checkpointing": True}),
        (3, "float32", {"gradient_checkpointing": True, "checkpoint_to_cpu": True}),
        (2, "bfloat16", {"collective_guard": "watch"}),  # collectives overlap
        (3, "float32", {"collective_guard": "lockstep"}),
    ],
)
def test_recomputation_and_the_guard_change_nothing(
    two_ranks: RankPool, tiny_model: Path, stage: int, dtype: str, options: dict[str, Any]
) -> None:
    samples = make_samples(4, seed=4)
    per_rank = [{"steps": [[samples[:1], samples[1:2]]] * 2}, {"steps": [[samples[2:3], []]] * 2}]
    common = {"model_path": str(tiny_model)}
    without = config(stage, dtype=dtype)
    plain = two_ranks.run("train", per_rank, config=without, **common)[0]
    with used(two_ranks, *(["inputs of recomputed layers in CPU memory"] if "checkpoint_to_cpu" in options else [])):
        result = two_ranks.run("train", per_rank, config=replace(without, **options), **common)[0]
    assert all((stats.num_guarded_collectives > 0) == ("collective_guard" in options) for stats in result["stats"])
    assert [replace(stats, num_guarded_collectives=0) for stats in result["stats"]] == plain["stats"]
    assert all(torch.equal(result["weights"][n], w) for n, w in plain["weights"].items())


@pytest.mark.parametrize(("stage", "param"), [(2, "none"), (3, "cpu")])
def test_frozen_reference_model(two_ranks: RankPool, tiny_model: Path, stage: int, param: str) -> None:
    samples = make_samples(4, seed=5)
    wanted = config(stage, optimizer="cpu" if param == "cpu" else "none", param=param)
    common = {"model_path": str(tiny_model)}
    trained = two_ranks.run("train", steps=[], log_prob_samples=[samples], config=config(2), **common)[0]["outputs"][0]
    results = two_ranks.run("frozen_log_probs", samples=samples, config=wanted, **common)
    for outputs, refused, _ in results:
        torch.testing.assert_close(outputs.log_probs_K, trained.log_probs_K, rtol=1e-6, atol=1e-6)
        assert [text.split()[0] for text in refused] == ["train_mini_batch", "save_checkpoint", "load_checkpoint"]
        assert all("trainable=True" in text for text in refused)
    assert [num for _, _, num in results] == [24, 0]


def test_missing_checkpoint(two_ranks: RankPool, tiny_model: Path, tmp_path: Path) -> None:
    for error in two_ranks.run(
        "train", steps=[], load_from=str(tmp_path), model_path=str(tiny_model), config=config(2)
    ):
        assert isinstance(error, CheckpointError)
        assert (error.field, error.value) == ("tag", "tag")


@pytest.mark.parametrize("stage", [1, pytest.param(3, marks=pytest.mark.long)])
def test_bf16_gradient_against_fp32_sum(two_ranks: RankPool, tiny_model: Path, stage: int) -> None:
    """Many micro batches, bf16 model. Truth: each micro batch's own bf16 gradient, summed in fp32.

    Bound 2^-8: with fp32 accumulation no sum over micro batches rounds. What rounds is each gradient once on its way
    through the bf16 reduction (unit roundoff 2^-9, halves of which may add up over the two ranks' sum). Reducing in
    fp32 as well leaves only fp32 rounding.
    """
    micro = [[[s] for s in make_samples(6, seed=10 + rank)] for rank in range(2)]
    for fp32_reduce, bound in ((False, 2**-8), (True, 1e-5)):
        results = two_ranks.run(
            "gradient_error",
            [{"micro_batches": m} for m in micro],
            model_path=str(tiny_model),
            stage=stage,
            fp32_reduce=fp32_reduce,
        )
        assert results[0] < bound, (stage, fp32_reduce, results)


@pytest.mark.parametrize(
    ("stage", "num_ranks", "bucket_bytes", "fp32_reduce"),
    [
        *[(2, 2, 2048, False), (2, 2, 10_000, True), (2, 1, 10_000, False)],
        *[(3, 2, 10_000, True), (3, 1, 10_000, False)],
        pytest.param(3, 2, 10_000, False, marks=pytest.mark.thorough),
    ],
)
def test_gradient_sums_are_deepspeeds_to_the_last_bit(
    request: pytest.FixtureRequest, tiny_model: Path, stage: int, num_ranks: int, bucket_bytes: int, fp32_reduce: bool
) -> None:
    """Three micro batches, one of them empty on a rank, in buckets that hold all, some or less than one gradient. Stage
    3's sums take memory from the first gradient to the step alone."""
    pool: RankPool = request.getfixturevalue("two_ranks" if num_ranks == 2 else "one_rank")
    samples = make_samples(6, seed=8)
    per_rank = [{"micro_batches": [samples[:1], samples[1:3], samples[3:4]]}]
    per_rank += [{"micro_batches": [samples[4:], [], samples[:2]]}][: num_ranks - 1]
    zero = ZeroConfig(stage=stage, reduce_bucket_bytes=bucket_bytes, fp32_reduce=fp32_reduce)
    wanted = EngineConfig(zero=zero, optim=OptimConfig(weight_decay=0.1), dtype="bfloat16")
    common = {"model_path": str(tiny_model), "config": wanted}
    theirs = pool.run("fp32_sums", per_rank, ours=False, **common)
    readers = ("offload_states", "update_fp32_grad_for_param_vectorized")
    with used(pool, f"gradient accumulation of stage {stage}", but=readers):
        results = pool.run("fp32_sums", per_rank, ours=True, **common)
    for (sums, norm, held, after), (expected, expected_norm, always_held, _) in zip(results, theirs, strict=True):
        assert len(sums) == (2 if stage == 2 else 1)
        if stage == 3:
            assert held == [0, 4 * sums[0].numel(), 0]
            assert always_held == [held[1]] * 3
            assert after == 0.0
        assert norm == expected_norm > 0
        assert all(torch.equal(a, b) for a, b in zip(sums, expected, strict=True))


def test_stage_3_keeps_rotary_frequencies_in_fp32(two_ranks: RankPool, tiny_model: Path) -> None:
    """zero.Init would round them to bf16 and shift far positions; log-probs then differ between stages."""
    samples = make_samples(4, seed=12, longest=200)
    outputs = [
        two_ranks.run(
            "train",
            model_path=str(tiny_model),
            steps=[],
            log_prob_samples=[samples],
            config=config(stage, dtype="bfloat16"),
        )[0]["outputs"][0]
        for stage in (2, 3)
    ]
    assert torch.equal(outputs[0].log_probs_K, outputs[1].log_probs_K)


def test_offload_on_the_cpu(two_ranks: RankPool, tiny_model: Path) -> None:
    """Nothing moves, and what needs moved tensors is refused until they are back, as on a GPU."""
    results = two_ranks.run("offload_cycle", model_path=str(tiny_model), config=config(2))
    moved_bytes, refused, num_exported = results[0]
    assert moved_bytes == 0
    assert [text.split()[0] for text in refused] == [
        "log_probs",
        "train_mini_batch",
        "save_checkpoint",
        "load_checkpoint",
    ]
    assert all("call reload() first" in text for text in refused)
    assert num_exported > 0


@pytest.mark.parametrize(("stage", "dtype"), [(1, "bfloat16"), (3, "bfloat16")])
def test_training_goes_on_bit_for_bit_after_the_states_were_moved(
    two_ranks: RankPool, tiny_model: Path, stage: int, dtype: str
) -> None:
    case = config(stage, dtype=dtype)
    result = two_ranks.run("moved_states", model_path=str(tiny_model), config=case)[0]
    assert result["losses"] == result["expected"]
    assert result["same"]
    assert result["exported_during"]
    moved, back, moved_all = result["moved"]
    shard = result["numel"] // 2
    plan = estimate_memory(tiny_model, case, dp=2, tokens_per_micro_batch=64)
    # fp32 weights and two moments of a shard; at stage 1 in bf16 also the fp32 gradients of all parameters
    assert plan.optimizer.device + plan.lasting_gradients >= 12 * shard
    assert moved == back == pytest.approx(plan.optimizer.device + plan.lasting_gradients, rel=2e-3)
    assert (plan.lasting_gradients > 0) == ((stage, dtype) == (1, "bfloat16"))
    size = 2 if dtype == "bfloat16" else 4
    assert moved_all >= moved + size * (shard if stage == 3 else result["numel"])
