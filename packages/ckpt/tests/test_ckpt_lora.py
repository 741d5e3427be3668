"""Merges of LoRA adapters equal PEFT's own, and what is not plain LoRA is refused by name."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from ckpt import ExportError, export_deepspeed, merge_lora
from ckpt.tools.model_folder import read_folder
from plinth_testing import raises, write_tiny_model

Q = {"r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}
CASES: dict[str, dict[str, Any]] = {
    "plain": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]},
    "rslora": {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "use_rslora": True},
    "patterns": {
        "r": 4,
        "lora_alpha": 8,
        "target_modules": ["q_proj", "down_proj"],
        "rank_pattern": {"layers.1.self_attn.q_proj": 2},
        "alpha_pattern": {"down_proj": 32, r".*\.0\.self_attn\.q_proj": 1},
    },
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny real model on the disk."""
    sizes = {"vocab_size": 67, "hidden_size": 24, "intermediate_size": 40, "num_attention_heads": 2}
    folder = tmp_path_factory.mktemp("lora") / "base"
    return write_tiny_model(folder, num_key_value_heads=1, attention_bias=True, initializer_range=0.02, **sizes)


def adapted(base: Path, options: dict[str, Any], config_class: Any = peft.LoraConfig) -> Any:
    """A PEFT model with random adapter weights."""
    torch.manual_seed(1)
    model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), config_class(**options))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model.eval()


def trained(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    return ((name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad)


@pytest.mark.parametrize("case", sorted(CASES))
def test_merges_equal_pefts_own_and_are_fp32(base: Path, case: str) -> None:
    model = adapted(base, CASES[case])
    half = ((name, tensor.bfloat16()) for name, tensor in read_folder(base))
    config = model.peft_config["default"].to_dict()
    merged, in_half = (dict(merge_lora(trained(model), tensors, config)) for tensors in (read_folder(base), half))
    original, expected = dict(read_folder(base)), model.merge_and_unload().state_dict()
    assert merged.keys() == original.keys() == in_half.keys()
    changed = {name for name, tensor in merged.items() if not torch.equal(tensor, original[name])}
    assert changed
    for name, tensor in merged.items():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=1e-6)
        assert in_half[name].dtype == (torch.float32 if name in changed else torch.bfloat16)


KINDS: dict[str, tuple[Any, dict[str, Any], str]] = {
    "modules": (peft.LoraConfig, Q | {"modules_to_save": ["norm"]}, "config.modules_to_save"),
    "biases": (peft.LoraConfig, Q | {"bias": "all"}, "config.bias"),
    "tokens": (peft.LoraConfig, Q | {"trainable_token_indices": [3, 4]}, "config.trainable_token_indices"),
    "parameters": (
        peft.LoraConfig,
        Q | {"target_modules": [], "target_parameters": ["self_attn.q_proj.weight"]},
        "config.target_parameters",
    ),
    "dora": (peft.LoraConfig, Q | {"use_dora": True}, "config.use_dora"),
    "lora_bias": (peft.LoraConfig, Q | {"lora_bias": True}, "config.lora_bias"),
    "pissa": (peft.LoraConfig, Q | {"init_lora_weights": "pissa"}, "config.init_lora_weights"),
    "olora": (peft.LoraConfig, Q | {"init_lora_weights": "olora"}, "config.init_lora_weights"),
    "lokr": (peft.LoKrConfig, {"r": 2, "target_modules": ["q_proj"]}, "config.peft_type"),
    "vera": (peft.VeraConfig, {"r": 2, "target_modules": ["q_proj"]}, "config.peft_type"),
}


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_other_adapters_are_refused_by_name(kind: str) -> None:
    config_class, options, refused = KINDS[kind]
    with raises(ExportError, field=refused):
        list(merge_lora([], [], config_class(**options).to_dict()))


def test_tensors_that_do_not_fit_are_refused(base: Path) -> None:
    tensors = dict(trained(adapted(base, CASES["plain"])))
    layer = "model.layers.0.self_attn.q_proj"
    name = f"base_model.model.{layer}.lora_A.default.weight"
    refused: list[tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], str | None]] = [
        ({name: tensors[name]}, {}, layer),  # without lora_B
        ({}, {}, None),
        ({"model.embed_tokens.weight": torch.ones(2)}, {}, "model.embed_tokens.weight"),
        (tensors, {}, layer),  # the base model has no such layer
        (tensors, {f"{layer}.weight": torch.ones(3, 3)}, layer),
    ]
    for adapters, weights, value in refused:
        with raises(ExportError, field="tensors", **({} if value is None else {"value": value})):
            list(merge_lora(adapters.items(), weights.items(), CASES["plain"]))


def write_checkpoint(folder: Path, weights: dict[str, torch.Tensor]) -> None:
    """A checkpoint of ZeRO-1 on one rank that trains these weights."""
    states = {
        "zero_stage": 1,
        "partition_count": 1,
        "single_partition_of_fp32_groups": [torch.cat([tensor.reshape(-1) for tensor in weights.values()])],
        "base_optimizer_state": {"state": {}, "param_groups": [{"params": [0]}]},
    }
    folder.mkdir()
    torch.save({"optimizer_state_dict": states}, folder / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt")
    shapes = {name: tensor.shape for name, tensor in weights.items()}
    torch.save({"module": {}, "param_shapes": [shapes]}, folder / "mp_rank_00_model_states.pt")


def test_a_trained_weight_beside_the_adapters_is_not_left_out(base: Path, tmp_path: Path) -> None:
    model = adapted(base, CASES["plain"])
    weights = {name.removeprefix("base_model.model."): tensor.detach() for name, tensor in trained(model)}
    write_checkpoint(tmp_path / "actor", weights | {"score.weight": torch.ones(1, 24)})
    config = model.peft_config["default"].to_dict()
    with raises(ExportError, field="tensors", value="score.weight"):
        export_deepspeed(tmp_path / "actor", tmp_path / "out", model_files_from=base, lora=config)
    assert not (tmp_path / "out").exists()


def test_an_export_is_a_whole_model_of_the_folders_shapes(base: Path, tmp_path: Path) -> None:
    """A folder with more layers or other sizes has all names of a smaller model."""
    weights = dict(read_folder(base))
    part = {name: tensor for name, tensor in weights.items() if ".layers.1." not in name}
    wrong = weights | {"model.norm.weight": torch.ones(3)}
    for name, stored, value in (
        ("part", part, "model.layers.1.input_layernorm.weight"),
        ("wrong", wrong, "model.norm.weight"),
    ):
        write_checkpoint(tmp_path / name, stored)
        with raises(ExportError, field="model_files_from", value=value):
            export_deepspeed(tmp_path / name, tmp_path / "out", model_files_from=base)
        assert not (tmp_path / "out").exists()
    write_checkpoint(tmp_path / "whole", weights)
    assert export_deepspeed(tmp_path / "whole", tmp_path / "out", model_files_from=base).num_tensors == len(weights)


def test_a_folder_that_stores_a_tied_weight_twice_is_exported_once(base: Path, tmp_path: Path) -> None:
    folder, weights = Path(shutil.copytree(base, tmp_path / "base")), dict(read_folder(base))
    twice = weights | {"lm_head.weight": weights["model.embed_tokens.weight"].clone()}
    save_file(twice, folder / "model.safetensors", {"format": "pt"})
    write_checkpoint(tmp_path / "whole", weights)
    report = export_deepspeed(tmp_path / "whole", tmp_path / "out", model_files_from=folder)
    assert report.num_tensors == len(weights)


def test_adapters_of_a_deepspeed_checkpoint_are_merged_and_cast_once(base: Path, tmp_path: Path) -> None:
    model = adapted(base, CASES["plain"])
    config = model.peft_config["default"].to_dict()
    # PEFT's layers injected into a model that keeps its own names.
    weights = {name.removeprefix("base_model.model."): tensor.detach() for name, tensor in trained(model)}
    write_checkpoint(tmp_path / "actor", weights)
    with raises(ExportError, field="lora"):
        export_deepspeed(tmp_path / "actor", tmp_path / "out", model_files_from=base)
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "config.json").write_text("{}")
    with raises(ExportError, field="base"):
        export_deepspeed(tmp_path / "actor", tmp_path / "out", model_files_from=tmp_path / "empty", lora=config)
    assert not (tmp_path / "out").exists()
    expected = dict(merge_lora(trained(model), read_folder(base), config))
    for name, dtype in (("fp32", None), ("bf16", torch.bfloat16)):
        export_deepspeed(tmp_path / "actor", tmp_path / name, model_files_from=base, lora=config, dtype=dtype)
        merged = load_file(tmp_path / name / "model.safetensors")
        assert merged.keys() == expected.keys()
        assert all(torch.equal(merged[key], expected[key].to(dtype or torch.float32)) for key in merged)
