import json
import os
import resource
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file

from ckpt import CheckpointSpaceError, ExportError, save_hf_folder
from ckpt.tools.model_folder import ModelFolder, read_folder
from plinth_testing import raises, random_model, tiny_config, tiny_vlm
from plinth_testing.strategies import shapes

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8, torch.bool]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return _make_source(tmp_path / "source")


def _make_source(folder: Path) -> Path:
    folder.mkdir()
    config = {"model_type": "llama", "dtype": "float32", "torch_dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "chat_template.jinja", "modeling_x.py", "merges.txt", "tokenizer.model"):
        (folder / name).write_text(name)
    for name in ("model.safetensors", "pytorch_model.bin", "model.safetensors.index.json", "optimizer.pt", ".hidden"):
        (folder / name).write_text("weights")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool.jinja").write_text("x")
    return folder


def _tensors(folder: Path) -> dict[str, torch.Tensor]:
    actual: dict[str, torch.Tensor] = {}
    for path in folder.glob("*.safetensors"):
        actual.update(load_file(path))
    return actual


entries = st.lists(st.tuples(shapes(), st.sampled_from(DTYPES)), min_size=1, max_size=12)


@settings(deadline=None, derandomize=True, max_examples=15)
@given(entries, st.integers(1, 400), st.sampled_from([None, torch.bfloat16, torch.float32]))
def test_tensors_round_trip(
    entries: list[tuple[tuple[int, ...], torch.dtype]], max_shard_bytes: int, dtype: torch.dtype | None
) -> None:
    tensors = {f"layer.{i}": (torch.rand(shape) * 9).to(kind) for i, (shape, kind) in enumerate(entries)}
    with tempfile.TemporaryDirectory() as root:
        out = Path(root) / "out"
        source = _make_source(Path(root) / "source")
        report = save_hf_folder(
            out, iter(tensors.items()), model_files_from=source, dtype=dtype, max_shard_bytes=max_shard_bytes
        )
        expected = {
            name: tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor
            for name, tensor in tensors.items()
        }
        actual = _tensors(out)
        assert actual.keys() == expected.keys()
        for name, tensor in expected.items():
            assert actual[name].dtype == tensor.dtype
            assert torch.equal(actual[name], tensor)
        num_bytes = sum(tensor.nbytes for tensor in expected.values())
        shards = sorted(out.glob("*.safetensors"))
        assert (report.num_tensors, report.num_bytes, report.num_shards) == (len(tensors), num_bytes, len(shards))
        if len(shards) > 1:
            index = json.loads((out / "model.safetensors.index.json").read_text())
            assert index["metadata"]["total_size"] == num_bytes
            assert set(index["weight_map"]) == set(tensors)
            for shard in shards:
                with safe_open(shard, "pt") as opened:
                    held = list(opened.keys())
                    assert opened.metadata() == {"format": "pt"}
                assert all(index["weight_map"][name] == shard.name for name in held)
                assert len(held) == 1 or sum(expected[name].nbytes for name in held) <= max_shard_bytes
        else:
            assert [shard.name for shard in shards] == ["model.safetensors"]


def test_non_contiguous_and_scalar_tensors(tmp_path: Path, source: Path) -> None:
    tensors = {
        "t": torch.arange(6.0).reshape(2, 3).T,
        "scalar": torch.tensor(3.0),
        "grad": torch.ones(2).requires_grad_(),
    }
    save_hf_folder(tmp_path / "out", tensors.items(), model_files_from=source)
    actual = _tensors(tmp_path / "out")
    assert torch.equal(actual["t"], tensors["t"])
    assert actual["scalar"].shape == ()


def test_files_other_than_weights(tmp_path: Path, source: Path) -> None:
    out = tmp_path / "deep" / "out"
    save_hf_folder(out, [("w", torch.ones(2))], model_files_from=source, dtype=torch.bfloat16)
    assert sorted(path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file()) == [
        "additional_chat_templates/tool.jinja",
        "chat_template.jinja",
        "config.json",
        "merges.txt",
        "model.safetensors",
        "modeling_x.py",
        "tokenizer.json",
        "tokenizer.model",
    ]
    config = json.loads((out / "config.json").read_text())
    assert config == {"model_type": "llama", "dtype": "bfloat16", "torch_dtype": "bfloat16"}
    assert os.listdir(out.parent) == ["out"]


def test_errors_leave_nothing(tmp_path: Path, source: Path) -> None:
    out = tmp_path / "out"

    def failing() -> Iterator[tuple[str, torch.Tensor]]:
        yield "a", torch.ones(2)
        raise RuntimeError("rank died")

    with pytest.raises(RuntimeError, match="rank died"):
        save_hf_folder(out, failing(), model_files_from=source)
    twice = [("a", torch.ones(2)), ("a", torch.ones(2))]
    with raises(ExportError, field="tensors", value="a"):
        save_hf_folder(out, twice, model_files_from=source)
    with raises(ExportError, field="tensors"):
        save_hf_folder(out, [], model_files_from=source)
    with raises(ExportError, field="tensors", value="a"):
        save_hf_folder(out, [("a", torch.ones(2, dtype=torch.complex64))], model_files_from=source)
    with raises(ExportError, field="model_files_from"):
        save_hf_folder(out, twice, model_files_from=tmp_path)
    with raises(ExportError, field="max_shard_bytes", value=0):
        save_hf_folder(out, twice, model_files_from=source, max_shard_bytes=0)
    assert os.listdir(tmp_path) == ["source"]


def test_existing_folder(tmp_path: Path, source: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    save_hf_folder(out, [("a", torch.ones(2))], model_files_from=source)
    with raises(ExportError, field="out"):
        save_hf_folder(out, [("b", torch.ones(2))], model_files_from=source)
    assert set(_tensors(out)) == {"a"}
    save_hf_folder(out, [("b", torch.ones(2))], model_files_from=source, overwrite=True)
    assert set(_tensors(out)) == {"b"}
    # A model folder may be exported over itself: its files are read first.
    save_hf_folder(out, [("c", torch.ones(2))], model_files_from=out, overwrite=True)
    assert set(_tensors(out)) == {"c"}
    assert sorted(os.listdir(tmp_path)) == ["out", "source"]


@pytest.mark.parametrize(("tied", "max_shard_bytes"), [(True, 10**9), (False, 10**9), (True, 20_000)])
def test_transformers_loads_it(tmp_path: Path, tied: bool, max_shard_bytes: int) -> None:
    from transformers import AutoModelForCausalLM

    model = random_model(tiny_config("llama", tie_word_embeddings=tied))
    model.save_pretrained(tmp_path / "source")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter))
    report = save_hf_folder(
        tmp_path / "out",
        model.named_parameters(),  # gives tied weights once
        model_files_from=tmp_path / "source",
        dtype=torch.bfloat16,
        max_shard_bytes=max_shard_bytes,
    )
    assert report.num_bytes == 2 * sum(parameter.numel() for parameter in model.parameters())
    assert (report.num_shards > 1) == (max_shard_bytes == 20_000)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert loaded.dtype == torch.bfloat16
    expected = model.to(torch.bfloat16).state_dict()
    assert loaded.state_dict().keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in loaded.state_dict().items())


def test_a_full_disk_is_named_and_leaves_nothing(source: Path, tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (70_000, limits[1]))
    try:
        with pytest.raises(CheckpointSpaceError):
            save_hf_folder(tmp_path / "out", [("w", torch.zeros(20_000))], model_files_from=source)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_names_and_dtypes_of_an_offline_export_are_the_model_folders(tmp_path: Path) -> None:
    """transformers fuses Mixtral's experts and renames their layer; a DeepSpeed checkpoint holds its names."""
    from transformers import AutoModelForCausalLM, MixtralConfig

    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    config = MixtralConfig(**sizes, num_hidden_layers=1, num_key_value_heads=2, num_local_experts=3)
    random_model(config).to(torch.bfloat16).save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    state = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).state_dict()
    assert "model.layers.0.block_sparse_moe.experts.2.w1.weight" in saved
    for has_weights in (True, False):
        if not has_weights:
            (tmp_path / "model.safetensors").unlink()
        folder = ModelFolder(tmp_path)
        if has_weights:
            with raises(ExportError, field="model_files_from", value="score.weight"):
                list(folder.parts("score.weight", torch.zeros(1, 32)))
        parts = [part for name, tensor in state.items() for part in folder.parts(name, tensor)]
        assert {name for name, _ in parts} == saved.keys()
        for name, part in parts:
            assert torch.equal(part.to(folder.dtype(name)), saved[name]), name
    settings = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**settings, "dtype": None}))
    with raises(ExportError, field="dtype", value=None):
        ModelFolder(tmp_path).dtype("lm_head.weight")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "unheard-of"}))
    with pytest.warns(UserWarning, match="tensors keep the checkpoint's names"):
        assert [name for name, _ in ModelFolder(tmp_path).parts("w", torch.zeros(1))] == ["w"]


@pytest.mark.parametrize("family", ["idefics3", "gemma3", "qwen2_5_vl", "llava_onevision"])
def test_a_vision_tower_that_was_not_trained_is_that_of_the_folder(tmp_path: Path, family: str) -> None:
    import transformers

    folder = ModelFolder(tiny_vlm(tmp_path, family))
    model = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path)
    trained = {n: p for n, p in model.named_parameters() if "language_model" in n or "text_model" in n}
    written = dict(part for name, p in trained.items() for part in folder.parts(name, p.detach()))
    tower = dict(folder.frozen_vision(list(written)))
    assert tower
    assert not tower.keys() & written.keys()
    stored = dict(read_folder(tmp_path))
    assert stored.keys() == written.keys() | tower.keys()
    assert all(torch.equal(stored[name], tensor) for name, tensor in (written | tower).items())
    assert list(folder.frozen_vision(list(stored))) == []
