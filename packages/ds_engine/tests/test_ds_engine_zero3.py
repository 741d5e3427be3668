"""Stage 3 layer by layer: gathers, gradients and compiled layers are those of DeepSpeed module by module."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from math import prod
from pathlib import Path

import pytest
import torch
from ds_engine_testkit import EPS, LR, assert_equal, make_samples, reference_training, used, write_adapters
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from ds_engine import EngineConfig, LoraConfig, OffloadConfig, OptimConfig, ZeroConfig
from ds_engine.errors import ModelError
from ds_engine.zero.zero3_hooks import set_leaf_modules
from plinth_testing import RankPool, raises

pytestmark = pytest.mark.slow
STEPS = [make_samples(n, seed=s) for n, s in ((7, 1), (5, 2), (6, 3))]
CPU_ALL = OffloadConfig(optimizer="cpu", param="cpu")
CONFIG = EngineConfig(
    zero=ZeroConfig(stage=3, param_persistence_elements=0, reduce_bucket_bytes=30_000),
    optim=OptimConfig(lr=LR, eps=EPS),
    dtype="float32",
    compile=True,
)


EXAMPLES = settings(
    deadline=None,
    derandomize=True,
    max_examples=12,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
DTYPES = st.sampled_from([torch.float32, torch.bfloat16])
SHAPES = st.lists(st.integers(1, 9), min_size=1, max_size=3) | st.sampled_from([[64], [2, 64], [32, 8]])
GATHERED = st.lists(st.tuples(SHAPES, st.sampled_from([None, 0, 1]), st.booleans()), min_size=2, max_size=8)


@given(gathered=GATHERED, dtype=DTYPES)
@EXAMPLES
def test_batched_gathers_rebuild_every_parameter(
    two_ranks: RankPool, gathered: list[tuple[list[int], int | None, bool]], dtype: torch.dtype
) -> None:
    """Whatever their sizes, odd ones and single numbers too: by DeepSpeed's own collective. Only those share memory
    that go together, and each begins where kernels expect it."""
    sizes, layers, staying = (list(column) for column in zip(*gathered, strict=True))
    case = {"sizes": sizes, "layers": layers, "staying": staying, "dtype": dtype}
    for equal, upstream, ours, places in two_ranks.run("gathered_both_ways", **case):
        assert equal
        assert [(r.operation, r.dtype, r.num_elements) for r in ours] == [
            (r.operation, r.dtype, r.num_elements) for r in upstream
        ]
        assert len(ours) == 1
        assert all(offset % 128 == 0 for _, offset in places)
        going = ["stay" if stays else layer for layer, stays in zip(layers, staying, strict=True)]
        for (i, (storage, _)), (j, (other, _)) in combinations(enumerate(places), 2):
            if storage == other:
                assert going[i] == going[j] is not None
        if all(prod(size) % 64 == 0 for size in sizes):
            together = {go for go in going if go is not None}
            assert len({storage for storage, _ in places}) == len(together) + going.count(None)


@given(sizes=st.lists(st.integers(1, 40), min_size=1, max_size=6), dtype=DTYPES, travel=DTYPES)
@EXAMPLES
def test_shares_of_gradients_are_deepspeeds_to_the_last_bit(
    two_ranks: RankPool, sizes: list[int], dtype: torch.dtype, travel: torch.dtype
) -> None:
    assert all(two_ranks.run("scattered_both_ways", sizes=sizes, dtype=dtype, travel=travel))


@pytest.mark.parametrize(
    "lora",
    [None, pytest.param(LoraConfig(rank=2, target_modules=("q_proj",)), marks=pytest.mark.thorough)],
    ids=["whole", "adapters"],
)
def test_a_users_backward_hook_of_a_layer_runs(two_ranks: RankPool, tiny_model: Path, lora: LoraConfig | None) -> None:
    """And changes no result: a layer with such a hook keeps DeepSpeed's own hooks."""
    samples = make_samples(4, seed=7)
    per_rank = [{"micro_batches": [samples[rank : rank + 1], samples[rank + 2 : rank + 3]]} for rank in range(2)]
    config = replace(CONFIG, compile=False, lora=lora)
    common = {"model_path": str(tiny_model), "config": config}
    without = two_ranks.run("train_hooked", per_rank, hooked=False, **common)
    hooked = two_ranks.run("train_hooked", per_rank, hooked=True, **common)
    for (norm, weights, calls), (expected, expected_weights, none) in zip(hooked, without, strict=True):
        assert (calls, none) == (2, 0)
        assert norm == expected > 0
        assert all(torch.equal(weights[name], weight) for name, weight in expected_weights.items())


@pytest.mark.parametrize("persistent", [pytest.param(0, marks=pytest.mark.long), 600])
def test_fast_path_of_gathered_layers_changes_nothing(two_ranks: RankPool, tiny_model: Path, persistent: int) -> None:
    """Two micro batches per step, then log-probs: results, collectives and counts equal those of DeepSpeed's hooks."""
    zero = replace(CONFIG.zero, param_persistence_elements=persistent)
    per_rank = [{"steps": [[s[rank::4], s[rank + 2 :: 4]] for s in [*STEPS, *STEPS]]} for rank in range(2)]
    common = {"model_path": str(tiny_model), "config": replace(CONFIG, zero=zero, compile=False)}
    long = two_ranks.run("visited_both_ways", per_rank, short=False, **common)
    patches = ["gathers of stage 3", "layers of stage 3 as leaf modules", "hooks of stage 3's layers", "NVTX ranges"]
    patches += ["fetch and release of gathered layers"]
    with used(two_ranks, *patches, but=() if persistent else ("all_gather",)):
        short = two_ranks.run("visited_both_ways", per_rank, short=True, **common)
    for (stats, weights, collectives, looks, live), expected in zip(short, long, strict=True):
        assert stats == expected[0]
        assert all(torch.equal(weights[name], weight) for name, weight in expected[1].items())
        assert collectives == expected[2]
        assert live == expected[4]
        assert looks[-1] < expected[3][-1] / 2


@pytest.mark.thorough
@pytest.mark.parametrize("num_heads", [(4, 2), (2, 1)])
def test_all_to_alls_stay_in_the_graph(two_ranks: RankPool, num_heads: tuple[int, int]) -> None:
    for farthest, same, num_graphs in two_ranks.run("swapped_heads", num_heads=num_heads, lengths=[6, 10, 7]):
        assert farthest < 1e-6
        assert all(same)
        assert num_graphs == 1


@pytest.mark.thorough
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"zero": replace(CONFIG.zero, step_each_micro=True, offload=OffloadConfig(optimizer="cpu"))},
        {"zero": replace(CONFIG.zero, param_persistence_elements=600, offload=CPU_ALL), "gradient_checkpointing": True},
        {"sequence_parallel": 2},
    ],
    ids=["plain", "optimizer_on_cpu_each_micro", "all_on_cpu_recomputed", "sequence_parallel"],
)
def test_compiled_layers_train_as_one_fp32_process(two_ranks: RankPool, tiny_model: Path, changes: dict) -> None:
    config = replace(CONFIG, **changes)
    dp = 2 // config.sequence_parallel
    per_rank = [{"steps": [[s[rank % dp :: 2 * dp], s[rank % dp + dp :: 2 * dp]] for s in STEPS]} for rank in range(2)]
    results = two_ranks.run("train_traced", per_rank, model_path=str(tiny_model), config=config)
    assert all(num_graphs > 0 for _, num_graphs in results)
    assert_equal([result for result, _ in results], reference_training(tiny_model, STEPS))


@pytest.mark.thorough
def test_adapters_of_the_first_layer_are_trained(two_ranks: RankPool, tiny_model: Path, tmp_path: Path) -> None:
    """Its input comes from frozen embeddings, so the layer must request its gradient for its backward hook to run."""
    config = replace(CONFIG, lora=LoraConfig(rank=4))
    per_rank = [{"steps": [[s[rank::2]] for s in STEPS]} for rank in range(2)]
    options = {"model_path": str(tiny_model), "config": config, "samples": STEPS[0][:2]}
    start = two_ranks.run("train_traced", [{"steps": []}] * 2, **options)[0][0]
    folder = write_adapters(tmp_path / "adapters", start["settings"], start["adapters"])
    trained, num_graphs = two_ranks.run("train_traced", per_rank, **options)[0]
    assert num_graphs > 0
    assert_equal([trained], reference_training(tiny_model, STEPS, adapters=folder), key="adapters")


def test_weights_on_nvme_are_left_to_deepspeed() -> None:
    assert ZeroConfig(stage=3).gathers_layers
    assert ZeroConfig(stage=3, offload=CPU_ALL).gathers_layers
    assert not ZeroConfig(stage=2).gathers_layers
    nvme = OffloadConfig(optimizer="nvme", param="nvme", nvme_path="/tmp")
    assert not ZeroConfig(stage=3, offload=nvme).gathers_layers


def test_a_layer_asks_for_the_gradient_of_its_first_argument() -> None:
    from transformers.modeling_layers import GradientCheckpointingLayer

    class Layer(GradientCheckpointingLayer):
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.nn.Linear(2, 2)

        def forward(self, hidden: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
            self.seen = hidden.requires_grad
            return self.inner(hidden) * scale

    model = torch.nn.Sequential(Layer(), torch.nn.Linear(2, 2))
    set_leaf_modules(model)
    layer, hidden = model[0], torch.ones(1, 2)
    assert model[0]._z3_leaf
    assert not hasattr(model[1], "_z3_leaf")
    layer(hidden, scale=2.0)
    assert layer.seen
    assert not hidden.requires_grad
    with torch.no_grad():
        layer(hidden)
    assert not layer.seen
    layer.requires_grad_(False)(hidden)
    assert not layer.seen
    with raises(ModelError):
        layer(hidden=hidden)
