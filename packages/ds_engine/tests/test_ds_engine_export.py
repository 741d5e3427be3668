"""Exports against the model folder that they came from: its names, shapes, dtypes and bits, buffers included."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from ds_engine_architectures import HYBRIDS, MORE_HYBRIDS, PACKED, write_architecture
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from ds_engine import EngineConfig, LoraConfig, ModelError, ZeroConfig
from ds_engine.model.folder_names import drop_unused_conversions
from ds_engine.model.lora import add_adapters, whole_tensors
from plinth_testing import RankPool, raises
from plinth_testing.models import random_model

SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "max_position_embeddings": 128, "pad_token_id": None, "bos_token_id": 1,
    "eos_token_id": 2, "initializer_range": 0.2,
}  # fmt: skip
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True}
ROUTED = {**EXPERTS, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
LATENT = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
FAMILIES: dict[str, dict[str, Any]] = {
    **{name: {} for name in ("Llama", "Qwen2", "Qwen3", "Mistral", "Gemma2", "Gemma3Text", "Phi", "Phi3", "Olmo")},
    **{name: {} for name in ("Olmo2", "Glm", "Glm4", "GPT2", "GPTNeoX", "Apertus")},
    "Qwen3Moe": {**EXPERTS, "num_experts": 4},
    "Mixtral": {**EXPERTS, "num_local_experts": 4},
    "Phimoe": {**EXPERTS, "num_local_experts": 4},
    "MiniMaxM2": {**EXPERTS, "num_local_experts": 4},
    "DeepseekV3": {**ROUTED, **LATENT},
    "Glm4Moe": ROUTED,
}


def write_family(folder: Path, family: str, *, tied: bool = False, dtype: torch.dtype = torch.float32) -> Path:
    """A random model in `dtype`, with random persistent buffers in fp32, as transformers saves it."""
    config = getattr(transformers, f"{family}Config")(**SIZES, **FAMILIES[family], tie_word_embeddings=tied)
    model = random_model(config).to(dtype)
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                module.register_buffer(name, torch.rand(buffer.shape))
    model.save_pretrained(folder)
    return folder


def assert_same(exported: dict[str, Tensor], folder: Path) -> None:
    saved = load_file(folder / "model.safetensors")
    assert exported.keys() == saved.keys()
    for name, tensor in saved.items():
        assert exported[name].dtype == tensor.dtype, name
        assert torch.equal(exported[name], tensor), name


@pytest.mark.parametrize(
    ("family", "tied"),
    [*((name, False) for name in FAMILIES), *((name, True) for name in ("Llama", "GPT2", "Gemma2", "Qwen3Moe"))],
)
def test_an_export_has_the_tensors_of_the_model_folder(tmp_path: Path, family: str, tied: bool) -> None:
    folder = write_family(tmp_path, family, tied=tied)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert_same({tensor.name: tensor.value() for tensor in whole_tensors(model)}, folder)


@pytest.mark.parametrize("name", [*HYBRIDS, *MORE_HYBRIDS, "olmoe"])
def test_an_export_of_a_hybrid_has_the_tensors_of_the_model_folder(tmp_path: Path, name: str) -> None:
    folder = write_architecture(tmp_path, name, (PACKED | HYBRIDS).get(name, {}))
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert_same({tensor.name: tensor.value() for tensor in whole_tensors(model)}, folder)


@pytest.mark.slow
@pytest.mark.parametrize(
    "lora", [None, LoraConfig(rank=2, target_modules=("o_proj", "q_b_proj"))], ids=["whole", "lora"]
)
def test_two_ranks_export_experts_and_fp32_buffers_at_stage_3(
    two_ranks: RankPool, tmp_path: Path, lora: LoraConfig | None
) -> None:
    folder = write_family(tmp_path, "DeepseekV3", dtype=torch.bfloat16)
    config = EngineConfig(dtype="bfloat16", lora=lora, zero=ZeroConfig(stage=3, param_persistence_elements=0))
    exported, nothing = two_ranks.run("export_tensors", model_path=str(folder), config=config)
    assert_same(exported, folder)
    assert nothing == {}


def test_buffers_keep_their_dtype_in_an_export_of_another(tmp_path: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(write_family(tmp_path, "DeepseekV3"))
    dtypes = {tensor.name.rpartition(".")[2]: tensor.value(torch.bfloat16).dtype for tensor in whole_tensors(model)}
    assert dtypes.pop("e_score_correction_bias") == torch.float32
    assert set(dtypes.values()) == {torch.bfloat16}


def test_a_tensor_that_is_no_view_keeps_its_name_with_a_warning(tmp_path: Path) -> None:
    model = random_model(transformers.HrmTextConfig(**SIZES))
    model.config.save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match=r"exported under transformers' own names, such as model\.\S+_proj\.weight"):
        tensors = {tensor.name: tensor.value() for tensor in whole_tensors(model)}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(again[name], tensor) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("family", ["Qwen3Moe", "Mixtral"])
def test_adapters_beside_experts_are_merged_into_the_export(tmp_path: Path, family: str) -> None:
    """Every linear layer: stacked experts are none, so attention alone is adapted."""
    folder = write_family(tmp_path / "base", family)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder)
    add_adapters(model, LoraConfig(rank=2), head="lm", seed=0)
    adapted = [p for name, p in model.named_parameters() if p.requires_grad and ".self_attn." in name]
    assert len(adapted) == 2 * 4 * SIZES["num_hidden_layers"] == sum(p.requires_grad for p in model.parameters())
    for parameter in adapted:
        nn.init.normal_(parameter, std=0.3)
    shutil.copytree(folder, tmp_path / "merged")
    save_file({t.name: t.value(copy=True) for t in whole_tensors(model)}, tmp_path / "merged" / "model.safetensors")
    ids = torch.arange(12)[None]
    with torch.no_grad():
        base, merged = (
            transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name)(input_ids=ids).logits
            for name in ("base", "merged")
        )
        torch.testing.assert_close(merged, model(input_ids=ids).logits, rtol=1e-4, atol=1e-4)
    assert (merged - base).abs().max() > 0.1


def test_adapters_of_experts_are_refused(tmp_path: Path) -> None:
    """PEFT adapts them with the linear layers of the shared experts, and no export would hold them."""
    model = transformers.AutoModelForCausalLM.from_pretrained(write_family(tmp_path, "DeepseekV3"))
    with raises(ModelError, field="lora.target_modules"):
        add_adapters(model, LoraConfig(rank=2), head="lm", seed=0)


def test_conversions_that_matched_nothing_are_not_reverted(tmp_path: Path) -> None:
    """transformers keeps all of them with ZeRO-3, among them those of BERT's first names."""
    model = random_model(transformers.LlamaConfig(**SIZES))
    model.LayerNorm = nn.LayerNorm(4)
    from transformers.conversion_mapping import get_model_conversion_mapping

    model._weight_conversions = get_model_conversion_mapping(model)
    assert "LayerNorm.gamma" in {tensor.name for tensor in whole_tensors(model)}
    drop_unused_conversions(model)
    assert {tensor.name for tensor in whole_tensors(model)} == {name for name, _ in model.named_parameters()}
