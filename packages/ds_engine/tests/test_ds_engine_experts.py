"""Experts in grouped products equal transformers' loop over the experts, and their weights can be released."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM

from ds_engine import EngineConfig, EngineConfigError
from ds_engine.model.experts import EXPERTS_NAME, experts_of, grouped_experts, keep_out_of_graphs, use_experts
from ds_engine.model.small_copy import randomize, small_config
from plinth_testing import raises

CPU = torch.device("cpu")
FAMILIES = ("qwen3_moe", "nemotron_h", "gpt_oss")
"""Gated; not gated; transposed and interleaved, with biases."""


def family(name: str, **changes: Any) -> Any:
    config = small_config(AutoConfig.for_model(name))
    for key, value in changes.items():
        setattr(config, key, value)
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        randomize(model)
    return model


@pytest.fixture(scope="module", params=FAMILIES)
def experts(request: pytest.FixtureRequest) -> Any:
    return experts_of(family(request.param))[0]


@st.composite
def routings(draw: st.DrawFn) -> list[list[int]]:
    """Two experts of four for each token; often the same ones for all, so that others have no tokens."""
    allowed = draw(st.sets(st.integers(0, 3), min_size=2))
    pair = st.lists(st.sampled_from(sorted(allowed)), min_size=2, max_size=2, unique=True)
    return draw(st.lists(pair, min_size=1, max_size=9))


def computed(
    experts: Any,
    implementation: str,
    index_TK: torch.Tensor,
    *,
    frozen: bool,
    between: Callable[[], None] | None = None,
) -> list[torch.Tensor]:
    """The output, and the gradients of the hidden states, the routing weights and the parameters."""
    generator = torch.Generator().manual_seed(len(index_TK))
    hidden = experts.down_proj.shape[2 if experts.is_transposed else 1]
    hidden_TH = torch.randn(len(index_TK), hidden, generator=generator, requires_grad=True)
    weights_TK = torch.rand(index_TK.shape, generator=generator, requires_grad=True)
    experts.zero_grad()
    experts.requires_grad_(not frozen)
    if implementation == "grouped":
        out_TH = grouped_experts(experts, hidden_TH, index_TK, weights_TK)
    else:
        experts.config._experts_implementation = "eager"
        out_TH = experts(hidden_TH, index_TK, weights_TK)
    if between is not None:
        between()
    (out_TH * torch.linspace(-1, 1.3, out_TH.numel()).view_as(out_TH)).sum().backward()
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in experts.parameters()]
    assert hidden_TH.grad is not None
    assert weights_TK.grad is not None
    return [out_TH.detach(), hidden_TH.grad, weights_TK.grad, *gradients]


@given(routing=routings(), frozen=st.booleans())
@settings(max_examples=20, deadline=None)
def test_outputs_and_gradients_equal_those_of_the_loop(experts: Any, routing: list[list[int]], frozen: bool) -> None:
    index_TK = torch.tensor(routing)
    expected = computed(experts, "loop", index_TK, frozen=frozen)
    for ours, theirs in zip(computed(experts, "grouped", index_TK, frozen=frozen), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=2e-5)
    assert not frozen or not any(gradient.any() for gradient in expected[3:])


def test_weights_may_be_released_and_gathered_elsewhere_before_the_backward_pass(experts: Any) -> None:
    """As at stage 3. A view of them, kept for the backward pass, would also keep the memory of all layers."""
    index_TK = torch.tensor([[0, 1], [1, 3]])
    expected = computed(experts, "grouped", index_TK, frozen=False)

    def move() -> None:
        for parameter in experts.parameters():
            before, parameter.data = parameter.data, parameter.data.clone()
            before.zero_()

    for ours, theirs in zip(computed(experts, "grouped", index_TK, frozen=False, between=move), expected, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    ("setting", "width", "used"),
    [("auto", 32, EXPERTS_NAME), ("loop", 32, "eager"), ("grouped", 32, EXPERTS_NAME), ("auto", 30, "eager")],
)
def test_setting_decides_unless_torch_has_no_products_of_such_rows(setting: Any, width: int, used: str) -> None:
    model = family("qwen3_moe", moe_intermediate_size=width)
    use_experts(model, setting, device=CPU)
    assert model.config._experts_implementation == used


@pytest.mark.parametrize("model_type", ["qwen3_moe", "qwen3"])
def test_grouped_is_refused_where_it_cannot_be_computed(model_type: str) -> None:
    """Rows of 30 numbers in the mixture; a dense model has no experts at all, which `auto` leaves alone."""
    model = family(model_type, moe_intermediate_size=30)
    with raises(EngineConfigError, field="experts", value="grouped"):
        use_experts(model, "grouped", device=CPU)
    use_experts(model, "auto", device=CPU)
    with raises(EngineConfigError, field="experts", value="batched"):
        EngineConfig(experts="batched")  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_compiled_layers_compute_the_same(dtype: torch.dtype) -> None:
    """In bfloat16 in one graph for any number of tokens; torch's graphs take no other dtype, so that breaks them. Also
    after another model of the process is loaded."""
    model = family("qwen3_moe").to(dtype)
    use_experts(model, "auto", device=CPU)
    keep_out_of_graphs(model)
    use_experts(family("qwen3_moe"), "auto", device=CPU)
    mlp = model.model.layers[0].mlp
    compiled = torch.compile(mlp, backend="aot_eager", dynamic=True, fullgraph=dtype == torch.bfloat16)
    for length in (5, 9):
        hidden = torch.randn(1, length, 64, dtype=dtype)
        gradients = []
        for forward in (mlp, compiled):
            model.zero_grad()
            forward(hidden).square().sum().backward()
            gradients.append(mlp.experts.down_proj.grad.float())
        torch.testing.assert_close(*gradients, rtol=2e-2, atol=2e-2 * float(gradients[0].abs().max()))
