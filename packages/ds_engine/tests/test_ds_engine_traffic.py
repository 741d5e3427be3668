"""Bytes that ranks exchange, planned from a model's shape alone, against recorded collectives and closed forms."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from pathlib import Path

import pytest
from ds_engine_testkit import make_samples
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_engine import EngineConfig, LoraConfig, ModelShape, ZeroConfig
from ds_engine.planning.collective_plan import shard_elements
from ds_engine.planning.model_shape import read_shape
from ds_engine.planning.traffic import Traffic, exchanged_bytes, forward_traffic, model_hook_calls, update_traffic
from ds_engine.planning.transfer_plan import HookCall
from plinth_testing import RankPool

SHAPES = st.builds(
    ModelShape,
    vocab=st.sampled_from([64, 1000]),
    hidden=st.sampled_from([32, 64]),
    intermediate=st.sampled_from([48, 96]),
    num_layers=st.integers(1, 5),
    num_heads=st.just(8),
    num_kv_heads=st.sampled_from([1, 2, 4, 8]),
    head_dim=st.sampled_from([8, 16]),
    tied=st.booleans(),
    qkv_bias=st.booleans(),
    other_bias=st.booleans(),
    qk_norm=st.booleans(),
)
OPERATIONS = ("all_gather_into_tensor", "reduce_scatter_tensor")
LLAMA_70B = ModelShape(
    vocab=128_256, hidden=8192, intermediate=28_672, num_layers=80, num_heads=64, num_kv_heads=8, head_dim=128,
    tied=False, qkv_bias=False, other_bias=False, qk_norm=False,
)  # fmt: skip


def visits(calls: Iterable[HookCall], sizes: list[int]) -> list[tuple[str, int]]:
    """Kind and elements of each call; calls without parameters, which gather nothing, are left out."""
    filled = [(call.kind, sum(sizes[i] for i in call.parameters)) for call in calls if call.parameters]
    summed = []
    for kind, group in groupby(filled, key=lambda call: call[0]):
        elements = [size for _, size in group]
        summed += [(kind, sum(elements))] if kind == "gradient" else [(kind, size) for size in elements]
    return summed


@pytest.mark.slow
@pytest.mark.parametrize("recompute", [False, True])
def test_planned_traffic_of_a_model_is_what_its_engine_sends(
    two_ranks: RankPool, tiny_model: Path, recompute: bool
) -> None:
    """The order of the modules, and every byte of an update and of log-probs, from config.json alone."""
    config = EngineConfig(
        zero=ZeroConfig(stage=3, param_persistence_elements=100, reduce_bucket_bytes=10_000),
        gradient_checkpointing=recompute,
    )
    shape = read_shape(tiny_model)
    steps = [[make_samples(2, seed=4 * step + micro) for micro in range(3)] for step in range(2)]
    arguments = [{"steps": steps}] * 2
    recorded = two_ranks.run("recorded_zero3_run", arguments, model_path=str(tiny_model), config=config)
    logs, noted, sizes, groups, in_log_probs = recorded[0]
    planned_sizes, calls = model_hook_calls(shape, config)
    assert sorted(planned_sizes) == sorted(sizes)
    assert visits(calls * 3, planned_sizes) == visits(noted[1], sizes)
    planned_groups = config.optim.decay_groups(len(weight.shape) for weight in shape.weights())
    assert [len(group) for group in planned_groups.values()] == [len(group) for group in groups]
    micro, step = update_traffic(shape, config, world_size=2, num_micro_batches=3)
    sent = {name: sum(2 * (r.num_elements or 0) for r in logs[1] if r.operation == name) for name in OPERATIONS}
    assert (micro.all_gather + step.all_gather) == 2 * sent["all_gather_into_tensor"]
    assert (micro.reduce_scatter + step.reduce_scatter) == sent["reduce_scatter_tensor"]
    gathered = sum(2 * 2 * (r.num_elements or 0) for r in in_log_probs if r.operation == "all_gather_into_tensor")
    # A model this small stays gathered from one micro batch to the next.
    assert gathered == forward_traffic(shape, config, world_size=2).all_gather


@given(shape=SHAPES, world=st.integers(2, 9), num_micro=st.integers(1, 4), threshold=st.sampled_from([0, 100, 5000]))
@settings(deadline=None, derandomize=True)
def test_stage_3_gathers_once_or_twice_and_reduces_once(
    shape: ModelShape, world: int, num_micro: int, threshold: int
) -> None:
    config = EngineConfig(zero=ZeroConfig(stage=3, param_persistence_elements=threshold))
    micro, step = update_traffic(shape, config, world_size=world, num_micro_batches=num_micro)
    padded = [-(-weight.size // world) * world for weight in shape.weights()]
    moving = sum(p for p, w in zip(padded, shape.weights(), strict=True) if w.size > threshold)
    assert micro.reduce_scatter == 2 * num_micro * sum(padded)
    assert 2 * moving <= micro.all_gather <= 2 * 2 * num_micro * moving
    assert step == Traffic(all_gather=2 * (sum(padded) - moving))
    assert forward_traffic(shape, config, world_size=world).all_gather == 2 * moving


@given(shape=SHAPES, world=st.integers(2, 9), num_micro=st.integers(1, 4), stage=st.sampled_from([1, 2]))
@settings(deadline=None, derandomize=True)
def test_stages_1_and_2_reduce_gradients_and_gather_weights(
    shape: ModelShape, world: int, num_micro: int, stage: int
) -> None:
    config = EngineConfig(zero=ZeroConfig(stage=stage))  # type: ignore[arg-type]
    micro, step = update_traffic(shape, config, world_size=world, num_micro_batches=num_micro)
    size = sum(weight.size for weight in shape.weights())
    reduced = micro.all_reduce if stage == 2 else step.all_reduce
    assert reduced == 2 * size * (num_micro if stage == 2 else 1)
    assert step.all_gather == 2 * shard_elements(size, world) * world
    assert micro.all_gather == step.reduce_scatter == 0
    assert forward_traffic(shape, config, world_size=world) == Traffic()


def test_a_large_model_is_gathered_in_forward_and_backward() -> None:
    """All but the about 1e9 elements that DeepSpeed keeps between the two passes."""
    config = EngineConfig(zero=ZeroConfig(stage=3))
    micro, _ = update_traffic(LLAMA_70B, config, world_size=64, num_micro_batches=2)
    size = sum(weight.size for weight in LLAMA_70B.weights())
    assert micro.reduce_scatter == pytest.approx(2 * 2 * size, rel=1e-6)
    assert 2 * 2 * (2 * size - 3e9) < micro.all_gather < 2 * 2 * 2 * size


@given(shape=SHAPES, sp=st.sampled_from([1, 2, 4, 8]), tokens=st.integers(1, 5000))
@settings(deadline=None, derandomize=True)
def test_sequence_parallel_ranks_exchange_heads(shape: ModelShape, sp: int, tokens: int) -> None:
    sent = exchanged_bytes(shape, EngineConfig(sequence_parallel=sp), tokens=tokens)
    kv_width = max(shape.num_kv_heads, sp) * shape.head_dim  # copies, where there are fewer heads than ranks
    per_token = 2 * (2 * shape.query_width + 2 * kv_width) * shape.num_layers
    assert sent == -(-tokens // sp) * per_token * (sp - 1) // sp


def test_one_rank_sends_nothing_and_unknown_models_are_refused() -> None:
    config = EngineConfig(zero=ZeroConfig(stage=3))
    assert update_traffic(LLAMA_70B, config, world_size=1, num_micro_batches=2) == (Traffic(), Traffic())
    assert forward_traffic(LLAMA_70B, config, world_size=1) == Traffic()
    with pytest.raises(ValueError, match="lora is set"):
        update_traffic(LLAMA_70B, EngineConfig(lora=LoraConfig()), world_size=2, num_micro_batches=1)
    counted = ModelShape(**{**vars(LLAMA_70B), "counted": tuple(LLAMA_70B.weights())})
    with pytest.raises(ValueError, match="llama, mistral, qwen2, qwen3"):
        update_traffic(counted, config, world_size=2, num_micro_batches=1)
