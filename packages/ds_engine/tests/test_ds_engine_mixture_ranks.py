"""Mixtures on two real ranks whose tokens use other experts: results are those of one process, and nobody waits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from ds_engine_testkit import EPS, LR, VOCAB, Sample, assert_equal, make_samples, reference_training

from ds_engine import EngineConfig, OptimConfig, ZeroConfig
from plinth_testing import RankPool, random_model, tiny_config

pytestmark = pytest.mark.slow
NUM_EXPERTS = 8
CONFIG = EngineConfig(
    zero=ZeroConfig(stage=3, param_persistence_elements=0, reduce_bucket_bytes=30_000),
    optim=OptimConfig(lr=LR, eps=EPS),
    dtype="float32",
    collective_guard="lockstep",
)


def half(sample: Sample, rank: int) -> Sample:
    """The sample with tokens of one half of the vocabulary."""
    return replace(sample, ids=[token % (VOCAB // 2) + rank * VOCAB // 2 for token in sample.ids])


STEPS = [[[half(s, rank) for s in make_samples(4, seed=2 * seed + rank)] for rank in range(2)] for seed in range(3)]
"""By step and rank."""
ALL = [[*first, *second] for first, second in STEPS]


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first number of a hidden state tells the half of the vocabulary, and the router reads it alone."""
    folder = tmp_path_factory.mktemp("mixture")
    sizes = {"vocab_size": VOCAB, "num_experts": NUM_EXPERTS, "moe_intermediate_size": 16}
    model = random_model(tiny_config("qwen3_moe", **sizes))
    with torch.no_grad():
        side_V = torch.where(torch.arange(VOCAB) < VOCAB // 2, -1.0, 1.0)
        model.model.embed_tokens.weight[:, 0] = 5 * side_V
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight[0] = 0
            layer.mlp.experts.down_proj[:, 0] = 0
            layer.mlp.gate.weight[:, 0] = 5 * side_V[:: VOCAB // NUM_EXPERTS]
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def reference(mixture: Path) -> tuple[dict[str, torch.Tensor], list[float], list[float]]:
    weights, losses, norms = reference_training(mixture, ALL)
    return dict(in_folder(weights)), losses, norms


def in_folder(weights: dict[str, torch.Tensor]) -> Any:
    """The weights under the names of the model folder, where each expert has its own."""
    for name, weight in weights.items():
        if "experts" not in name:
            yield name, weight
            continue
        for number, expert in enumerate(weight):
            prefix = f"{name.rpartition('.')[0]}.{number}"
            parts = {"gate_proj": expert.chunk(2)[0], "up_proj": expert.chunk(2)[1]}
            parts = {"down_proj": expert} if name.endswith("down_proj") else parts
            yield from ((f"{prefix}.{part}.weight", value) for part, value in parts.items())


def test_ranks_use_other_experts(mixture: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(mixture)
    used: list[set[int]] = []
    for layer in model.model.layers:
        layer.mlp.gate.register_forward_hook(lambda _, __, outputs: used[-1].update(outputs[2].flatten().tolist()))
    for rank in range(2):
        used.append(set())
        for step in STEPS:
            for sample in step[rank]:
                model(input_ids=torch.tensor([sample.ids]))
    assert used == [{*range(NUM_EXPERTS // 2)}, {*range(NUM_EXPERTS // 2, NUM_EXPERTS)}]


@pytest.mark.parametrize(
    ("stage", "experts"),
    [(1, "grouped"), pytest.param(2, "grouped", marks=pytest.mark.long), (3, "grouped"), (3, "loop"), (3, "listed")],
)
def test_training_equals_one_process(
    two_ranks: RankPool, mixture: Path, reference: Any, stage: Any, experts: Any
) -> None:
    """Two micro batches of two sequences a rank; every collective is compared before it runs. "listed": a ModuleList of
    experts, of which a rank runs only its own, and gathers all."""
    per_rank = [{"steps": [[step[rank][:2], step[rank][2:]] for step in STEPS]} for rank in range(2)]
    listed = experts == "listed"
    config = replace(CONFIG, zero=replace(CONFIG.zero, stage=stage), experts="auto" if listed else experts)
    function = "train_listed_experts" if listed else "train"
    results = two_ranks.run(function, per_rank, model_path=str(mixture), config=config)
    assert_equal(results, reference)
    assert results[0]["weights"].keys() == reference[0].keys()
    assert all(s.num_guarded_collectives > 0 for result in results for s in result["stats"])
