"""Optimizers by name: every entry builds its class, which has the states and the divisor that the entry says.

A new entry is tested here without a line of its own.
"""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ds_engine_testkit import make_samples

from ds_engine import EngineConfig, EngineConfigError, OffloadConfig, OptimConfig, ZeroConfig, estimate_memory
from ds_engine.optimizers import OPTIMIZERS, Optimizer
from plinth_testing import RankPool, raises

SHAPE = {
    "model_type": "llama", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1,
    "num_attention_heads": 2,
}  # fmt: skip
OWN = "package.module:Class"


def stepped(entry: Optimizer, scale: float | None) -> tuple[torch.Tensor, dict]:
    """(a weight after two steps with gradients that are `scale` times too large, its states)."""
    weight = torch.nn.Parameter(torch.linspace(-1, 1, 8))
    settings = SimpleNamespace(betas=(0.9, 0.999), eps=1e-8, options=dict.fromkeys(entry.needs_option.values(), 0.9))
    optimizer = entry.build([{"params": [weight], "weight_decay": 0.1}], 1e-2, settings)
    for gradient in (torch.linspace(-2, 3, 8), torch.linspace(1, -2, 8)):
        weight.grad = gradient * (scale or 1.0)
        if scale is not None:
            optimizer.grad_scale = torch.tensor(scale)
        optimizer.step()
    return weight.detach(), optimizer.state[weight]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_has_the_states_of_its_entry(name: str) -> None:
    entry = OPTIMIZERS[name]
    if entry.package:
        pytest.importorskip(entry.package)
    _, states = stepped(entry, None)
    tensors = {key: value for key, value in states.items() if key != "step"}
    assert {key: (value.shape, value.dtype) for key, value in tensors.items()} == dict.fromkeys(
        entry.states, ((8,), torch.float32)
    )
    if not entry.matrix_states:
        config = EngineConfig(optim=OptimConfig(name=name, options=dict.fromkeys(entry.needs_option.values(), 0.9)))
        estimate = estimate_memory(SHAPE, config, tokens_per_micro_batch=8)
        per_element = 4 + (entry.state_bytes or 4 * len(entry.states))
        assert estimate.optimizer.device == math.ceil(per_element * estimate.num_trained)


@pytest.mark.parametrize("name", [name for name, entry in OPTIMIZERS.items() if entry.divides_gradients])
def test_gradients_are_divided_by_the_scale(name: str) -> None:
    assert torch.equal(stepped(OPTIMIZERS[name], 4.0)[0], stepped(OPTIMIZERS[name], None)[0])


def test_an_unknown_optimizer_is_refused() -> None:
    with raises(EngineConfigError, field="name", value="adam", allowed=f"{', '.join(OPTIMIZERS)}, or {OWN}"):
        OptimConfig(name="adam")


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"name": "no_such_package.optim:Lion"}, "name"),
        ({"name": "torch.optim:NoSuchClass"}, "name"),
        ({"name": "torch.optim:Adafactor"}, "name"),  # divides by the norm of the whole parameter
        ({"name": "torch.optim:LBFGS"}, "name"),  # its step needs a closure
        ({"name": "torch.optim:RAdam", "options": {"momentum": 0.9}}, "options"),
        ({"name": "torch.optim:RMSprop", "betas": (0.9, 0.95)}, "betas"),
        ({"name": "torch.optim:Rprop", "weight_decay": 0.1}, "weight_decay"),
        ({"name": "torch.optim:RAdam", "lr": None}, "lr"),
        ({"name": "sgd", "lr": None}, "lr"),
        ({"name": "muon", "lr": None, "options": {"adjust_lr_fn": "original"}}, "lr"),
        ({"name": "sgd", "options": {"beta": 0.9}}, "options.beta"),
        ({"name": "sgd", "options": {"nesterov": True}}, "options"),  # without momentum
        ({"name": "muon", "options": {"adjust_lr_fn": "none"}}, "options"),
        ({"name": "muon", "options": {"ns_steps": 2.5}}, "options"),
    ],
)
def test_an_optimizer_that_would_train_on_something_else_is_refused(settings: dict[str, Any], field: str) -> None:
    with raises(EngineConfigError, field=field):
        OptimConfig(**settings)


def test_your_own_class_gets_given_settings_and_keeps_its_defaults() -> None:
    assert OptimConfig(name="torch.optim:RAdam").optimizer.settings == ()
    optim = OptimConfig(name="torch.optim:RAdam", betas=(0.5, 0.9))
    optimizer = optim.optimizer.build([torch.nn.Parameter(torch.zeros(2))], 1e-3, optim)
    assert optimizer.defaults["betas"] == (0.5, 0.9)


def test_a_missing_package_is_named_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ds_engine.config.find_spec", lambda _: None)
    with raises(EngineConfigError, field="name", remedy="pip install bitsandbytes"):
        OptimConfig(name="adam8bit")


@pytest.mark.parametrize(
    ("name", "states", "unportable"),
    [
        ("torch.optim:RAdam", {"exp_avg", "exp_avg_sq"}, ""),
        ("torch.optim:RMSprop", {"square_avg"}, ""),
        ("torch.optim:NAdam", {"exp_avg", "exp_avg_sq"}, "it keeps mu_product"),
    ],
)
def test_states_of_your_own_class_are_those_that_it_makes(name: str, states: set[str], unportable: str) -> None:
    optim = OptimConfig(name=name, options={"weight_decay": 0.1})
    assert set(optim.optimizer.states_of(optim.options)) == states
    assert optim.optimizer.unportable.startswith(unportable)
    assert bool(optim.optimizer.unportable) == bool(unportable)
    estimate = estimate_memory(SHAPE, EngineConfig(optim=optim), tokens_per_micro_batch=8)
    assert estimate.optimizer.device == (4 + 4 * len(states)) * estimate.num_trained


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "name"), [(1, "sgd"), (2, "torch.optim:SGD"), (3, "sgd")])
def test_an_entry_alone_makes_an_optimizer(two_ranks: RankPool, tiny_model: Path, stage: int, name: str) -> None:
    """torch's SGD moves the weights by the learning rate times the clipped gradient, at every stage."""
    optim = OptimConfig(name=name, lr=0.5, grad_clip=0.01)
    config = EngineConfig(zero=ZeroConfig(stage=stage), optim=optim, dtype="float32")
    steps = [[make_samples(2, seed=1)]]
    common = {"model_path": str(tiny_model), "config": config}
    before = two_ranks.run("train", steps=[], **common)[0]["weights"]
    after = two_ranks.run("train", steps=steps, **common)[0]
    assert after["stats"][0].grad_norm > 0.01
    moved = torch.stack([(after["weights"][name] - weight).norm() for name, weight in before.items()]).norm()
    assert float(moved) == pytest.approx(0.5 * 0.01, rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["adam8bit", "torch.optim:NAdam"])
def test_unportable_states_resume_on_the_same_ranks_and_are_refused_by_others(
    two_ranks: RankPool, untied_model: Path, tmp_path: Path, name: str
) -> None:
    if package := OPTIMIZERS[name].package if name in OPTIMIZERS else "":
        pytest.importorskip(package)
    optim = OptimConfig(name=name, lr=1e-3, weight_decay=0.1)
    zeros = (ZeroConfig(stage=2), ZeroConfig(stage=3, offload=OffloadConfig(optimizer="cpu")))
    setups = [EngineConfig(zero=zero, optim=optim) for zero in zeros]
    steps = [[make_samples(4, seed=seed)] for seed in range(3)]
    for setup in setups:
        common = {"model_path": str(untied_model), "config": setup}
        folder = str(tmp_path / f"{setup.zero.stage}")
        whole = two_ranks.run("train", steps=steps, **common)[0]
        two_ranks.run("train", steps=steps[:2], save_to=folder, **common)
        resumed = two_ranks.run("train", steps=steps[2:], load_from=folder, **common)[0]
        assert resumed["stats"] == whole["stats"][2:]
        assert all(torch.equal(resumed["weights"][key], weight) for key, weight in whole["weights"].items())
        assert whole["stats"][0].step_applied
    for result in two_ranks.run("refuse_state", model_path=str(untied_model), config=setups[0]):
        assert result["error"].field == "optim.name"
        assert result["unchanged"]
