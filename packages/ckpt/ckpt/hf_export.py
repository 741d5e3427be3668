"""Writes a Hugging Face model folder from a stream of tensors, holding one tensor in memory at a time.

A safetensors file begins with a header that names all its tensors, which are not known while streaming. So each shard
reserves room for its header, writes the header last, and pads the rest of the room with blanks, as the format allows.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from plinth_base.dtypes import SAFETENSORS_DTYPES

from .errors import ExportError
from .files import fsync_file, is_disk_full, new_folder, no_space

if TYPE_CHECKING:
    import torch


#: Room for the header with its 8-byte length, enough for about 500 tensors. For a longer header the data is moved once.
_HEADER_ROOM_BYTES = 64 << 10
_MOVE_CHUNK_BYTES = 16 << 20
_WEIGHT_FILE = re.compile(r".*\.(safetensors|bin|pt|pth|gguf|h5|msgpack|onnx|ckpt)|.*\.index\.json|\..*")
DTYPE_NAMES = {name: code for code, name in SAFETENSORS_DTYPES.items()}


@dataclass(frozen=True, kw_only=True)
class HfExport:
    """A written folder. `num_bytes` counts the tensors, not the headers."""

    path: Path
    num_tensors: int
    num_bytes: int
    num_shards: int


@dataclass
class _Shard:
    """One safetensors file being written."""

    path: Path
    entries: dict[str, dict[str, Any]] = field(default_factory=dict)
    num_bytes: int = 0
    _file: IO[bytes] | None = None

    def append(self, name: str, dtype_name: str, shape: list[int], data: memoryview) -> None:
        if self._file is None:
            self._file = self.path.open("w+b")
            self._file.seek(_HEADER_ROOM_BYTES)
        self._file.write(data)
        end = self.num_bytes + data.nbytes
        self.entries[name] = {"dtype": dtype_name, "shape": shape, "data_offsets": [self.num_bytes, end]}
        self.num_bytes = end

    def finish(self) -> None:
        assert self._file is not None, "a shard holds at least one tensor"
        header = json.dumps({"__metadata__": {"format": "pt"}, **self.entries}, separators=(",", ":")).encode()
        room = _HEADER_ROOM_BYTES
        if len(header) + 8 > room:
            room = -(-(len(header) + 8) // 4096) * 4096
            _move_up(self._file, _HEADER_ROOM_BYTES, self.num_bytes, room - _HEADER_ROOM_BYTES)
        self._file.seek(0)
        self._file.write((room - 8).to_bytes(8, "little") + header.ljust(room - 8))
        self._file.close()
        fsync_file(self.path)


def _move_up(file: IO[bytes], start: int, num_bytes: int, distance: int) -> None:
    """Move a range of a file towards its end, last chunk first, so no byte is overwritten before it is read."""
    end = start + num_bytes
    while end > start:
        begin = max(start, end - _MOVE_CHUNK_BYTES)
        file.seek(begin)
        chunk = file.read(end - begin)
        file.seek(begin + distance)
        file.write(chunk)
        end = begin


class _ShardWriter:
    """Splits the stream into shards; names them when their number is known."""

    def __init__(self, folder: Path, dtype: torch.dtype | None, max_shard_bytes: int) -> None:
        self._folder = folder
        self._dtype = dtype
        self._max_shard_bytes = max_shard_bytes
        self._shards: list[_Shard] = []
        self._names: set[str] = set()

    def add(self, name: str, tensor: torch.Tensor) -> None:
        import torch

        if name in self._names:
            raise ExportError(
                "the stream holds this tensor twice", field="tensors", value=name, remedy="pass tied weights once"
            )
        self._names.add(name)
        dtype = self._dtype if self._dtype is not None and tensor.is_floating_point() else tensor.dtype
        dtype_name = DTYPE_NAMES.get(str(dtype).removeprefix("torch."))
        if dtype_name is None:
            raise ExportError(f"{dtype} cannot be stored", field="tensors", value=name, allowed=", ".join(DTYPE_NAMES))
        shape = list(tensor.shape)
        flat = tensor.detach().to(device="cpu", dtype=dtype).contiguous().reshape(-1)
        data = flat.view(torch.uint8).numpy().data
        self._shard_for(data.nbytes, flat.element_size()).append(name, dtype_name, shape, data)

    def _shard_for(self, num_bytes: int, alignment: int) -> _Shard:
        """The open shard, or a new one when the tensor would exceed the size or start unaligned in it."""
        if self._shards:
            shard = self._shards[-1]
            if shard.num_bytes + num_bytes <= self._max_shard_bytes and shard.num_bytes % alignment == 0:
                return shard
            shard.finish()
        shard = _Shard(self._folder / f"model-{len(self._shards) + 1:05d}.safetensors")
        self._shards.append(shard)
        return shard

    def finish(self) -> tuple[int, int, int]:
        """Close the files, give them their final names, write the index. Returns (tensors, bytes, shards)."""
        if not self._shards:
            raise ExportError("the stream ended before the first tensor", field="tensors")
        self._shards[-1].finish()
        count = len(self._shards)
        num_bytes = sum(shard.num_bytes for shard in self._shards)
        if count == 1:
            os.rename(self._shards[0].path, self._folder / "model.safetensors")
            return len(self._names), num_bytes, 1
        weight_map: dict[str, str] = {}
        for index, shard in enumerate(self._shards, start=1):
            final = f"model-{index:05d}-of-{count:05d}.safetensors"
            os.rename(shard.path, self._folder / final)
            weight_map.update(dict.fromkeys(shard.entries, final))
        index_json = {"metadata": {"total_size": num_bytes}, "weight_map": dict(sorted(weight_map.items()))}
        index_path = self._folder / "model.safetensors.index.json"
        index_path.write_text(json.dumps(index_json, indent=2) + "\n", encoding="utf-8")
        fsync_file(index_path)
        return len(self._names), num_bytes, count


def _copy_model_files(source: Path, out: Path, dtype: torch.dtype | None, changes: Mapping[str, Any]) -> None:
    """Copy all files of a model folder except weights; set the new dtype and `changes` in config.json."""
    for path in sorted(source.iterdir()):
        if path.is_file() and not _WEIGHT_FILE.fullmatch(path.name):
            shutil.copyfile(path, out / path.name)
        elif path.is_dir() and path.name == "additional_chat_templates":
            shutil.copytree(path, out / path.name)
    if dtype is not None or changes:
        config_path = out / "config.json"
        config = json.loads(config_path.read_text(encoding="utf-8"))
        if dtype is not None:
            config["dtype"] = str(dtype).removeprefix("torch.")
            if "torch_dtype" in config:  # the name before transformers 5
                config["torch_dtype"] = config["dtype"]
        config |= changes
        config_path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    for path in out.rglob("*"):
        if path.is_file():
            fsync_file(path)


def save_hf_folder(
    out: Path,
    tensors: Iterable[tuple[str, torch.Tensor]],
    *,
    model_files_from: Path,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = 5_000_000_000,
    overwrite: bool = False,
    config_changes: Mapping[str, Any] | None = None,
) -> HfExport:
    """Write the model folder `out`, loadable by transformers and vLLM.

    `tensors` is consumed as a stream of (name, tensor), one at a time, on any device. Pass each name once, and tied
    weights under one of their names. `dtype` casts floating-point tensors; None keeps their dtypes. A shard holds at
    most `max_shard_bytes` of tensors (a larger tensor gets its own shard). A single shard is named `model.safetensors`;
    several get an index. Configuration, tokenizer and other files without weights are copied from `model_files_from`;
    `config_changes` replaces entries of config.json, such as `architectures` for another head.
    The folder appears by rename; after an error nothing is left.

    Raises CheckpointSpaceError when the disk is full, and ExportError if `out` exists and is not empty (unless
    `overwrite`), `model_files_from` has no config.json, a name occurs twice, or there are no tensors.
    """
    out, source = Path(out), Path(model_files_from)
    if not (source / "config.json").is_file():
        raise ExportError(
            "has no config.json", field="model_files_from", value=str(source), allowed="the exported model's folder"
        )
    if max_shard_bytes < 1:
        raise ExportError(field="max_shard_bytes", value=max_shard_bytes, allowed="at least 1")
    try:
        with new_folder(out, overwrite=overwrite) as partial:
            _copy_model_files(source, partial, dtype, config_changes or {})
            writer = _ShardWriter(partial, dtype, max_shard_bytes)
            for name, tensor in tensors:
                writer.add(name, tensor)
            num_tensors, num_bytes, num_shards = writer.finish()
    except OSError as error:
        if not is_disk_full(error):
            raise
        raise no_space(error, out, "the model was written") from error
    return HfExport(path=out, num_tensors=num_tensors, num_bytes=num_bytes, num_shards=num_shards)
