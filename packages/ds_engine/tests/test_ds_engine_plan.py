"""What ranks issue is a function of the configuration and the number of micro batches, never of their data."""

from __future__ import annotations

from pathlib import Path

import pytest
from ds_engine_testkit import RankPool, make_samples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ds_engine import EngineConfig, OffloadConfig, OptimConfig, ZeroConfig
from ds_engine.collective_plan import planned_step

SLOW = settings(
    deadline=None, derandomize=True, max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture]
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


@pytest.mark.slow
@given(
    stage=st.sampled_from([1, 2]),
    dtype=st.sampled_from(["fp32", "bf16"]),
    fp32_accum=st.booleans(),
    fp32_reduce=st.booleans(),
    offload=st.sampled_from(["none", "cpu"]),
    bucket_bytes=st.sampled_from([2048, 10_000, 40_000, 1 << 20]),
    weight_decay=st.sampled_from([0.0, 0.1]),
    num_micro=st.integers(1, 3),
    seed=st.integers(0, 1000),
)
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
    results = two_ranks.run(
        "recorded_steps", per_rank_steps(num_micro, seed), model_path=str(tiny_model), config=config
    )
    _, sizes, ready, groups = results[0]
    assert len(groups) == (2 if weight_decay else 1)
    plan = planned_step(
        config, parameter_sizes=sizes, ready_order=ready, world_size=2, num_micro_batches=num_micro, groups=groups
    )
    for logs, *_ in results:
        for records in logs:
            issued = [
                (r.operation, r.dtype, None if p.num_elements is None else r.num_elements)
                for r, p in zip(records, plan, strict=False)
            ]
            assert issued == [(p.operation, p.dtype, p.num_elements) for p in plan]
            assert len(records) == len(plan), records[len(plan) :]


@pytest.mark.slow
@pytest.mark.parametrize("persistence", [0, 1_000_000])
def test_stage_3_issues_the_same_on_all_ranks_and_steps(
    two_ranks: RankPool, tiny_model: Path, persistence: int
) -> None:
    config = EngineConfig(zero=ZeroConfig(stage=3, param_persistence_elements=persistence), dtype="fp32")
    ranks = [
        {"steps": a["steps"] + b["steps"]} for a, b in zip(per_rank_steps(3, 1), per_rank_steps(3, 2), strict=True)
    ]
    results = two_ranks.run("recorded_steps", ranks, model_path=str(tiny_model), config=config)
    signatures = [[[r.signature for r in records] for records in logs] for logs, *_ in results]
    assert signatures[0] == signatures[1]
    assert signatures[0][1] == signatures[0][2] == signatures[0][3]  # the first also takes the trace


def test_what_cannot_be_planned_is_refused() -> None:
    with pytest.raises(ValueError, match="stage 3"):
        planned_step(
            EngineConfig(zero=ZeroConfig(stage=3)),
            parameter_sizes=[1],
            ready_order=[0],
            world_size=2,
            num_micro_batches=1,
        )
    with pytest.raises(ValueError, match="world_size=1"):
        planned_step(EngineConfig(), parameter_sizes=[1], ready_order=[0], world_size=1, num_micro_batches=1)


@given(
    sizes=st.lists(st.integers(1, 500), min_size=1, max_size=20), bucket=st.integers(256, 2000), world=st.integers(2, 5)
)
@settings(deadline=None, derandomize=True)
def test_every_gradient_is_reduced_once_a_micro_batch(sizes, bucket, world) -> None:
    config = EngineConfig(zero=ZeroConfig(stage=2, reduce_bucket_bytes=4 * bucket), dtype="fp32")
    plan = planned_step(
        config, parameter_sizes=sizes, ready_order=range(len(sizes))[::-1], world_size=world, num_micro_batches=3
    )
    reduced = [p.num_elements for p in plan if p.operation == "all_reduce"][:-1]  # the last is the norm
    assert sum(reduced) == 3 * sum(sizes)
    (shard,) = [p.num_elements for p in plan if p.operation == "all_gather_into_tensor"]
    assert shard * world >= sum(sizes) > (shard - 2) * world
