"""Model folders whose weights are not those of the model are refused with the tensor's name, before anything loads."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ds_engine_architectures import PACKED, write_architecture
from safetensors.torch import load_file, save_file
from torch import Tensor

from ds_engine import EngineConfig, ModelError, check_finite, check_model
from ds_engine.model.loading import load_model
from plinth_testing import raises, write_tiny_model

Weights = dict[str, Tensor]
CONFIG = EngineConfig(dtype="float32")


def changed(folder: Path, change: Callable[[Weights], Weights]) -> str:
    """The folder with other weights."""
    file = folder / "model.safetensors"
    save_file(change(load_file(file)), file, metadata={"format": "pt"})
    return str(folder)


def without(part: str) -> Callable[[Weights], Weights]:
    return lambda weights: {name: tensor for name, tensor in weights.items() if part not in name}


def renamed(before: str, after: str) -> Callable[[Weights], Weights]:
    return lambda weights: {name.replace(before, after): tensor for name, tensor in weights.items()}


INCOMPLETE: dict[str, tuple[Callable[[Weights], Weights], str]] = {
    "head": (without("lm_head"), "lm_head.weight"),
    "layer": (without("layers.1."), "model.layers.1.input_layernorm.weight"),
    "prefix": (lambda w: {f"base_model.{n}": t for n, t in w.items()}, "base_model.lm_head.weight"),
    "peft": (renamed("q_proj.weight", "q_proj.base_layer.weight"), "model.layers.0.self_attn.q_proj.base_layer.weight"),
    "shape": (lambda w: w | {"lm_head.weight": w["lm_head.weight"][:-1]}, "lm_head.weight has shape (63, 32)"),
}


@pytest.mark.parametrize("case", INCOMPLETE)
def test_incomplete_weights_are_refused_by_name(tmp_path: Path, case: str) -> None:
    """Transformers would draw them at random. The check and the loading itself refuse them, also a reference's."""
    change, name = INCOMPLETE[case]
    folder = changed(write_tiny_model(tmp_path, tie_word_embeddings=False), change)
    for load in (
        lambda: check_model(folder, CONFIG),
        lambda: load_model(folder, CONFIG, device=torch.device("cpu"), ds_config={}),
    ):
        with raises(ModelError, field="model_path", value=folder) as caught:
            load()
        assert name in str(caught.value) or case == "shape"


def test_a_value_model_may_lack_its_head_if_it_is_trained(tmp_path: Path) -> None:
    folder = str(write_tiny_model(tmp_path))
    check_model(folder, CONFIG, head="value")
    with raises(ModelError, field="model_path") as caught:
        check_model(folder, CONFIG, head="value", new_head=False)
    assert "score.weight" in caught.value.problem
    changed(tmp_path, without("layers.1."))
    with raises(ModelError, field="model_path") as caught:
        check_model(folder, CONFIG, head="value")
    assert "model.layers.1." in caught.value.problem


def test_tied_embeddings_and_fused_experts_are_complete(tmp_path: Path) -> None:
    """The folder of a mixture has a tensor for each expert, which transformers fuses."""
    check_model(str(write_tiny_model(tmp_path / "tied")), CONFIG)
    check_model(str(write_architecture(tmp_path / "moe", "qwen3_moe", PACKED["qwen3_moe"])), CONFIG)
    folder = changed(tmp_path / "moe", without("experts.1.up_proj"))
    with raises(ModelError, field="model_path", value=folder):
        check_model(folder, CONFIG)


@pytest.mark.parametrize(
    ("change", "unused"),
    [
        ({}, ""),
        ({"num_hidden_layers": 1, "layer_types": ["full_attention"]}, "model.layers.1."),
        ({"attention_bias": False}, "model.layers.0.self_attn.k_proj.bias"),
    ],
)
def test_tensors_that_the_model_has_no_weight_for_are_said(tmp_path: Path, change: Any, unused: str) -> None:
    """The configuration of a smaller model leaves out layers and biases."""
    folder = write_tiny_model(tmp_path, attention_bias=True)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | change))
    lines = list[str]()
    check_model(str(folder), CONFIG, report=lines.append)
    check_model(str(folder), CONFIG, head="value", report=lines.append)
    assert [unused in line for line in lines] == [True, True] * bool(unused)


@pytest.mark.parametrize("factor", [1.0, 2.0])
def test_weights_that_the_configuration_ties_are_equal(tmp_path: Path, factor: float) -> None:
    """transformers does not tie weights that differ, and vLLM does."""
    folder = changed(
        write_tiny_model(tmp_path, tie_word_embeddings=True),
        lambda weights: weights | {"lm_head.weight": factor * weights["model.embed_tokens.weight"]},
    )
    if factor == 1:
        check_model(folder, CONFIG)
    else:
        with raises(ModelError, field="model_path", value=folder) as caught:
            check_model(folder, CONFIG)
        assert "lm_head.weight" in caught.value.problem


def test_damaged_files_are_named_at_once(tmp_path: Path) -> None:
    file = write_tiny_model(tmp_path) / "model.safetensors"
    whole = file.read_bytes()
    for content in (whole[: len(whole) // 2], whole[:5], b"version https://git-lfs.github.com/spec/v1\noid sha256:0"):
        file.write_bytes(content)
        for check in (lambda: check_model(str(tmp_path), CONFIG), lambda: check_finite(str(tmp_path))):
            began = time.monotonic()
            with raises(ModelError, field="model_path", value=str(tmp_path)) as caught:
                check()
            assert file.name in caught.value.problem
            assert time.monotonic() - began < 5


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_one_weight_that_is_not_finite_is_named(tmp_path: Path, value: float, dtype: torch.dtype) -> None:
    folder = changed(write_tiny_model(tmp_path), lambda weights: {n: t.to(dtype) for n, t in weights.items()})
    check_finite(folder)

    def spoil(weights: Weights) -> Weights:
        weights["model.layers.1.mlp.up_proj.weight"][3, 5] = value
        return weights

    changed(tmp_path, spoil)
    with raises(ModelError, field="model_path", value=folder) as caught:
        check_finite(folder)
    assert "model.layers.1.mlp.up_proj.weight in model.safetensors" in caught.value.problem


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "before torch 1.6"])
def test_weights_in_torchs_own_files_are_finite_too(tmp_path: Path, zipped: bool) -> None:
    folder = write_tiny_model(tmp_path)
    weights, file = load_file(folder / "model.safetensors"), folder / "pytorch_model.bin"
    (folder / "model.safetensors").unlink()
    torch.save(weights, file, _use_new_zipfile_serialization=zipped)
    check_finite(str(folder))
    weights["model.layers.1.mlp.up_proj.weight"][3, 5] = float("nan")
    torch.save(weights, file, _use_new_zipfile_serialization=zipped)
    with raises(ModelError, field="model_path", value=str(folder)) as caught:
        check_finite(str(folder))
    assert "model.layers.1.mlp.up_proj.weight in pytorch_model.bin" in caught.value.problem
    for content in (file.read_bytes()[: file.stat().st_size // 2], b"version https://git-lfs.github.com/spec/v1"):
        file.write_bytes(content)
        with raises(ModelError, field="model_path", value=str(folder)) as caught:
            check_finite(str(folder))
        assert "pytorch_model.bin" in caught.value.problem
