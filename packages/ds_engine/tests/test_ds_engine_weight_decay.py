"""Weight decay on matrices only: two parameter groups through every stage, a checkpoint in between."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from ds_engine_testkit import assert_equal, config, distance, make_samples, reference_training

from ds_engine import EngineConfig, LoraConfig, OptimConfig
from ds_engine.model.loading import load_model
from ds_engine.model.lora import add_adapters
from ds_engine.zero.optimizer import parameter_groups
from plinth_testing import RankPool, write_tiny_model

DECAY = 0.3
STEPS = [make_samples(n, seed=s) for n, s in ((7, 1), (5, 2), (6, 3))]


@pytest.fixture(scope="module")
def biased_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with norms and nonzero biases."""
    folder = write_tiny_model(tmp_path_factory.mktemp("biased_model"), "qwen2")
    model = load_model(str(folder), EngineConfig(dtype="float32"), device=torch.device("cpu"), ds_config={})
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.linspace(-0.5, 0.5, parameter.numel()))
    model.save_pretrained(folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "optimizer"), [(2, "cpu"), (3, "none")])
def test_three_steps_with_a_resume_equal_one_process(
    two_ranks: RankPool, biased_model: Path, tmp_path: Path, stage: int, optimizer: str
) -> None:
    """Without clipping; other tests clip."""
    optim = {"weight_decay": DECAY, "grad_clip": None}
    expected = reference_training(biased_model, STEPS, **optim)
    ranks = [[[samples[rank::4], samples[rank + 2 :: 4]] for samples in STEPS] for rank in range(2)]
    common = {"model_path": str(biased_model), "config": config(stage, optimizer=optimizer, optim=optim)}
    first = two_ranks.run("train", [{"steps": steps[:2]} for steps in ranks], save_to=str(tmp_path), **common)[0]
    last = two_ranks.run("train", [{"steps": steps[2:]} for steps in ranks], load_from=str(tmp_path), **common)[0]
    assert_equal([{"stats": [*first["stats"], *last["stats"]], "weights": last["weights"]}], expected)
    # Decay is of a size these bounds would show: without it the matrices end elsewhere.
    plain, _, _ = reference_training(biased_model, STEPS, grad_clip=None)
    name = "model.layers.0.mlp.up_proj.weight"
    assert distance(expected[0][name], plain[name]) > 1e-3


def test_norms_and_biases_do_not_decay(biased_model: Path) -> None:
    def sizes(**optim: object) -> list[tuple[float, int, set[int]]]:
        groups = parameter_groups(model, OptimConfig(**optim))
        return [(g["weight_decay"], len(g["params"]), {p.dim() for p in g["params"]}) for g in groups]

    model = load_model(str(biased_model), EngineConfig(dtype="float32"), device=torch.device("cpu"), ds_config={})
    num = len(list(model.parameters()))
    num_1d = sum(p.dim() == 1 for p in model.parameters())
    assert num_1d == 2 * (2 + 3) + 1  # two norms and three biases a layer, and the last norm
    assert sizes() == [(0.0, num, {1, 2})]
    assert sizes(weight_decay=0.1, decay_1d=True) == [(0.1, num, {1, 2})]
    assert sizes(weight_decay=0.1) == [(0.1, num - num_1d, {2}), (0.0, num_1d, {1})]
    # Adapters are matrices throughout: no empty group, which DeepSpeed could not shard.
    add_adapters(model, LoraConfig(rank=2), head="lm", seed=0)
    assert sizes(weight_decay=0.1) == [(0.1, 2 * 2 * 7, {2})]
