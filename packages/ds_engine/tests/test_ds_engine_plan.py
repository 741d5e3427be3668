"""What ranks issue is a function of the configuration and the number of micro batches, never of their data."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from ds_engine_testkit import make_samples
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st

from ds_engine import EngineConfig, EngineConfigError, OffloadConfig, OptimConfig, ZeroConfig
from ds_engine.guard.collective_log import CollectiveRecord
from ds_engine.planning.collective_plan import PlannedCollective, planned_step, planned_zero3_steps
from ds_engine.planning.transfer_plan import HookCall, planned_transfers
from plinth_testing import RankPool, raises

SLOW = settings(
    deadline=None,
    derandomize=True,
    max_examples=12,
    phases=[Phase.explicit, Phase.generate],  # to shrink an example takes seconds of real processes every time
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


def per_rank_steps(num_micro: int, seed: int) -> list[dict]:
    """Two steps of different data; rank 1 has half the samples, so some of its micro batches are empty."""
    ranks = []
    for rank in range(2):
        steps = []
        for step in range(2):
            samples = make_samples(num_micro + 1 if rank == 0 else (num_micro + 1) // 2, seed=seed + 10 * step + rank)
            steps.append([samples[m::num_micro] for m in range(num_micro)])
        ranks.append({"steps": steps})
    return ranks


def check_issued(records: list[CollectiveRecord], plan: list[PlannedCollective]) -> None:
    issued = [
        (r.operation, r.dtype, None if p.num_elements is None else r.num_elements)
        for r, p in zip(records, plan, strict=False)
    ]
    assert issued == [(p.operation, p.dtype, p.num_elements) for p in plan][: len(issued)]
    assert len(records) == len(plan), (records[len(plan) :], plan[len(records) :])


@pytest.mark.slow
@given(
    stage=st.sampled_from([1, 2]),
    dtype=st.sampled_from(["float32", "bfloat16"]),
    fp32_accum=st.booleans(),
    fp32_reduce=st.booleans(),
    offload=st.sampled_from(["none", "cpu"]),
    bucket_bytes=st.sampled_from([2048, 10_000, 40_000, 1 << 20]),
    weight_decay=st.sampled_from([0.0, 0.1]),
    num_micro=st.integers(1, 3),
    seed=st.integers(0, 1000),
)
@example(
    stage=2, dtype="bfloat16", fp32_accum=True, fp32_reduce=False, offload="none", bucket_bytes=2048, weight_decay=0.1,
    num_micro=2, seed=7,
)  # fmt: skip
@SLOW
def test_plan_equals_record(
    two_ranks: RankPool,
    tiny_model: Path,
    stage,
    dtype,
    fp32_accum,
    fp32_reduce,
    offload,
    bucket_bytes,
    weight_decay,
    num_micro,
    seed,
) -> None:
    zero = ZeroConfig(
        stage=stage,
        offload=OffloadConfig(optimizer=offload),
        fp32_grad_accum=fp32_accum,
        fp32_reduce=fp32_reduce,
        reduce_bucket_bytes=bucket_bytes,
    )
    config = EngineConfig(zero=zero, optim=OptimConfig(weight_decay=weight_decay), dtype=dtype)
    check_plan(two_ranks, tiny_model, config, per_rank_steps(num_micro, seed))


def check_plan(two_ranks: RankPool, model: Path, config: EngineConfig, ranks: list[dict]) -> None:
    """Stages 1 and 2, with the same number of micro batches in every step."""
    num_micro = len(ranks[0]["steps"][0])
    results = two_ranks.run("recorded_steps", ranks, model_path=str(model), config=config)
    _, sizes, ready, groups = results[0]
    assert len(groups) == (2 if config.optim.weight_decay else 1)
    plan = planned_step(
        config, parameter_sizes=sizes, ready_order=ready, world_size=2, num_micro_batches=num_micro, groups=groups
    )
    for logs, *_ in results:
        for records in logs:
            check_issued(records, plan)


@pytest.mark.slow
@given(
    dtype=st.sampled_from(["float32", "bfloat16"]),
    fp32_accum=st.booleans(),
    fp32_reduce=st.booleans(),
    offload=st.sampled_from([("none", "none"), ("cpu", "none"), ("cpu", "cpu")]),
    persistence=st.sampled_from([0, 32, 600, 1_000_000]),
    bucket_bytes=st.sampled_from([4000, 10_000, 40_000, 1 << 20]),
    weight_decay=st.sampled_from([0.0, 0.1]),
    num_micro=st.lists(st.integers(1, 3), min_size=2, max_size=4),
    seed=st.integers(0, 1000),
)
@settings(SLOW, max_examples=8)
def test_stage_3_plan_equals_record(
    two_ranks: RankPool,
    tiny_model: Path,
    dtype,
    fp32_accum,
    fp32_reduce,
    offload,
    persistence,
    bucket_bytes,
    weight_decay,
    num_micro,
    seed,
) -> None:
    """From the first step of a run, with any number of micro batches per step, on both ranks."""
    zero = ZeroConfig(
        stage=3,
        offload=OffloadConfig(optimizer=offload[0], param=offload[1]),
        fp32_grad_accum=fp32_accum,
        fp32_reduce=fp32_reduce,
        reduce_bucket_bytes=bucket_bytes,
        param_persistence_elements=persistence,
    )
    config = EngineConfig(zero=zero, optim=OptimConfig(weight_decay=weight_decay), dtype=dtype)
    ranks = [
        {"steps": [per_rank_steps(count, seed + i)[r]["steps"][0] for i, count in enumerate(num_micro)]} for r in (0, 1)
    ]
    check_stage_3_plan(two_ranks, tiny_model, config, ranks)


def check_stage_3_plan(two_ranks: RankPool, model: Path, config: EngineConfig, ranks: list[dict]) -> None:
    num_micro = [len(micro_batches) for micro_batches in ranks[0]["steps"]]
    results = two_ranks.run("recorded_zero3_steps", ranks, model_path=str(model), config=config)
    _, hook_calls, sizes, groups = results[0]
    one = hook_calls[0][: len(hook_calls[0]) // num_micro[0]]
    for _, noted, *_ in results:
        assert noted == [one * count for count in num_micro], "what runs when is no matter of data"
    plans = planned_zero3_steps(
        config, hook_calls=one, parameter_sizes=sizes, world_size=2, num_micro_batches=num_micro, groups=groups
    )
    for logs, *_ in results:
        for records, plan in zip(logs, plans, strict=True):
            check_issued(records, plan)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("offload", ["none", "cpu"])
def test_plan_in_fp16_equals_record(two_ranks: RankPool, tiny_model: Path, stage: int, offload: str) -> None:
    """Losses are small enough that nothing overflows at fp16's initial scale, so every step is applied."""
    ranks = [
        {"steps": [[[replace(s, weight=s.weight / 32) for s in m] for m in step] for step in rank["steps"]]}
        for rank in per_rank_steps(2, 0)
    ]
    zero = ZeroConfig(stage=stage, offload=OffloadConfig(optimizer=offload), param_persistence_elements=0)
    config = EngineConfig(zero=zero, optim=OptimConfig(weight_decay=0.1), dtype="float16")
    (check_stage_3_plan if stage == 3 else check_plan)(two_ranks, tiny_model, config, ranks)


def test_unplannable_configurations_are_refused() -> None:
    with raises(EngineConfigError, field="zero.stage", value=3):
        planned_step(
            EngineConfig(zero=ZeroConfig(stage=3)),
            parameter_sizes=[1],
            ready_order=[0],
            world_size=2,
            num_micro_batches=1,
        )
    with raises(EngineConfigError, field="world_size", value=1):
        planned_step(EngineConfig(), parameter_sizes=[1], ready_order=[0], world_size=1, num_micro_batches=1)


@given(
    sizes=st.lists(st.integers(1, 500), min_size=1, max_size=20), bucket=st.integers(256, 2000), world=st.integers(2, 5)
)
@settings(deadline=None, derandomize=True)
def test_every_gradient_is_reduced_once_a_micro_batch(sizes, bucket, world) -> None:
    config = EngineConfig(zero=ZeroConfig(stage=2, reduce_bucket_bytes=4 * bucket), dtype="float32")
    plan = planned_step(
        config, parameter_sizes=sizes, ready_order=range(len(sizes))[::-1], world_size=world, num_micro_batches=3
    )
    reduced = [p.num_elements for p in plan if p.operation == "all_reduce"][:-1]  # the last is the norm
    assert sum(reduced) == 3 * sum(sizes)
    (shard,) = [p.num_elements for p in plan if p.operation == "all_gather_into_tensor"]
    assert shard * world >= sum(sizes) > (shard - 2) * world


@given(
    layers=st.lists(st.lists(st.integers(1, 500), min_size=0, max_size=3), min_size=1, max_size=12),
    bucket=st.integers(1, 2000),
    max_reuse_distance=st.sampled_from([0, 300, 10**9]),
    threshold=st.integers(0, 300),
    num_micro=st.lists(st.integers(1, 3), min_size=1, max_size=3),
)
@settings(deadline=None, derandomize=True)
def test_stage_3_gathers_what_is_needed_once_and_reduces_all(
    layers, bucket, max_reuse_distance, threshold, num_micro
) -> None:
    """Layers run forward, then backward: each finds its parameters, and nothing gathered is gathered again."""
    sizes = [size for layer in layers for size in layer]
    starts = [sum(map(len, layers[:number])) for number in range(len(layers))]
    own = [tuple(range(start, start + len(layer))) for start, layer in zip(starts, layers, strict=True)]
    hook_calls = []
    for number in range(len(layers)):
        hook_calls += [HookCall(kind=kind, submodule=number, parameters=own[number]) for kind in ("fetch", "release")]
    for number in reversed(range(len(layers))):
        hook_calls.append(HookCall(kind="fetch", submodule=number, parameters=own[number]))
        hook_calls += [HookCall(kind="gradient", parameters=(index,)) for index in reversed(own[number])]
        hook_calls.append(HookCall(kind="release", submodule=number, parameters=own[number]))
    persistent = frozenset(index for index, size in enumerate(sizes) if size <= threshold)
    steps = planned_transfers(
        hook_calls,
        sizes,
        persistent=persistent,
        bucket=bucket,
        num_micro_batches=num_micro,
        max_reuse_distance=max_reuse_distance,
    )
    assert [len(step) for step in steps] == num_micro
    for transfers in (transfers for step in steps for transfers in step):
        reduced = [index for transfer in transfers if transfer.kind == "reduce" for index in transfer.parameters]
        assert sorted(reduced) == list(range(len(sizes)))
        gathers = [transfer.parameters for transfer in transfers if transfer.kind == "gather"]
        assert all(len(set(parameters)) == len(parameters) > 0 for parameters in gathers)
        assert max(Counter(index for parameters in gathers for index in parameters).values(), default=0) <= 2
    for step in steps[1:]:  # small ones stay from the end of one step to the first micro batch of the next
        assert not persistent & {i for transfer in step[0] if transfer.kind == "gather" for i in transfer.parameters}
