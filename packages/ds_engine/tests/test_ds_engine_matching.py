"""match_servers: outputs are those of the given operations, gradients those of the usual forward pass."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ds_engine_testkit import make_batch, make_samples, token_loss
from torch import Tensor

from ds_engine import EngineConfig, EngineConfigError, LoraConfig, ModelError, dense_log_prob
from ds_engine.batch import Prefixes
from ds_engine.model.attention import ATTENTION_NAME, packed_layout, register_packed_attention
from ds_engine.model.experts import use_experts
from ds_engine.model.loading import check_model, load_model, prepare_model
from ds_engine.model.matching import MatchedAttention
from ds_engine.model.packed_model import packed_inputs
from plinth_testing import raises, run_under_the_interpreter, write_tiny_model

CPU = torch.device("cpu")
OPERATIONS = ("linear", "rms_norm", "silu_and_mul", "rotate", "rotary_table", "attention")
MIXTURE = ("route", "grouped_linear", "collect")


@dataclass
class CountedOperations:
    """The operations in plain torch, with the number of calls of each; `shift` is added to every norm."""

    shift: float = 0.0
    calls: dict[str, int] = field(default_factory=lambda: dict.fromkeys(OPERATIONS + MIXTURE, 0))

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        self.calls["linear"] += 1
        return F.linear(x, weight, bias)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        self.calls["rms_norm"] += 1
        wide = x.float()
        return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype) + self.shift

    def silu_and_mul(self, gate: Tensor, up: Tensor) -> Tensor:
        self.calls["silu_and_mul"] += 1
        return F.silu(gate) * up

    def rotate(self, x: Tensor, table: Tensor, positions: Tensor, inverse: bool) -> Tensor:
        self.calls["rotate"] += 1
        cos, sin = table[positions][:, :, None].unbind(1)
        first, second = x.chunk(2, dim=-1)
        return x * cos + torch.cat((-second, first), dim=-1) * (-sin if inverse else sin)

    def rotary_table(self, frequencies: Tensor, num_positions: int, dtype: torch.dtype) -> Tensor:
        self.calls["rotary_table"] += 1
        angles = torch.arange(num_positions)[:, None] * torch.cat((frequencies, frequencies))
        return torch.stack((angles.cos(), angles.sin()), dim=1).to(dtype)

    def attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        table: Tensor,
        starts: Tensor,
        lengths: Tensor,
        scale: float,
        longest: int,
        lse: Tensor | None = None,
    ) -> Tensor:
        self.calls["attention"] += 1
        assert longest == starts.diff().max()
        outs = []
        for rows, begin, end, length in zip(table, starts[:-1], starts[1:], lengths, strict=True):
            key, value = (x[rows[:length].long(), :, 0].transpose(0, 1)[None] for x in (k, v))
            mask = torch.ones(int(end - begin), int(length), dtype=torch.bool).tril(int(length - end + begin))
            query = q[begin:end].transpose(0, 1)[None]
            out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale, enable_gqa=True)
            outs.append(out[0].transpose(0, 1))
        return torch.cat(outs)

    def route(self, logits: Tensor, top_k: int, normalize: bool) -> tuple[Tensor, Tensor]:
        self.calls["route"] += 1
        weights, index = logits.softmax(-1).topk(top_k)
        return (weights / weights.sum(-1, keepdim=True) if normalize else weights), index

    def grouped_linear(self, x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        self.calls["grouped_linear"] += 1
        return torch.cat([F.linear(rows, w) for rows, w in zip(x.tensor_split(ends[:-1].long()), weight, strict=True)])

    def collect(self, rows: Tensor, place: Tensor) -> Tensor:
        self.calls["collect"] += 1
        return rows[place].sum(1)

    def scores(self, logits: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        rows = logits.float().log_softmax(-1)
        return rows.gather(-1, tokens[:, None])[:, 0], -(rows.exp() * rows).sum(-1)


def model_of(
    folder: Path, operations: CountedOperations | None, *, dtype: torch.dtype = torch.float64, **fields: Any
) -> Any:
    """The prepared model, by default in fp64, in which a wrong gradient cannot hide behind rounding."""
    import transformers

    register_packed_attention()
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation=ATTENTION_NAME)
    use_experts(model, "loop", device=CPU)
    config = EngineConfig(dtype="float32", match_servers=operations is not None, **fields)
    options: Any = {"device": CPU, "kernel": "sdpa", "trainable": True, "head": "lm"}
    prepare_model(model, config, log_prob_fn=dense_log_prob, operations=operations, **options)
    return model.train()  # evaluation mode recomputes nothing


def outputs_and_gradients(model: Any, prefixes: Prefixes | None = None) -> tuple[Tensor, dict[str, Tensor]]:
    batch = make_batch(make_samples(9, seed=4))
    inputs, _ = packed_inputs(batch, device=CPU, kernel="sdpa", prefixes=prefixes)
    rows_RK = model(packed=inputs)
    token_loss(rows_RK[0], rows_RK[1], batch.columns["weights"].double()).backward()
    return rows_RK.detach(), {name: p.grad for name, p in model.named_parameters()}


MOE = {"mlp_only_layers": [0]}
"""A mixture, in fp32: torch has no grouped products in fp64."""


@pytest.mark.parametrize(
    ("family", "sizes", "settings"),
    [
        ("qwen3", {"tie_word_embeddings": True}, {}),
        ("qwen3", {"tie_word_embeddings": True}, {"tiled_mlp": 4}),
        ("llama", {"tie_word_embeddings": False}, {"gradient_checkpointing": True}),
        ("qwen2", {"tie_word_embeddings": False, "head_dim": 8}, {"gradient_checkpointing": True}),
        ("qwen3_moe", {**MOE, "norm_topk_prob": True}, {}),
        ("qwen3_moe", {**MOE, "norm_topk_prob": False}, {"gradient_checkpointing": True}),
        ("qwen3_moe", {**MOE, "norm_topk_prob": True}, {"tiled_mlp": 4}),
    ],
)
def test_gradients_are_those_of_the_usual_forward_pass_in_fp64(
    tmp_path: Path, family: str, sizes: dict[str, Any], settings: dict[str, Any]
) -> None:
    folder, operations = write_tiny_model(tmp_path, family, **sizes), CountedOperations()
    is_mixture = family == "qwen3_moe"
    dtype, within = (torch.float32, 1e-5) if is_mixture else (torch.float64, 1e-6)  # norms and log-probs are in fp32
    expected, expected_gradients = outputs_and_gradients(model_of(folder, None))
    rows_RK, gradients = outputs_and_gradients(model_of(folder, operations, dtype=dtype, **settings))
    torch.testing.assert_close(rows_RK, expected, rtol=within, atol=within, check_dtype=False)
    assert gradients.keys() == expected_gradients.keys()
    for name, gradient in gradients.items():
        error = (gradient - expected_gradients[name]).abs().max() / expected_gradients[name].abs().max()
        assert error < within, (name, error)
    assert all(operations.calls[name] for name in OPERATIONS + MIXTURE * is_mixture), operations.calls
    if settings:  # the gate ran again in the backward pass, or for several tiles
        assert operations.calls["silu_and_mul"] > model_of(folder, None).config.num_hidden_layers


KERNELS = """
import torch
from ds_engine.model import matching, matching_kernels

def drawn(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))

for shape in ((700, 96), (3, 40, 16)):
    x, grad, weight = drawn(*shape, seed=0), drawn(*shape, seed=1), drawn(shape[-1], seed=2)
    for name, inputs in (("norm_gradients", (x, weight, grad, 1e-5)), ("silu_and_mul_gradients", (x, x.flip(0), grad))):
        results = getattr(matching_kernels, name)(*inputs), getattr(matching, name)(*inputs)
        for one, other in zip(*results):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=2e-5)
print("equal")
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_fused_gradients_under_the_interpreter_are_those_of_torch() -> None:
    assert "equal" in run_under_the_interpreter(KERNELS)


def test_the_forward_pass_is_that_of_the_operations(tiny_model: Path) -> None:
    usual, _ = outputs_and_gradients(model_of(tiny_model, CountedOperations()))
    shifted, _ = outputs_and_gradients(model_of(tiny_model, CountedOperations(shift=0.1)))
    assert (usual - shifted).abs().max() > 1e-3


def test_experts_whose_gradients_torch_cannot_compute_are_refused(tmp_path: Path) -> None:
    """Rows of 30 numbers."""
    folder = write_tiny_model(tmp_path, "qwen3_moe", moe_intermediate_size=30)
    with raises(EngineConfigError, field="experts"):
        model_of(folder, CountedOperations(), dtype=torch.float32)


def test_keys_of_a_tree_are_read_in_place_or_gathered() -> None:
    lengths, parents = [5, 3, 2, 4], [-1, 0, 0, 1]
    in_place, gathered = (packed_layout(lengths, device=CPU, kernel=k, parents=parents) for k in ("flash4", "sdpa"))
    q, k, v = torch.randn(3, 14, 4, 8, generator=torch.Generator().manual_seed(0)).unbind()
    k, v = k[:, :2], v[:, :2]
    assert gathered.tree is not None
    rows = gathered.tree.path_rows
    first = MatchedAttention.make(in_place, CountedOperations()).attend(q, k, v, 0.5, F.linear)
    second = MatchedAttention.make(gathered, CountedOperations()).attend(q, k[rows], v[rows], 0.5, F.linear)
    assert torch.equal(first, second)
    alone = F.scaled_dot_product_attention(
        *(x[[*range(8), *range(10, 14)]].transpose(0, 1)[None] for x in (q, k, v)),
        is_causal=True,
        scale=0.5,
        enable_gqa=True,
    )
    torch.testing.assert_close(first[10:], alone[0].transpose(0, 1)[8:])


def test_a_model_whose_servers_compute_something_else_is_refused(tmp_path: Path) -> None:
    window = write_tiny_model(tmp_path / "window", "qwen2", use_sliding_window=True, sliding_window=5, head_dim=8)
    config = EngineConfig(dtype="float32", match_servers=True)
    with raises(ModelError, field="match_servers", allowed="use_sliding_window False"):
        check_model(str(window), config)
    with raises(ModelError, field="match_servers", allowed="model_type llama or qwen2 or qwen3 or qwen3_moe"):
        check_model(str(write_tiny_model(tmp_path / "phi", "phi3")), config)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("compile", True),
        ("lora", LoraConfig()),
        ("dtype", "float16"),
        ("experts", "loop"),
        ("router_replay", "R2"),
        ("router_replay", "R3"),
    ],
)
def test_settings_that_are_not_exact_are_refused(field: str, value: Any) -> None:
    with raises(EngineConfigError, field=field):
        EngineConfig(match_servers=True, **{field: value})


@pytest.mark.parametrize("keeps", [True, False])
def test_the_log_prob_function_is_told_to_keep_probabilities(tiny_model: Path, keeps: bool) -> None:
    options: list[Any] = []

    def log_probs(*arguments: Any, **given: Any) -> Any:
        options.append(given)
        return dense_log_prob(*arguments)

    config = EngineConfig(dtype="float32", keep_probabilities=keeps)
    model: Any = load_model(str(tiny_model), config, device=CPU, ds_config={})
    prepare_model(model, config, log_prob_fn=log_probs, device=CPU, kernel="sdpa", trainable=True, head="lm")
    model(packed=packed_inputs(make_batch(make_samples(2, seed=0)), device=CPU, kernel="sdpa")[0])
    assert [given.get("keep_bytes", 0) > 2**40 for given in options] == [keeps]


def test_operations_are_required(tiny_model: Path) -> None:
    with raises(EngineConfigError, field="match_servers"):
        prepare_model(
            torch.nn.Module(), EngineConfig(match_servers=True), log_prob_fn=None, device=CPU, kernel="sdpa",
            trainable=True, head="lm",
        )  # fmt: skip
