"""Hugging Face model folders: downloads, weight files and their headers, checks by file names; no heavy imports.

model.safetensors                 or model.safetensors.index.json with the files that it names
pytorch_model.bin                 or pytorch_model.bin.index.json, in a folder without those above
adapter_model.safetensors, consolidated.safetensors, a shard of an earlier save, ...      ignored
"""

import json
import math
import os
import re
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from .dtypes import DTYPE_BYTES, SAFETENSORS_DTYPES
from .errors import PlinthError

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")
"""A tokenizer has at least one of these."""
WEIGHT_FILES = ("model.safetensors", "pytorch_model.bin")
"""Weights in one file, in the order in which transformers looks for them; each may have an index of several files."""
_IGNORED_WEIGHTS = re.compile(r"(?!training_args|optimizer|scheduler|rng_state).*\.(safetensors|bin|pth?)")


class ModelFolderError(PlinthError, ValueError):
    """A model folder does not exist, has no config, tokenizer or weights, or a damaged file. `value` is the path."""


class StoredTensor(NamedTuple):
    """A tensor in a safetensors file."""

    shape: tuple[int, ...]
    dtype: str
    """torch's name, or the name in the file for a dtype that `SAFETENSORS_DTYPES` lacks."""
    start: int
    """First byte in the file."""
    num_bytes: int


def weight_files(folder: str | Path) -> tuple[Path, ...]:
    """The files from which transformers loads the model of a folder; empty for a folder without weights.

    Warns of other weight files.

    Raises:
        ModelFolderError: an index is damaged or names a file that is not there.
    """
    folder = Path(folder)
    files: tuple[Path, ...] = ()
    for name in WEIGHT_FILES:
        if (folder / name).is_file():
            files = (folder / name,)
        elif (index := folder / f"{name}.index.json").is_file():
            files = files_of_index(index)
        if files:
            break
    _warn_of_ignored(folder, files)
    return files


MATCHED = {"model_type": ("llama", "qwen2", "qwen3", "qwen3_moe"), "rope_type": ("default", "llama3")}
"""Families and rotary positions of models whose servers can compute the ranks' bits (`match_servers`)."""


def files_of_index(index: Path) -> tuple[Path, ...]:
    """The files that an index names. Raises ModelFolderError as `weight_files` does."""
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        files = tuple(index.parent / name for name in names)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ModelFolderError(
            f"the index cannot be read: {error}", value=str(index), remedy="copy it again"
        ) from error
    for file in files:
        if not file.is_file():
            raise ModelFolderError(f"{index.name} names this file, which is missing", value=str(file), remedy="copy it")
    return files


def _warn_of_ignored(folder: Path, files: Iterable[Path]) -> None:
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    ignored = sorted(name for name in names - {file.name for file in files} if _IGNORED_WEIGHTS.fullmatch(name))
    if files and ignored:
        read = ", ".join(file.name for file in list(files)[:3])
        warnings.warn(f"{folder}: ignoring {', '.join(ignored)}; the model is in {read}", stacklevel=3)


def read_model_config(folder: str | Path) -> dict[str, Any]:
    """The config.json of a model folder. Raises ModelFolderError: it cannot be read, or is no JSON object."""
    try:
        config = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelFolderError(f"its config.json is not valid JSON: {error}", value=str(folder)) from None
    if not isinstance(config, dict):
        kind = type(config).__name__
        raise ModelFolderError(f"its config.json is {kind} JSON, not an object", value=str(folder))
    return config


def stored_tensors(folder: str | Path) -> dict[str, StoredTensor]:
    """The tensors in a model folder's safetensors files, by name; empty where the weights are no safetensors.

    Raises:
        ModelFolderError: an index or a file is damaged or missing.
    """
    return {name: stored for header in safetensors_headers(folder).values() for name, stored in header.items()}


def safetensors_headers(folder: str | Path) -> dict[Path, dict[str, StoredTensor]]:
    """The tensors of each of a model folder's safetensors files. Raises ModelFolderError as `stored_tensors` does."""
    return {file: read_safetensors_header(file) for file in weight_files(folder) if file.suffix == ".safetensors"}


def read_safetensors_header(file: Path) -> dict[str, StoredTensor]:
    """The tensors of a safetensors file by name, by position in the file. Reads only the header.

    Raises:
        ModelFolderError: the file is a Git LFS pointer, ends too early, or is no safetensors file.
    """
    try:
        offset, header = _read_header(file)
        tensors = {name: _stored(info, offset) for name, info in header.items() if name != "__metadata__"}
    except (OSError, LookupError, TypeError, AttributeError, RecursionError, ValueError) as error:
        if isinstance(error, ModelFolderError):
            raise
        problem = f"not a safetensors file: {error}"
        raise ModelFolderError(problem, value=str(file), remedy="copy it again") from error
    num_bytes, end = file.stat().st_size, max((each.start + each.num_bytes for each in tensors.values()), default=0)
    if end > num_bytes:
        raise ModelFolderError(f"has {num_bytes:,} of its {end:,} bytes", value=str(file), remedy="copy it again")
    return dict(sorted(tensors.items(), key=lambda item: item[1].start))


def _read_header(file: Path) -> tuple[int, dict[str, Any]]:
    """First byte after the header, and the header."""
    with file.open("rb") as stream:
        head = stream.read(8)
        if head == b"version ":
            raise ModelFolderError("a Git LFS pointer", value=str(file), remedy="fetch it with `git lfs pull`")
        size = int.from_bytes(head, "little")
        if not 0 < size <= file.stat().st_size - 8:
            raise ValueError("its header is cut off")
        header: dict[str, Any] = json.loads(stream.read(size))
        return 8 + size, header


def _stored(info: dict[str, Any], offset: int) -> StoredTensor:
    (first, last), shape = info["data_offsets"], tuple(info["shape"])
    dtype = SAFETENSORS_DTYPES.get(info["dtype"], info["dtype"])
    num_bytes = math.prod(shape) * DTYPE_BYTES[dtype] if dtype in DTYPE_BYTES else last - first
    if any(type(n) is not int for n in (*shape, first, last)) or not 0 <= first <= last or last - first != num_bytes:
        raise ValueError(f"{info['dtype']} {list(shape)} lies at bytes {first} to {last}")
    return StoredTensor(shape=shape, dtype=dtype, start=offset + first, num_bytes=last - first)


def find_model_folder(path: str | Path) -> Path:
    """The model folder of `path`: the path itself, or for OWNER/NAME the folder where `hf download` stored that model.

    Nothing is downloaded. A path that does not exist is returned unchanged; `check_model_folder` then fails for it.
    """
    if os.path.exists(path) or str(path).count("/") != 1:
        return Path(path)
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
    except ImportError:  # then nothing was downloaded with it either
        return Path(path)
    try:
        return Path(snapshot_download(str(path), local_files_only=True))
    except (HFValidationError, LocalEntryNotFoundError):
        return Path(path)


def check_model_folder(path: str | Path, *, need_weights: bool = True) -> Path:
    """Check, by file names only, that `path` is a Hugging Face model folder; return it.

    Raises:
        ModelFolderError: the folder, its config.json, its tokenizer or (if `need_weights`) its weights are missing.
    """
    folder, name = Path(path), str(path)
    if not os.path.isdir(path):  # False too for names that no folder can have, where Path.is_dir raises
        problem = "is a file, not a folder" if os.path.exists(folder) else "no such folder"
        remedy = "give a local Hugging Face model folder, or OWNER/NAME after `hf download OWNER/NAME`"
        if re.fullmatch(r"\w[\w.-]*/[\w.-]+", name):
            problem += ", and no model of this name was downloaded"
            remedy = f"give a local Hugging Face model folder, or fetch it with `hf download {name}`"
        raise ModelFolderError(problem, value=name, remedy=remedy)
    if not (folder / "config.json").is_file():
        raise ModelFolderError(
            "the folder has no config.json, so it is not a Hugging Face model folder",
            value=name,
            remedy="give the folder that save_pretrained or a download wrote",
        )
    if not any((folder / file).is_file() for file in TOKENIZER_FILES):
        raise ModelFolderError(
            f"the folder has no tokenizer (none of {', '.join(TOKENIZER_FILES)})",
            value=name,
            remedy="copy the tokenizer files of the base model into it, or run tokenizer.save_pretrained on the folder",
        )
    if need_weights and not weight_files(folder):
        raise ModelFolderError(
            f"the folder has no weights: no {' or '.join(WEIGHT_FILES)}, and no index of one",
            value=name,
            remedy="copy the *.safetensors files of the model, and their index, into it",
        )
    return folder
