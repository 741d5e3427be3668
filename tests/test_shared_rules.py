"""Rules on which packages agree although none imports the other.

PEFT's names and scale (ds_engine, ckpt, weight_sync; PEFT itself is the reference), the names and sizes of dtypes
(torch is the reference), and the tensors that ds_engine names and weight_sync sends.
"""

import tempfile
from pathlib import Path
from typing import Any, get_args

import peft
import torch
import transformers
from hypothesis import example, given, settings
from hypothesis import strategies as st

import ds_engine.model.loading
import weight_sync.tensors
from ckpt import merge_lora, save_adapter
from ckpt.tools.lora_export import read_adapter
from ds_engine import EngineConfig, LoraConfig
from ds_engine.model.lora import adapter_settings, adapter_tensors, add_adapters, whole_tensors
from plinth_base.dtypes import DTYPE_BYTES, Dtype
from plinth_testing import random_model, tiny_config
from weight_sync import HfFolderSource, ZeroSource, peft_name, plan_buckets

LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
LORA = st.builds(
    LoraConfig,
    rank=st.integers(1, 4),
    alpha=st.integers(1, 9),
    rslora=st.booleans(),
    target_modules=st.just("all-linear") | st.lists(st.sampled_from(LINEAR), min_size=1, unique=True).map(tuple),
)
FEW = settings(deadline=None, derandomize=True, max_examples=8)


def adapted(lora: LoraConfig) -> Any:
    """A model with adapters by ds_engine, B drawn at random: zero would hide a wrong scale."""
    model = random_model(tiny_config(num_hidden_layers=2, hidden_size=16, tie_word_embeddings=False))
    add_adapters(model, lora, head="lm", seed=0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_B." in name:
                parameter.normal_()
    return model


@given(lora=LORA)
@FEW
def test_adapters_have_pefts_names_in_three_packages(lora: LoraConfig) -> None:
    model = adapted(lora)
    expected = {f"base_model.model.{name}" for name in peft.get_peft_model_state_dict(model)}
    parameters = dict(model.named_parameters())
    assert {tensor.name for tensor in adapter_tensors(model)} == expected
    assert {peft_name(f"base_model.model.{name}") for name in parameters} - {None} == expected
    with tempfile.TemporaryDirectory() as folder:
        trained = ((name, tensor) for name, tensor in parameters.items() if tensor.requires_grad)
        save_adapter(Path(folder) / "adapter", trained, adapter_settings(model))
        tensors, _ = read_adapter(Path(folder) / "adapter")
    assert {name for name, _ in tensors} == expected


@given(lora=LORA)
@example(lora=LoraConfig(rank=3, alpha=8, rslora=True))
@FEW
def test_adapters_are_merged_as_by_peft_in_two_packages(lora: LoraConfig) -> None:
    model = adapted(lora)
    parameters = [(name, parameter.detach()) for name, parameter in model.named_parameters()]
    adapters = [(name, parameter) for name, parameter in parameters if ".lora_" in name]
    base = [(name.replace(".base_layer.", "."), value) for name, value in parameters if ".lora_" not in name]
    by_ckpt = dict(merge_lora(adapters, base, adapter_settings(model)))
    by_ds_engine = {tensor.name: tensor.value() for tensor in whole_tensors(model)}
    by_peft = {}
    for name, layer in model.named_modules():
        if isinstance(layer, peft.tuners.lora.LoraLayer):
            layer.merge()
            by_peft[f"{name}.weight"] = layer.get_base_layer().weight.detach()
    assert by_ckpt.keys() == by_ds_engine.keys()
    for name, tensor in by_ds_engine.items():
        torch.testing.assert_close(by_ckpt[name], tensor, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(by_peft.get(name, tensor), tensor, rtol=1e-5, atol=1e-5)


def test_a_push_carries_the_tensors_of_the_model_folder(tmp_path: Path) -> None:
    """transformers fuses a mixture's experts and renames their layer; vLLM loads the names of the folder."""
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    experts = {"num_local_experts": 3, "num_experts_per_tok": 2, "num_key_value_heads": 2, "num_hidden_layers": 2}
    random_model(transformers.MiniMaxM2Config(**sizes, **experts, head_dim=8)).save_pretrained(tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    folder, trainer = HfFolderSource(tmp_path), ZeroSource(whole_tensors(model))
    entries = {entry.name: entry for entry in folder.manifest().entries}
    assert {entry.name: entry for entry in trainer.manifest().entries} == entries
    assert "model.layers.1.block_sparse_moe.e_score_correction_bias" in entries
    for bucket in plan_buckets(trainer.manifest(), 10_000).buckets:
        sent, saved = (torch.zeros(bucket.nbytes, dtype=torch.uint8) for _ in range(2))
        trainer.fill(bucket, sent)
        folder.fill(bucket, saved)
        assert torch.equal(sent, saved), [slot.name for slot in bucket.slots]


def test_dtypes_have_torchs_names_and_sizes() -> None:
    for name, num_bytes in DTYPE_BYTES.items():
        assert weight_sync.tensors.torch_dtype(name) == getattr(torch, name)
        assert num_bytes == getattr(torch, name).itemsize
    for name in get_args(Dtype):
        assert EngineConfig(dtype=name).dtype == name
        assert ds_engine.model.loading.torch_dtype(name) == getattr(torch, name)
