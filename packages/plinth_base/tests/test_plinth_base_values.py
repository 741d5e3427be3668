"""Model folders are checked by file names, downloads are found, and dtypes have torch's names."""

import json
import re
import warnings
from pathlib import Path

import pytest

from plinth_base import (
    DTYPE_BYTES,
    Endpoint,
    ModelFolderError,
    check_model_folder,
    find_model_folder,
    read_safetensors_header,
    stored_tensors,
    weight_files,
)
from plinth_base.adapters import lora_scale, missing_settings, peft_name
from plinth_base.endpoint import error_message
from plinth_base.model_folder import TOKENIZER_FILES


def write(folder: Path, *names: str) -> Path:
    folder.mkdir(exist_ok=True)
    for name in names:
        (folder / name).write_text(json.dumps({}))
    return folder


@pytest.mark.parametrize("tokenizer", TOKENIZER_FILES)
@pytest.mark.parametrize("weights", ["model.safetensors", "pytorch_model.bin"])
def test_a_whole_model_folder_is_accepted(tmp_path: Path, tokenizer: str, weights: str) -> None:
    folder = write(tmp_path, "config.json", tokenizer)
    assert check_model_folder(folder, need_weights=False) == folder
    with pytest.raises(ModelFolderError) as caught:
        check_model_folder(str(folder))
    assert caught.value.value == str(folder)
    assert check_model_folder(write(folder, weights)) == folder


@pytest.mark.parametrize(
    "names",
    [(), ("config.json",), ("tokenizer.json", "model.safetensors"), ("config.json", "tokenizer.json", "a.safetensors")],
)
def test_an_incomplete_folder_is_refused(tmp_path: Path, names: tuple[str, ...]) -> None:
    with pytest.raises(ModelFolderError):
        check_model_folder(write(tmp_path, *names))


SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def index(folder: Path, *shards: str) -> Path:
    weight_map = {str(number): name for number, name in enumerate(shards)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


@pytest.mark.parametrize("stray", ["consolidated.safetensors", "model-old.safetensors", "adapter_model.bin", "a.pth"])
def test_stray_weight_files_are_not_the_model(tmp_path: Path, stray: str) -> None:
    one, two = write(tmp_path / "one", "model.safetensors"), index(write(tmp_path / "two", *SHARDS), *SHARDS)
    for folder, expected in ((one, ("model.safetensors",)), (two, SHARDS)):
        write(folder, "training_args.bin", "optimizer.pt", "rng_state.pth")
        with warnings.catch_warnings(action="error"):
            assert weight_files(folder) == tuple(folder / name for name in expected)
        write(folder, stray)
        with pytest.warns(UserWarning, match=stray):
            assert weight_files(folder) == tuple(folder / name for name in expected)


def test_one_file_precedes_an_index_as_in_transformers(tmp_path: Path) -> None:
    folder = index(write(tmp_path, "model.safetensors", "pytorch_model.bin", *SHARDS), *SHARDS)
    with pytest.warns(UserWarning, match=SHARDS[1]):
        assert weight_files(folder) == (folder / "model.safetensors",)


def test_an_index_names_files_that_exist(tmp_path: Path) -> None:
    index(write(tmp_path, SHARDS[0]), *SHARDS)
    with pytest.raises(ModelFolderError) as caught:
        weight_files(tmp_path)
    assert caught.value.value == str(tmp_path / SHARDS[1])
    for text in ("", "[]", '{"weight_map": {"a": 1}}', "[" * 60_000):
        (tmp_path / "model.safetensors.index.json").write_text(text)
        with pytest.raises(ModelFolderError) as caught:
            weight_files(tmp_path)
        assert caught.value.value == str(tmp_path / "model.safetensors.index.json")


def test_headers_are_read_and_damaged_files_are_named(tmp_path: Path) -> None:
    file, header = tmp_path / "model.safetensors", {"a": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [0, 12]}}
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    whole = len(text).to_bytes(8, "little") + text + bytes(12)
    file.write_bytes(whole)
    assert stored_tensors(tmp_path) == {"a": ((2, 3), "bfloat16", len(whole) - 12, 12)}
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 12\n"
    for content in (whole[:-1], whole[:20], b"", pointer, whole.replace(b"[2, 3]", b"[2, 2]")):
        file.write_bytes(content)
        with pytest.raises(ModelFolderError) as caught:
            read_safetensors_header(file)
        assert caught.value.value == str(file)
        assert ("git lfs pull" in str(caught.value.remedy)) == (content == pointer)


@pytest.mark.parametrize("path", ["nowhere", "file", "a\0b", "a/b"])
def test_what_is_no_folder_is_refused(tmp_path: Path, path: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelFolderError) as caught:
        check_model_folder(path if path == "a/b" else f"{tmp_path}/{path}")
    assert ("hf download a/b" in str(caught.value)) == (path == "a/b")


def test_a_download_is_found_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    snapshot = tmp_path / "models--a--b" / "snapshots" / "0a1b"
    for file in (snapshot / "config.json", tmp_path / "models--a--b" / "refs" / "main"):
        file.parent.mkdir(parents=True)
        file.write_text("0a1b")
    for name in ("a/b", "a/c", "/", "/x", "b", "a//b"):
        assert find_model_folder(name) == (snapshot if name == "a/b" else Path(name)), name


def test_an_api_key_is_not_printed() -> None:
    assert "secret" not in repr(Endpoint("http://a", api_key="secret"))


def test_sizes_follow_from_the_names_of_dtypes() -> None:
    for name, num_bytes in DTYPE_BYTES.items():
        assert num_bytes == (1 if name == "bool" else int(re.findall(r"\d+", name)[0]) // 8)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("q.lora_A.default.weight", "q.lora_A.weight"),
        ("q.lora_B.default.weight", "q.lora_B.weight"),
        ("q.lora_B.default.bias", None),
        ("q.base_layer.weight", None),
        ("q.lora_A.other.weight", None),
    ],
)
def test_names_of_adapters_are_pefts(name: str, expected: str | None) -> None:
    assert peft_name(name) == expected


def test_the_scale_follows_the_pattern_of_the_layer() -> None:
    settings = {"r": 4, "lora_alpha": 8, "alpha_pattern": {"q_proj": 2}}
    assert lora_scale(settings, "layers.0.q_proj", 4) == 0.5
    assert lora_scale(settings, "layers.0.kq_proj", 4) == 2.0
    assert lora_scale(settings | {"use_rslora": True}, "layers.0.k_proj", 4) == 4.0
    assert missing_settings(settings) == ["target_modules"]


@pytest.mark.parametrize(
    ("body", "line"),
    [
        ('{"error": {"message": "too\\n long"}}', "HTTP 400: too long"),
        ('{"detail": "Not Found"}', "HTTP 400: Not Found"),
        ('{"object": "error", "message": "no"}', "HTTP 400: no"),
        ('[{"msg": 1}]', "HTTP 400: [{'msg': 1}]"),
        (b"<html>bad gateway\xff</html>", "HTTP 400: <html>bad gateway\ufffd</html>"),
        ("[" * 100_000, "HTTP 400: " + "[" * 300),
        ("", "HTTP 400"),
    ],
)
def test_an_http_error_is_one_line_with_the_servers_message(body: str | bytes, line: str) -> None:
    assert error_message(400, body) == line
