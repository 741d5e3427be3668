"""Compiled layers compute the same. The C++ compiler takes minutes of a small machine, so that test is asked for by
PLINTH_TEST_COMPILE=1; the rest of the way (graphs, their backward passes, recompilation) is tested always."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from ds_engine_testkit import RankPool, make_batch, make_samples, write_tiny_model

from ds_engine import (
    EngineConfig,
    EngineConfigError,
    LoraConfig,
    ModelError,
    OffloadConfig,
    OptimConfig,
    ZeroConfig,
    dense_log_prob,
)
from ds_engine.checkpointing import enable_checkpointing
from ds_engine.compilation import compile_layers
from ds_engine.loading import load_model
from ds_engine.lora import add_adapters
from ds_engine.packed_model import install_packed_forward, packed_inputs

CPU = torch.device("cpu")


def run(folder: Path, *, compiled: bool) -> tuple[list[torch.Tensor], int]:
    """(outputs and gradients of four batches of any lengths, one of them empty; graphs compiled), with LoRA."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = load_model(str(folder), EngineConfig(dtype="fp32"), device=CPU, ds_config={})
    add_adapters(model, LoraConfig(rank=4), head="lm", seed=3)
    enable_checkpointing(model)
    if compiled:
        compile_layers(model, device_type="cpu", kernel="sdpa", backend="aot_eager")
    install_packed_forward(model, dense_log_prob)
    model.train()
    results = []
    for seed in range(4):
        batch = make_batch(make_samples(3 + seed, seed=seed) if seed != 2 else [])
        output = model(packed=packed_inputs(batch, device=CPU, kernel="sdpa")[0])
        output.square().sum().backward()
        results.append(output.detach())
    results += [p.grad for p in model.parameters() if p.requires_grad]
    return results, int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


@pytest.mark.slow
@pytest.mark.thorough
def test_compiled_graphs_compute_the_same(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path, layers=3)
    plain, _ = run(folder, compiled=False)
    compiled, num_graphs = run(folder, compiled=True)
    for a, b in zip(compiled, plain, strict=True):
        assert float((a - b).norm()) <= 1e-5 * float(b.norm())
    # Attention and its layer, each cut in two by the kernel, for many tokens and for one: however many layers.
    assert num_graphs == 8


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.skipif(not os.environ.get("PLINTH_TEST_COMPILE"), reason="minutes of a C++ compiler")
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_compiled_engine_takes_the_same_steps(two_ranks: RankPool, tiny_model: Path, stage: int) -> None:
    config = EngineConfig(zero=ZeroConfig(stage=stage), optim=OptimConfig(lr=3e-3, eps=1e-4), dtype="fp32")
    steps = [make_samples(n, seed=s) for n, s in ((7, 1), (5, 2))]
    per_rank = [{"steps": [[s[rank::4], s[rank + 2 :: 4]] for s in steps]} for rank in range(2)]
    two_ranks.timeout_s = 400
    plain, compiled = (
        two_ranks.run("train", per_rank, model_path=str(tiny_model), config=replace(config, compile=c))[0]
        for c in (False, True)
    )
    assert [s.loss for s in compiled["stats"]] == pytest.approx([s.loss for s in plain["stats"]], rel=1e-5)
    assert [s.grad_norm for s in compiled["stats"]] == pytest.approx([s.grad_norm for s in plain["stats"]], rel=1e-5)
    for name, weight in plain["weights"].items():
        assert float((compiled["weights"][name] - weight).norm() / weight.norm()) < 1e-5, name


@pytest.mark.parametrize("stage", [2, 3])
def test_compiled_layers_see_torchs_own_linear(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: int) -> None:
    """Whatever DeepSpeed has put in its place, and that is back in its place afterwards."""
    model = load_model(str(write_tiny_model(tmp_path)), EngineConfig(dtype="fp32"), device=CPU, ds_config={})
    seen = []

    def look(graph: torch.fx.GraphModule, _: object) -> object:
        seen.extend(node.target for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    def linear(*args: torch.Tensor) -> torch.Tensor:
        return torch._C._nn.linear(*args).clone()

    monkeypatch.setattr(torch.nn.functional, "linear", linear)
    compile_layers(model, device_type="cpu", kernel="sdpa", stage=stage, backend=look)
    install_packed_forward(model, dense_log_prob)
    model(packed=packed_inputs(make_batch(make_samples(2, seed=0)), device=CPU, kernel="sdpa")[0])
    assert torch._C._nn.linear in seen
    assert not any("clone" in str(target) for target in seen)
    assert torch.nn.functional.linear is linear


def test_what_cannot_be_compiled_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    on_nvme = OffloadConfig(optimizer="nvme", param="nvme", nvme_path="/tmp")
    with pytest.raises(ValueError, match="compile=True is not allowed: weights on NVMe"):
        EngineConfig(zero=ZeroConfig(stage=3, offload=on_nvme), compile=True)
    with pytest.raises(ModelError, match="no transformer layers"):
        compile_layers(torch.nn.Linear(1, 1), device_type="cuda", kernel="varlen")
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(EngineConfigError, match=r"needs a C\+\+ compiler"):
        compile_layers(torch.nn.Linear(1, 1), device_type="cpu", kernel="sdpa")
