"""Optimizers by name: every entry builds its class, which has the states and the divisor that the entry says.

A new entry is tested here without a line of its own.
"""

from pathlib import Path

import pytest
import torch
from ds_engine_testkit import make_samples

from ds_engine import EngineConfig, EngineConfigError, OptimConfig, ZeroConfig, estimate_memory
from ds_engine.optimizers import OPTIMIZERS, Optimizer
from plinth_testing import RankPool, raises

SHAPE = {
    "model_type": "llama", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1,
    "num_attention_heads": 2,
}  # fmt: skip


def stepped(entry: Optimizer, scale: float | None) -> tuple[torch.Tensor, dict]:
    """(a weight after two steps with gradients that are `scale` times too large, its states)."""
    weight = torch.nn.Parameter(torch.linspace(-1, 1, 8))
    optimizer = entry.build([{"params": [weight], "weight_decay": 0.1}], 1e-2, OptimConfig())
    for gradient in (torch.linspace(-2, 3, 8), torch.linspace(1, -2, 8)):
        weight.grad = gradient * (scale or 1.0)
        if scale is not None:
            optimizer.grad_scale = torch.tensor(scale)
        optimizer.step()
    return weight.detach(), optimizer.state[weight]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_has_the_states_of_its_entry(name: str) -> None:
    entry = OPTIMIZERS[name]
    _, states = stepped(entry, None)
    tensors = {key: value for key, value in states.items() if key != "step"}
    assert {key: (value.shape, value.dtype) for key, value in tensors.items()} == dict.fromkeys(
        entry.states, ((8,), torch.float32)
    )
    config = EngineConfig(optim=OptimConfig(name=name))
    estimate = estimate_memory(SHAPE, config, tokens_per_micro_batch=8)
    assert estimate.optimizer.device == (4 + 4 * len(entry.states)) * estimate.num_trained


@pytest.mark.parametrize("name", [name for name, entry in OPTIMIZERS.items() if entry.divides_gradients])
def test_gradients_are_divided_by_the_scale(name: str) -> None:
    assert torch.equal(stepped(OPTIMIZERS[name], 4.0)[0], stepped(OPTIMIZERS[name], None)[0])


def test_an_unknown_optimizer_is_refused() -> None:
    with raises(EngineConfigError, field="name", value="adam", allowed=", ".join(OPTIMIZERS)):
        OptimConfig(name="adam")


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
def test_an_entry_alone_makes_an_optimizer(two_ranks: RankPool, tiny_model: Path, stage: int) -> None:
    """torch's SGD moves the weights by the learning rate times the clipped gradient, at every stage."""
    sgd = Optimizer(function="torch.optim:SGD", states=())
    config = EngineConfig(zero=ZeroConfig(stage=stage), optim=OptimConfig(lr=0.5, grad_clip=0.01), dtype="float32")
    steps = [[make_samples(2, seed=1)]]
    common = {"entry": sgd, "model_path": str(tiny_model), "config": config}
    before = two_ranks.run("train_with_another_optimizer", steps=[], **common)[0]["weights"]
    after = two_ranks.run("train_with_another_optimizer", steps=steps, **common)[0]
    assert after["stats"][0].grad_norm > 0.01
    moved = torch.stack([(after["weights"][name] - weight).norm() for name, weight in before.items()]).norm()
    assert float(moved) == pytest.approx(0.5 * 0.01, rel=1e-3)
