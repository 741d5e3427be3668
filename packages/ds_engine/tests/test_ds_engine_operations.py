"""Operations of a forward pass, compared with those that torch counts in transformers' models."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from ds_engine import ModelShape
from ds_engine.planning.operations import forward_operations

TINY: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
@given(tokens=st.integers(1, 40))
@settings(deadline=None, max_examples=5)
def test_operations_are_those_of_the_model(family: str, tokens: int) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(family, **TINY, **({"head_dim": 16} if family == "qwen3" else {}))
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(input_ids=torch.zeros(1, tokens, dtype=torch.long), use_cache=False)
    counted = {str(name): flops for name, flops in counter.get_flop_counts()["Global"].items()}
    batched = sum(flops for name, flops in counted.items() if "bmm" in name)
    found = forward_operations(ModelShape.read(config.to_dict()), prompt=0, response=tokens)
    assert found.layers + found.head == sum(counted.values()) - batched
    assert 2 * found.attention == batched, "torch counts all pairs of tokens; half of them are in the past"


@given(prompt=st.integers(0, 4096), response=st.integers(0, 4096))
def test_only_responses_have_logits(prompt: int, response: int) -> None:
    shape = ModelShape.read({"model_type": "qwen3", **TINY})
    found = forward_operations(shape, prompt=prompt, response=response)
    whole = forward_operations(shape, prompt=0, response=prompt + response)
    assert (found.layers, found.attention) == (whole.layers, whole.attention)
    assert found.head == 2 * 96 * 32 * response
    assert found.total == found.layers + found.attention + found.head
