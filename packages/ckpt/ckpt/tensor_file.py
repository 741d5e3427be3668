"""Writes a safetensors file, hashed on the way and flushed to the disk."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plinth_base.dtypes import SAFETENSORS_DTYPES

from .digest import FileEntry, HashedFile
from .files import is_disk_full, no_space

if TYPE_CHECKING:
    import torch

DTYPE_NAMES = {name: code for code, name in SAFETENSORS_DTYPES.items()}


def stored_dtype(tensor_dtype: torch.dtype) -> str | None:
    """safetensors' name of a dtype; None for one that cannot be stored."""
    return DTYPE_NAMES.get(str(tensor_dtype).removeprefix("torch."))


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> FileEntry:
    """Write a file; when it returns, it is on the disk. Raises CheckpointSpaceError, after which there is no file."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **metadata}}
    offset = 0
    # Wide types first, so that every tensor is aligned.
    ordered = sorted(tensors.items(), key=lambda item: -item[1].element_size())
    for name, tensor in ordered:
        end = offset + tensor.nbytes
        dtype, shape = stored_dtype(tensor.dtype), list(tensor.shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    head = memoryview(len(text).to_bytes(8, "little") + text)
    try:
        with HashedFile(path) as file:
            for view in itertools.chain([head], (_bytes_of(tensor) for _, tensor in ordered)):
                file.write(view)
    except OSError as error:
        path.unlink(missing_ok=True)
        if not is_disk_full(error):
            raise
        raise no_space(error, path, f"{head.nbytes + offset:,} bytes were written") from error
    return file.entry


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    import torch

    view: memoryview = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
    return view
