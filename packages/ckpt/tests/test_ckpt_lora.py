"""PEFT reads the written adapters, and merges equal PEFT's own."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from ckpt import ExportError, ZeroCheckpoint, export_deepspeed, export_merged, merge_lora, save_adapter
from ckpt.tools import lora_export
from ckpt.tools.lora_export import read_adapter
from ckpt.tools.model_folder import read_folder
from plinth_testing import raises, write_tiny_model

IDS = torch.arange(12).reshape(2, 6)
SIZES = {"vocab_size": 67, "hidden_size": 24, "intermediate_size": 40, "num_attention_heads": 2}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny real model on the disk."""
    folder = tmp_path_factory.mktemp("lora") / "base"
    return write_tiny_model(folder, num_key_value_heads=1, attention_bias=True, initializer_range=0.02, **SIZES)


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
    "trained_whole": {"r": 2, "lora_alpha": 2, "target_modules": ["q_proj"], "modules_to_save": ["norm"]},
}


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
def test_peft_reads_adapters_and_merges_equal_its_own(base: Path, tmp_path: Path, case: str) -> None:
    model = adapted(base, CASES[case])
    config = model.peft_config["default"].to_dict()
    with torch.no_grad():
        expected = model(IDS).logits
    report = save_adapter(tmp_path / "adapter", trained(model), config)
    assert sorted(path.name for path in report.path.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    assert report.num_tensors == len(list(trained(model)))
    written = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (written["peft_type"], written["task_type"], written["inference_mode"]) == ("LORA", None, True)
    model.save_pretrained(tmp_path / "theirs")
    ours, theirs = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("adapter", "theirs"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    again = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path / "adapter").eval()
    with torch.no_grad():
        assert torch.equal(again(IDS).logits, expected)

    export_merged(tmp_path / "adapter", tmp_path / "merged", base=base)
    merged = model.merge_and_unload()
    with torch.no_grad():
        target = merged(IDS).logits
    original = load_file(base / "model.safetensors")
    assert load_file(tmp_path / "merged" / "model.safetensors").keys() == original.keys()
    actual = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    with torch.no_grad():
        torch.testing.assert_close(actual(IDS).logits, target, rtol=0, atol=1e-6)
    for key, tensor in merged.state_dict().items():
        torch.testing.assert_close(actual.state_dict()[key], tensor, rtol=0, atol=1e-6)
    assert not torch.allclose(target, AutoModelForCausalLM.from_pretrained(base)(IDS).logits, atol=1e-3)


Q = {"r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}
KINDS: dict[str, tuple[Any, dict[str, Any], str | None]] = {
    "untied_modules": (peft.LoraConfig, Q | {"modules_to_save": ["embed_tokens", "lm_head"]}, None),
    "tied_head": (peft.LoraConfig, Q | {"modules_to_save": ["lm_head"]}, None),
    "tied_embeddings": (peft.LoraConfig, Q | {"modules_to_save": ["embed_tokens"]}, None),
    "tied_both": (peft.LoraConfig, Q | {"modules_to_save": ["embed_tokens", "lm_head"]}, None),
    "tied_adapted_head": (peft.LoraConfig, Q | {"target_modules": ["q_proj", "lm_head"]}, None),
    "biases": (peft.LoraConfig, Q | {"bias": "all"}, None),
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
    "ia3": (
        peft.IA3Config,
        {"target_modules": ["k_proj", "down_proj"], "feedforward_modules": ["down_proj"]},
        "config.peft_type",
    ),
    "vera": (peft.VeraConfig, {"r": 2, "target_modules": ["q_proj"]}, "config.peft_type"),
}


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_a_merged_adapter_is_the_model_of_peft_or_refused_by_name(tmp_path: Path, kind: str) -> None:
    config_class, options, refused = KINDS[kind]
    tied = not kind.startswith("untied")
    base = write_tiny_model(
        tmp_path / "base", num_key_value_heads=2, attention_bias=True, tie_word_embeddings=tied, **SIZES
    )
    model = adapted(base, options, config_class)
    with torch.no_grad():
        expected = model(IDS).logits
    model.save_pretrained(tmp_path / "adapter")
    if refused is not None:
        with raises(ExportError, field=refused):
            export_merged(tmp_path / "adapter", tmp_path / "merged", base=base)
        return
    export_merged(tmp_path / "adapter", tmp_path / "merged", base=base)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    with torch.no_grad():
        torch.testing.assert_close(merged(IDS).logits, expected, rtol=0, atol=1e-5)
    assert load_file(tmp_path / "merged" / "model.safetensors").keys() <= merged.state_dict().keys()


def test_an_export_that_is_not_the_model_of_peft_does_not_appear(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = adapted(base, CASES["plain"])
    save_adapter(tmp_path / "adapter", trained(model), model.peft_config["default"].to_dict())
    monkeypatch.setattr(lora_export, "lora_scale", lambda *_: 2.1)
    with raises(ExportError, field="adapter_folder"):
        export_merged(tmp_path / "adapter", tmp_path / "merged", base=base)
    assert [path.name for path in tmp_path.iterdir()] == ["adapter"]
    monkeypatch.undo()
    other = write_tiny_model(tmp_path / "other", num_hidden_layers=1, num_key_value_heads=1, **SIZES)
    with raises(ExportError, field="tensors", value="model.layers.1.self_attn.q_proj.weight"):
        export_merged(tmp_path / "adapter", tmp_path / "again", base=other)


def test_a_merge_is_computed_in_fp32_and_cast_once(base: Path, tmp_path: Path) -> None:
    model = adapted(base, CASES["plain"])
    save_adapter(tmp_path / "adapter", trained(model), model.peft_config["default"].to_dict())
    export_merged(tmp_path / "adapter", tmp_path / "fp32", base=base)
    export_merged(tmp_path / "adapter", tmp_path / "bf16", base=base, dtype=torch.bfloat16)
    exact, cast = (load_file(tmp_path / name / "model.safetensors") for name in ("fp32", "bf16"))
    assert all(torch.equal(cast[name], exact[name].bfloat16()) for name in exact)
    # By default the export of a bf16 base is bf16, including merged weights.
    export_merged(tmp_path / "adapter", tmp_path / "again", base=tmp_path / "bf16")
    assert {tensor.dtype for tensor in load_file(tmp_path / "again" / "model.safetensors").values()} == {torch.bfloat16}


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


def test_adapters_from_a_deepspeed_checkpoint(base: Path, tmp_path: Path) -> None:
    model = adapted(base, CASES["plain"])
    config = model.peft_config["default"].to_dict()
    # PEFT's layers injected into a model that keeps its own names.
    weights = {name.removeprefix("base_model.model."): tensor.detach() for name, tensor in trained(model)}
    write_checkpoint(tmp_path / "actor", weights)
    with raises(ExportError, field="lora"):
        export_deepspeed(tmp_path / "actor", tmp_path / "out", model_files_from=base)
    source = ZeroCheckpoint(tmp_path / "actor")
    save_adapter(tmp_path / "adapter", ((name, source.whole(name)) for name in source.shapes), config)
    model.save_pretrained(tmp_path / "theirs")
    ours, theirs = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("adapter", "theirs"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    # The same model as that of the written adapter, merged.
    export_deepspeed(tmp_path / "actor", tmp_path / "merged", model_files_from=base, lora=config)
    export_merged(tmp_path / "adapter", tmp_path / "expected", base=base)
    merged, expected = (load_file(tmp_path / name / "model.safetensors") for name in ("merged", "expected"))
    assert merged.keys() == expected.keys() == load_file(base / "model.safetensors").keys()
    assert all(torch.equal(merged[name], expected[name]) for name in merged)


def test_refused_tensors_and_settings(base: Path, tmp_path: Path) -> None:
    model = adapted(base, CASES["plain"])
    config = model.peft_config["default"].to_dict()
    tensors = dict(trained(model))
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight"

    def save(named: dict[str, torch.Tensor], settings: dict[str, Any] = config, **options: Any) -> None:
        save_adapter(tmp_path / "out", named.items(), settings, **options)

    refused: list[tuple[str, dict[str, torch.Tensor], dict[str, Any]]] = [
        ("lora_B is missing", {name: tensors[name]}, {}),
        ("no adapter", {}, {}),
        ("of no adapter", {"model.embed_tokens.weight": torch.ones(2)}, {}),
        ("of another adapter", tensors, {"adapter": "other"}),
        ("DoRA", {**tensors, "q_proj.lora_magnitude_vector.default.weight": torch.ones(2)}, {}),
    ]
    for _, named, options in refused:
        with raises(ExportError, field="tensors"):
            save(named, **options)
    with raises(ExportError, field="config"):
        save(tensors, {"lora_alpha": 3})
    assert not (tmp_path / "out").exists()
    save(tensors)
    with raises(ExportError, field="out"):
        save(tensors)
    save(tensors, overwrite=True)
    with raises(ExportError, field="config.use_dora", value=True):
        list(merge_lora([], [], {**config, "use_dora": True}))
    layer = "model.layers.0.self_attn.q_proj"
    with raises(ExportError, field="tensors", value=f"{layer}.weight"):
        list(merge_lora(tensors.items(), [], config))
    with raises(ExportError, field="tensors", value=layer):
        list(merge_lora(tensors.items(), [(f"{layer}.weight", torch.ones(3, 3))], config))
    (tmp_path / "out" / "adapter_model.safetensors").rename(tmp_path / "out" / "adapter_model.bin")
    with raises(ExportError, field="adapter_folder"):
        read_adapter(tmp_path / "out")
    for name, content in (("adapter_config.json", "[" * 100_000), ("adapter_model.safetensors", "torn")):
        save(tensors, overwrite=True)
        (tmp_path / "out" / name).write_text(content)
        with raises(ExportError, field="adapter_folder"):
            read_adapter(tmp_path / "out")
    save(tensors, overwrite=True)
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "config.json").write_text("{}")
    with raises(ExportError, field="base"):
        export_merged(tmp_path / "out", tmp_path / "merged", base=tmp_path / "empty")
    assert not (tmp_path / "merged").exists()


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
