"""Writes a Hugging Face model folder from a stream of tensors, holding one shard in memory at a time."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import ExportError
from .files import fsync_file, is_disk_full, new_folder, no_space, write_text
from .tensor_file import DTYPE_NAMES, stored_dtype, write_tensors

if TYPE_CHECKING:
    import torch


_WEIGHT_FILE = re.compile(r".*\.(safetensors|bin|pt|pth|gguf|h5|msgpack|onnx|ckpt)|.*\.index\.json|\..*")


@dataclass(frozen=True, kw_only=True)
class HfExport:
    """A written folder. `num_bytes` counts the tensors, not the headers."""

    path: Path
    num_tensors: int
    num_bytes: int
    num_shards: int


def _write_shards(
    folder: Path, tensors: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype | None, max_shard_bytes: int
) -> tuple[int, int, int]:
    """Write the weight files, and the index of several. Returns (tensors, bytes, shards)."""
    shard_of: dict[str, int] = {}
    held: dict[str, torch.Tensor] = {}
    num_shards = num_bytes = 0

    def unfinished(index: int) -> Path:
        return folder / f"model-{index:05d}.safetensors"

    for name, tensor in tensors:
        if name in shard_of:
            raise ExportError(
                "the stream holds this tensor twice", field="tensors", value=name, remedy="pass tied weights once"
            )
        to = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        if stored_dtype(to) is None:
            raise ExportError(f"{to} cannot be stored", field="tensors", value=name, allowed=", ".join(DTYPE_NAMES))
        # A copy: the caller may reuse the tensor's memory for the next one.
        tensor = tensor.detach().to(device="cpu", dtype=to, copy=True)
        if held and sum(one.nbytes for one in held.values()) + tensor.nbytes > max_shard_bytes:
            write_tensors(unfinished(num_shards), held, {})
            num_shards, held = num_shards + 1, {}
        shard_of[name], held[name] = num_shards, tensor
        num_bytes += tensor.nbytes
    if not shard_of:
        raise ExportError("the stream ended before the first tensor", field="tensors")
    write_tensors(unfinished(num_shards), held, {})
    num_shards += 1  # now that their number is known, they get their names
    final = [f"model-{index + 1:05d}-of-{num_shards:05d}.safetensors" for index in range(num_shards)]
    if num_shards == 1:
        final = ["model.safetensors"]
    else:
        weight_map = {name: final[shard] for name, shard in sorted(shard_of.items())}
        index_json = {"metadata": {"total_size": num_bytes}, "weight_map": weight_map}
        write_text(folder / "model.safetensors.index.json", json.dumps(index_json, indent=2) + "\n")
    for index, name in enumerate(final):
        os.rename(unfinished(index), folder / name)
    return len(shard_of), num_bytes, num_shards


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
    check: Callable[[Path], None] | None = None,
) -> HfExport:
    """Write the model folder `out`, loadable by transformers and vLLM.

    `tensors` is consumed as a stream of (name, tensor) on any device, of which one shard is held in host memory. Pass
    each name once, and tied weights under one of their names. `dtype` casts floating-point tensors; None keeps their
    dtypes. A shard holds at most `max_shard_bytes` of tensors (a larger tensor gets its own shard). A single shard is
    named `model.safetensors`; several get an index. Configuration, tokenizer and other files without weights are
    copied from `model_files_from`; `config_changes` replaces entries of config.json, such as `architectures` for
    another head.
    `check` gets the written folder before it appears. The folder appears by rename; after an error nothing is left.

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
            num_tensors, num_bytes, num_shards = _write_shards(partial, tensors, dtype, max_shard_bytes)
            if check is not None:
                check(partial)
    except OSError as error:
        if not is_disk_full(error):
            raise
        raise no_space(error, out, "the model was written") from error
    return HfExport(path=out, num_tensors=num_tensors, num_bytes=num_bytes, num_shards=num_shards)
