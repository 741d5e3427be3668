"""Recurrent layers on packed rows: each sequence is computed as if it were alone, or the model is not packed."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from ds_engine_architectures import HYBRIDS, MORE_HYBRIDS, PACKED, tiny_architecture, write_architecture
from ds_engine_testkit import make_batch, make_samples, token_loss
from hypothesis import given, settings
from hypothesis import strategies as st
from test_ds_engine_models import assert_step_equals_transformers
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

import ds_engine.model.recurrence as recurrence
import ds_engine.model.trial as trial
from ds_engine import EngineConfig, EngineConfigError, LoraConfig, ModelError, ZeroConfig, check_model, dense_log_prob
from ds_engine.model.attention import packed_layout
from ds_engine.model.loading import load_model, prepare_model
from ds_engine.model.packed_model import packed_inputs
from plinth_testing import RankPool, raises

CPU = torch.device("cpu")
FP32 = EngineConfig(dtype="float32")
SAMPLES = make_samples(4, seed=5, longest=20)
DELTA = {"use_qk_l2norm_in_kernel": True, "initial_state": None, "output_final_state": False}


def tensors(name: str, num: int) -> tuple[list[torch.Tensor], int, dict[str, Any]]:
    """(tensors of `num` tokens, dimension of the tokens, other arguments) of a function of a modeling file."""
    draw = torch.Generator().manual_seed(num)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=draw, dtype=torch.float64)

    heads, size = 2, 4
    if name == "causal_conv1d_fn":
        weight = torch.linspace(-1, 1, 12, dtype=torch.float64).view(3, 4)
        return [random(1, 3, num)], 2, {"weight": weight, "bias": weight[:, 0], "activation": "silu"}
    if name == "mamba2_chunk_scan":
        A, one = -torch.tensor([0.3, 1.1]), torch.ones(2)
        options = {"A": A, "chunk_size": 8, "D": one, "dt_bias": one, "dt_softplus": True, "dt_limit": (0.0, 9.0)}
        x, dt, B, C = random(1, num, heads, size), random(1, num, heads), random(1, num, 1, 5), random(1, num, 1, 5)
        return [x, dt, B, C], 1, options
    if name == "mamba_selective_scan":
        options = {"A": -torch.ones(3, 5).double(), "D": torch.ones(3).double(), "delta_softplus": True}
        return (
            [random(1, 3, num), random(1, 3, num), random(1, 5, num), random(1, 5, num), random(1, 3, num)],
            2,
            options,
        )
    q, k, v, beta = (random(1, num, heads, size) for _ in range(4))
    decay = -torch.rand((1, num, heads, size), generator=draw).double()
    decay = decay if name == "chunk_kimi_delta_attention" else decay[..., 0]
    return [q, k, v, decay, beta[..., 0].sigmoid()], 1, DELTA


NAMES = {
    "causal_conv1d_fn": "",
    "torch_chunk_gated_delta_rule": "query key value g beta",
    "chunk_kimi_delta_attention": "query key value g beta",
    "mamba2_chunk_scan": "hidden_states dt B C",
    "mamba_selective_scan": "hidden_states dt B C z",
}
FAMILIES = dict(zip(NAMES, ("lfm2", "qwen3_next", "kimi_linear", "mamba2", "mamba"), strict=True))


def call(function: Any, name: str, values: list[torch.Tensor], options: dict[str, Any]) -> torch.Tensor:
    """As the layers do: the tokens by position, gates by name."""
    options = dict(options)
    if name == "causal_conv1d_fn":
        out = function(values[0], options.pop("weight"), options.pop("bias"), **options)
    elif name.startswith("mamba"):
        x, dt, B, C, *z = values
        out = function(x, dt, options.pop("A"), B, C, **options, **({"z": z[0]} if z else {}))
    else:
        q, k, v, g, beta = values
        out = function(q, k, v, g=g, beta=beta, **options)
    return out[0] if isinstance(out, tuple) else out


def upstream(name: str) -> Any:
    return getattr(import_module(f"transformers.models.{FAMILIES[name]}.modeling_{FAMILIES[name]}"), name)


def assert_equal_to_each_alone(name: str, lengths: list[int]) -> None:
    """Outputs and gradients of one row of random tensors."""
    values, dim, options = tensors(name, sum(lengths))
    values = [value.requires_grad_() for value in values]
    borders = recurrence._Borders()
    borders.set(packed_layout(lengths, device=CPU, kernel="sdpa"))
    ours_fn = partial(recurrence._FUNCTIONS[name], upstream(name), borders, torch.nn.Identity())
    ours = call(ours_fn, name, values, options)
    parts = zip(*(value.split(lengths, dim) for value in values), strict=True)
    alone = torch.cat([call(upstream(name), name, list(part), options) for part in parts], dim)
    torch.testing.assert_close(ours, alone, rtol=1e-5, atol=1e-5, check_dtype=False)  # Mamba-2's is fp32
    weights = torch.linspace(-1, 2, alone.numel(), dtype=alone.dtype).view_as(alone)
    gradients = [torch.autograd.grad((out * weights).sum(), values, retain_graph=True) for out in (ours, alone)]
    for ours_grad, alone_grad in zip(*gradients, strict=True):
        torch.testing.assert_close(ours_grad, alone_grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=8)
@given(lengths=st.lists(st.integers(1, 19), min_size=1, max_size=5))
def test_functions_begin_anew_at_each_border(name: str, lengths: list[int]) -> None:
    assert_equal_to_each_alone(name, lengths)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "mamba_selective_scan"])
def test_kernels_get_what_they_compute(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """In place of the kernels: the same computation in torch, for each sequence between two borders."""

    def per_sequence(compute: Any) -> Any:
        def kernel(*args: Any, cu_seqlens: torch.Tensor, cu_seqlens_cpu: torch.Tensor, **kwargs: Any) -> Any:
            assert cu_seqlens.dtype == cu_seqlens_cpu.dtype == torch.int64
            spans = list(zip(cu_seqlens_cpu.tolist(), cu_seqlens_cpu.tolist()[1:], strict=False))

            def part(value: Any, span: tuple[int, int]) -> Any:
                is_row = isinstance(value, torch.Tensor) and value.ndim > 2
                return value[:, span[0] : span[1]] if is_row else value

            outs = [
                compute(*(part(a, span) for a in args), **{k: part(v, span) for k, v in kwargs.items()})
                for span in spans
            ]
            return torch.cat(outs, dim=1), None

        return kernel

    def convolve(x: torch.Tensor, weight: Any, bias: Any, **options: Any) -> torch.Tensor:
        out: torch.Tensor = upstream("causal_conv1d_fn")(x.transpose(1, 2), weight, bias, **options)
        return out.transpose(1, 2)

    def linear_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, g: torch.Tensor, scale: float) -> Any:
        state, outs = torch.zeros(q.shape[2], q.shape[3], v.shape[3], dtype=q.dtype), []
        for t in range(q.shape[1]):
            state = state * g[0, t].exp()[:, None, None] + torch.einsum("hk,hv->hkv", k[0, t], v[0, t])
            outs.append(scale * torch.einsum("hk,hkv->hv", q[0, t], state))
        return torch.stack(outs).unsqueeze(0)

    delta, kimi, *_ = map(upstream, ("torch_chunk_gated_delta_rule", "chunk_kimi_delta_attention", *NAMES))  # imported
    fakes = {
        "fla.modules.causal_conv1d": {"causal_conv1d": convolve},
        "fla.ops.gated_delta_rule": {"chunk_gated_delta_rule": lambda *a, **k: delta(*a, **k)[0]},
        "fla.ops.kda": {"chunk_kda": lambda *a, **k: kimi(*a, **k)[0]},
        "fla.ops.simple_gla": {"chunk_simple_gla": linear_attention},
    }
    for module, functions in fakes.items():
        fake: Any = SimpleNamespace(**{key: per_sequence(value) for key, value in functions.items()})
        monkeypatch.setitem(sys.modules, module, fake)
    for parent in ("fla", "fla.ops", "fla.modules"):
        monkeypatch.setitem(sys.modules, parent, ModuleType(parent))
    monkeypatch.setattr(recurrence, "_uses_kernels", lambda tokens: True)
    assert_equal_to_each_alone(name, [7, 1, 12])


def prepared(folder: Path, config: EngineConfig) -> Any:
    model: Any = load_model(str(folder), config, device=CPU, ds_config={}).train()
    prepare_model(model, config, log_prob_fn=dense_log_prob, device=CPU, kernel="sdpa", trainable=True, head="lm")
    return model


def gradients(model: Any, parts: list[list[Any]]) -> dict[str, torch.Tensor]:
    """Summed over micro batches."""
    model.zero_grad()
    for part in parts:
        batch = make_batch(part)
        rows_RK = model(packed=packed_inputs(batch, device=CPU, kernel="sdpa")[0])
        token_loss(rows_RK[0], rows_RK[1], batch.columns["weights"]).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


EVERY = sorted({*PACKED, *HYBRIDS, *MORE_HYBRIDS} - {"deepseek_v3", "gpt2", "qwen3_next"})
"""Families whose linear layers can all be adapted: no experts among them, and some."""


@pytest.mark.parametrize(
    ("way", "names"),
    [
        ("lora", ("qwen3_5_text", "jamba")),
        pytest.param("lora", EVERY, marks=pytest.mark.thorough, id="lora of every family"),
        ("recomputed", ("qwen3_5_text", "mamba2", "nemotron_h")),
        ("tiled", ("qwen3_5_text",)),
        pytest.param("compiled", ("qwen3_5_text", "mamba2", "nemotron_h"), marks=pytest.mark.thorough),
    ],
)
def test_packed_gradients_are_the_sum_of_those_of_each_sequence(tmp_path: Path, way: str, names: list[str]) -> None:
    settings = {
        "lora": {"lora": LoraConfig(rank=4)},
        "recomputed": {"gradient_checkpointing": True},
        "tiled": {"gradient_checkpointing": True, "tiled_mlp": 4},
        "compiled": {"compile": True},
    }[way]
    for name in names:
        folder = write_architecture(tmp_path / name, name, (PACKED | HYBRIDS).get(name, {}))
        model = prepared(folder, replace(FP32, **settings))
        if way == "lora":
            for parameter in (p for n, p in model.named_parameters() if "lora_B" in n):
                torch.nn.init.normal_(parameter, std=0.3)
        together = gradients(model, [SAMPLES])
        assert together.keys() == {key for key, parameter in model.named_parameters() if parameter.requires_grad}, name
        for key, expected in gradients(model, [[sample] for sample in SAMPLES]).items():
            difference = float((together[key] - expected).abs().max())
            assert difference <= 1e-4 * float(expected.abs().max()), (name, key)


def test_layers_that_share_a_weight_are_not_adapted(tmp_path: Path) -> None:
    fields = tiny_architecture("zamba2", {}).to_dict() | {"num_hidden_layers": 4, "num_mem_blocks": 1}
    del fields["hybrid_layer_ids"]
    config = CONFIG_MAPPING["zamba2"](**fields | {"layers_block_type": ["hybrid", "linear_attention"] * 2})
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    model = prepared(tmp_path, replace(FP32, lora=LoraConfig(rank=2)))
    adapted = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert adapted
    assert not any("shared_transformer" in name for name in adapted)
    with raises(ModelError, field="lora.target_modules", value=["q_proj"]):
        prepared(tmp_path, replace(FP32, lora=LoraConfig(rank=2, target_modules=("q_proj",))))


def test_fp32_residuals_reach_a_bf16_head(tmp_path: Path) -> None:
    name = "mamba2"
    model = prepared(write_architecture(tmp_path, name, HYBRIDS[name]), replace(FP32, dtype="bfloat16"))
    assert model.config.residual_in_fp32
    assert all(gradient.dtype == torch.bfloat16 for gradient in gradients(model, [SAMPLES]).values())


def test_check_model_says_packed_by_which_code_and_refuses_sequence_parallelism(tmp_path: Path) -> None:
    folder = str(write_architecture(tmp_path, "olmo_hybrid", HYBRIDS["olmo_hybrid"]))
    result = check_model(folder, replace(FP32, compile=True))
    assert result.way == "packed"
    assert result.recurrent.startswith("OlmoHybridGatedDeltaNet by torch")
    assert result.recurrent in str(result)
    with raises(EngineConfigError, field="sequence_parallel", value=2, allowed="1"):
        check_model(folder, replace(FP32, sequence_parallel=2))


def test_a_layer_that_still_leaks_is_not_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its scan knows the borders, its convolution does not."""
    monkeypatch.delitem(recurrence._FUNCTIONS, "causal_conv1d_fn")
    result = trial.try_model(tiny_architecture("qwen3_5_text", {**HYBRIDS["qwen3_5_text"], "vocab_size": 65}))
    assert (result.way, result.recurrent) == ("rows", "")
    assert "its log-probs differ by" in result.why_not_packed


def test_kernels_are_tried_where_they_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy on the CPU, which has no kernels, says nothing about them."""
    config = tiny_architecture("mamba2", {**HYBRIDS["mamba2"], "vocab_size": 66})
    on_cpu = trial.try_model(config)
    devices = []

    def try_once(config: Any, head: Any, device: torch.device) -> trial.Trial:
        devices.append(device.type)
        return on_cpu

    monkeypatch.setattr(trial, "_try_once", try_once)
    trial.try_model(config, device=torch.device("cuda"))
    monkeypatch.setattr(trial, "has_kernels", lambda: True)
    trial.try_model(config, device=torch.device("cuda"))
    trial.try_model(config)
    assert devices == ["cpu", "cpu", "cuda", "cpu"]


@pytest.mark.gpu
@pytest.mark.skipif(not (torch.cuda.is_available() and recurrence.has_kernels()), reason="needs CUDA and fla-core")
@pytest.mark.parametrize("name", ["qwen3_5_text", "kimi_linear", "mamba2"])
def test_kernels_equal_each_sequence_alone_on_a_gpu(name: str) -> None:
    result = trial.try_model(CONFIG_MAPPING[name](), device=torch.device("cuda"))
    assert result.way == "packed", str(result)
    assert result.recurrent.endswith("by flash-linear-attention")


def test_layers_of_an_untested_transformers_are_not_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(recurrence.FENCE.tested, "transformers", ">=9")
    assert trial.try_model(tiny_architecture("mamba2", {**HYBRIDS["mamba2"], "vocab_size": 65})).way == "rows"


def test_a_row_that_is_not_the_one_of_the_borders_is_refused(tmp_path: Path) -> None:
    """Such as one that is computed again after another one."""
    model = prepared(write_architecture(tmp_path, "lfm2", HYBRIDS["lfm2"]), replace(FP32, gradient_checkpointing=True))
    first, second = (packed_inputs(make_batch(part), device=CPU, kernel="sdpa")[0] for part in (SAMPLES, SAMPLES[1:]))
    loss = model(packed=first).sum()
    model(packed=second)
    with pytest.raises(ModelError):
        loss.backward()


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, pytest.param(2, marks=pytest.mark.long), 3])
def test_a_step_of_hybrids_on_two_ranks_equals_transformers(two_ranks: RankPool, tmp_path: Path, stage: int) -> None:
    """With recomputation, and different numbers of sequences on the ranks."""
    folders = {
        name: write_architecture(tmp_path / name, name, HYBRIDS[name]) for name in ("qwen3_next", "mamba2", "lfm2")
    }
    zero = ZeroConfig(stage=stage, param_persistence_elements=0)
    assert_step_equals_transformers(two_ranks, folders, zero=zero, gradient_checkpointing=True)
