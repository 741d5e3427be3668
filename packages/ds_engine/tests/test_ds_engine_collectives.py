"""The collectives of a step depend on the configuration and the number of micro batches, never on a rank's data."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from ds_engine_testkit import make_samples
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st

from ds_engine import EngineConfig, OffloadConfig, OptimConfig, ZeroConfig
from ds_engine.guard.collective_log import CollectiveRecord
from plinth_testing import RankPool

NUM_STEPS = 4
"""DeepSpeed records its trace of stage 3 in the first step and compares it between ranks until the second."""


def per_rank_steps(num_micro: int, seed: int) -> list[dict]:
    """Steps of different data; rank 1 has half the samples, so some of its micro batches are empty.

    Losses are small enough that nothing overflows at fp16's initial scale, so every step is applied.
    """
    ranks = []
    for rank in range(2):
        steps = []
        for step in range(NUM_STEPS):
            num_samples = num_micro + 1 if rank == 0 else (num_micro + 1) // 2
            samples = make_samples(num_samples, seed=seed + 10 * step + rank)
            samples = [replace(sample, weight=sample.weight / 32) for sample in samples]
            steps.append([samples[m::num_micro] for m in range(num_micro)])
        ranks.append({"steps": steps})
    return ranks


def issued(records: list[CollectiveRecord]) -> list[tuple[str, str, int]]:
    """All but the size of the pickled metrics, which is that of their text."""
    *calls, metrics = [(r.operation, r.dtype, r.num_elements) for r in records]
    return [*calls, (*metrics[:2], 0)]


@pytest.mark.slow
@given(
    stage=st.sampled_from([1, 2, 3]),
    dtype=st.sampled_from(["float32", "bfloat16", "float16"]),
    fp32_accum=st.booleans(),
    fp32_reduce=st.booleans(),
    offload=st.sampled_from(["none", "cpu"]),
    persistence=st.sampled_from([0, 32, 600]),
    bucket_bytes=st.sampled_from([2048, 10_000, 40_000, 1 << 20]),
    weight_decay=st.sampled_from([0.0, 0.1]),
    num_micro=st.integers(1, 3),
    seed=st.integers(0, 1000),
)
@example(
    stage=2, dtype="bfloat16", fp32_accum=True, fp32_reduce=False, offload="none", persistence=0, bucket_bytes=2048,
    weight_decay=0.1, num_micro=2, seed=7,
)  # fmt: skip
@example(
    stage=3, dtype="bfloat16", fp32_accum=True, fp32_reduce=True, offload="none", persistence=32, bucket_bytes=10_000,
    weight_decay=0.0, num_micro=2, seed=3,
)  # fmt: skip
@settings(
    deadline=None,
    derandomize=True,
    max_examples=4,
    phases=[Phase.explicit, Phase.generate],  # to shrink an example takes seconds of real processes every time
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_collectives_depend_on_no_data(
    two_ranks: RankPool,
    tiny_model: Path,
    stage,
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
    """Both ranks issue the same in every step, the last two steps the same, and every gradient is reduced."""
    zero = ZeroConfig(
        stage=stage,
        offload=OffloadConfig(optimizer=offload),
        fp32_grad_accum=fp32_accum,
        fp32_reduce=fp32_reduce,
        reduce_bucket_bytes=bucket_bytes,
        param_persistence_elements=persistence,
    )
    config = EngineConfig(zero=zero, optim=OptimConfig(weight_decay=weight_decay), dtype=dtype)
    ranks = per_rank_steps(num_micro, seed)
    (first, sizes), (second, _) = two_ranks.run("recorded_steps", ranks, model_path=str(tiny_model), config=config)
    for here, there in zip(first, second, strict=True):
        assert issued(here) == issued(there)
    assert issued(first[-1]) == issued(first[-2])
    reduction = "reduce_scatter_tensor" if stage == 3 else "all_reduce"
    reduced = [r.num_elements for r in first[-1] if r.operation == reduction and r.num_elements > 1]
    padded = sum(size + size % 2 for size in sizes) if stage == 3 else sum(sizes)
    assert sum(reduced) == padded * (1 if stage == 1 else num_micro)
