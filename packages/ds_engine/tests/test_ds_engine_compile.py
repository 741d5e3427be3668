"""Compiled layers compute the same: graphs, their backward passes and recompilation, without the C++ compiler."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._functorch.config
import torch._inductor.config
from ds_engine_testkit import make_batch, make_samples
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch._dynamo.backends.common import aot_autograd

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
from ds_engine.model.attention import packed_layout
from ds_engine.model.compilation import FUNCTORCH_CONFIG, compile_layers
from ds_engine.model.loading import load_model
from ds_engine.model.packed_model import install_packed_forward, packed_inputs
from plinth_testing import RankPool, raises, write_tiny_model

CPU = torch.device("cpu")


AHEAD = {
    "stage 2": EngineConfig(zero=ZeroConfig(stage=2), dtype="bfloat16"),
    "stage 1, recomputed": EngineConfig(zero=ZeroConfig(stage=1), dtype="float32", gradient_checkpointing=True),
    "stage 3": EngineConfig(zero=ZeroConfig(stage=3), dtype="float32"),
    "lora": EngineConfig(zero=ZeroConfig(stage=2), dtype="float32", lora=LoraConfig(rank=2, dropout=0.5)),
}


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.parametrize("case", AHEAD)
def test_compiling_ahead_changes_nothing_and_leaves_nothing_to_compile(
    two_ranks: RankPool, tiny_model: Path, case: str
) -> None:
    """Weights, log-probs and norms to the last bit, with dropout too, which draws random numbers."""
    config = replace(AHEAD[case], compile=True, optim=OptimConfig(lr=3e-3))
    steps = [make_samples(n, seed=s) for n, s in ((7, 1), (5, 2))]
    per_rank: list[dict[str, Any]] = [{"steps": [[s[r::4], s[r + 2 :: 4]] for s in steps]} for r in range(2)]
    for rank, given in enumerate(per_rank):
        seen = steps[0][rank::2]
        given |= {"log_prob_samples": [seen]} if config.lora is None else {"samples": seen}
    options = {"model_path": str(tiny_model), "config": config}
    plain, num_plain = two_ranks.run("train_traced", per_rank, **options)[0]
    ahead, num_graphs, num_ahead = two_ranks.run("train_compiled_ahead", per_rank, **options)[0]
    assert [s.loss for s in ahead["stats"]] == [s.loss for s in plain["stats"]]
    assert [s.grad_norm for s in ahead["stats"]] == [s.grad_norm for s in plain["stats"]]
    for name in plain.get("weights", plain.get("adapters")):
        parts = (result.get("weights", result.get("adapters"))[name] for result in (ahead, plain))
        assert torch.equal(*parts), name
    if config.zero.stage == 3 or config.lora is not None:  # gradients; the base without adapters
        assert 0 < num_ahead < num_graphs
    else:
        assert num_graphs == num_ahead >= num_plain


def test_compiled_layers_save_fewer_activations(tmp_path: Path) -> None:
    """Of what a layer's graph hands to its backward pass, cut as inductor has it cut; gradients are as ever."""
    model = load_model(str(write_tiny_model(tmp_path)), EngineConfig(dtype="float32"), device=CPU, ds_config={})
    tokens, hidden, inner = 24, model.config.hidden_size, model.config.intermediate_size
    x = torch.randn(1, tokens, hidden, requires_grad=True)
    rotary = model.model.rotary_emb(x, torch.arange(tokens)[None])
    packing = packed_layout([tokens], device=CPU, kernel="sdpa")

    def results(settings: dict[str, Any]) -> tuple[list[torch.Tensor], int]:
        kept: list[int] = []

        def partition(*args: Any, **kwargs: Any) -> Any:
            with torch._functorch.config.patch(settings):
                graphs = min_cut_rematerialization_partition(*args, **kwargs)
            values = [node.meta["val"] for node in graphs[0].graph.output_node().args[0] if hasattr(node, "meta")]
            kept.append(sum(v.numel() for v in values if isinstance(v, torch.Tensor) and tokens in v.shape))
            return graphs

        torch._dynamo.reset()
        backend = aot_autograd(fw_compiler=lambda graph, _: make_boxed_func(graph.forward), partition_fn=partition)
        layer = torch.compile(model.model.layers[0], backend=backend, fullgraph=True)
        out = layer(x, position_embeddings=rotary, packing=packing)
        return [out, *torch.autograd.grad(out.sin().sum(), [x, *model.model.layers[0].parameters()])], kept[0]

    (usual, num_usual), (less, num_less) = results({}), results(FUNCTORCH_CONFIG)
    assert num_usual - num_less == tokens * (inner + 2 * hidden)
    for ours, expected in zip(less, usual, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-6)


def test_compiled_layers_use_torchs_linear(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed's replacement of it is restored afterwards."""
    model = load_model(str(write_tiny_model(tmp_path)), EngineConfig(dtype="float32"), device=CPU, ds_config={})
    seen, during = [], []

    def look(graph: torch.fx.GraphModule, _: object) -> object:
        during.append(torch.nn.functional.linear)
        seen.extend(node.target for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    def linear(*args: torch.Tensor) -> torch.Tensor:
        return torch._C._nn.linear(*args).clone()

    monkeypatch.setattr(torch.nn.functional, "linear", linear)
    compile_layers(model, device_type="cpu", kernel="sdpa", stage=3, backend=look)
    install_packed_forward(model, dense_log_prob)
    model(packed=packed_inputs(make_batch(make_samples(2, seed=0)), device=CPU, kernel="sdpa")[0])
    assert torch._C._nn.linear in seen
    assert set(during) == {torch._C._nn.linear}  # not a wrapper, whose identity would change with every call
    assert not any("clone" in str(target) for target in seen)
    assert torch.nn.functional.linear is linear


def test_compile_workers_are_not_ended_while_they_are_idle(tmp_path: Path) -> None:
    """A kernel that is compiled while they end may wait forever (from Python 3.12 on)."""
    model = load_model(str(write_tiny_model(tmp_path)), EngineConfig(dtype="float32"), device=CPU, ds_config={})
    with torch._inductor.config.patch(quiesce_async_compile_pool=True):
        compile_layers(model, device_type="cpu", kernel="sdpa", backend="eager")
        assert torch._inductor.config.quiesce_async_compile_pool is False


def test_models_that_cannot_be_compiled_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    on_nvme = OffloadConfig(optimizer="nvme", param="nvme", nvme_path="/tmp")
    with raises(EngineConfigError, field="compile", value=True):
        EngineConfig(zero=ZeroConfig(stage=3, offload=on_nvme), compile=True)
    with raises(ModelError):
        compile_layers(torch.nn.Linear(1, 1), device_type="cuda", kernel="varlen")
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with raises(EngineConfigError, field="compile"):
        compile_layers(torch.nn.Linear(1, 1), device_type="cpu", kernel="sdpa")
