"""State dicts as safetensors files: nested dicts, lists and tuples of tensors and plain values, without pickle.

A file holds the tensors under readable dotted names, so that any safetensors reader sees them, and in its metadata the
structure around them as JSON. A tensor that appears twice (tied weights) is stored once and comes back as one tensor.
"""

from __future__ import annotations

import base64
import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..digest import write_hashed
from ..errors import CheckpointNotFoundError, CheckpointSpaceError, CheckpointStateError
from ..files import is_disk_full
from ..hf_export import DTYPE_NAMES
from ..manifest import FileEntry
from .host_copying import HostCopying

if TYPE_CHECKING:
    import torch

__all__ = ["HostSnapshot", "load_state_dict", "save_state_dict"]

_STRUCTURE_KEY = "plinth_ckpt_structure"


@dataclass
class _Flat:
    """A state dict taken apart: `structure` as JSON holds the names of the `tensors`."""

    structure: Any = None
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    _seen: dict[tuple[Any, ...], str] = field(default_factory=dict)

    @classmethod
    def of(cls, tree: Any) -> _Flat:
        flat = cls()
        flat.structure = flat._encode(tree, "")
        return flat

    def _encode(self, value: Any, path: str) -> Any:
        import torch

        if value is None or isinstance(value, bool | int | float | str):
            return value
        if isinstance(value, torch.Tensor):
            return {"tensor": self._add(value, path)}
        if isinstance(value, Mapping):
            for key in value:
                if not (key is None or isinstance(key, bool | int | float | str)):
                    raise CheckpointStateError(f"{path or 'state dict'}: the key {key!r} is no string or number")
            return {"dict": [[key, self._encode(item, _join(path, key))] for key, item in value.items()]}
        if isinstance(value, list | tuple):
            items = [self._encode(item, _join(path, index)) for index, item in enumerate(value)]
            return {"list" if isinstance(value, list) else "tuple": items}
        if isinstance(value, bytes):
            return {"bytes": base64.b64encode(value).decode()}
        raise CheckpointStateError(
            f"{path or 'state dict'}: a {type(value).__module__}.{type(value).__qualname__} cannot be stored. Use "
            "tensors, dict, list, tuple, str, bytes, int, float, bool and None."
        )

    def _add(self, tensor: torch.Tensor, path: str) -> str:
        import torch

        dtype = str(tensor.dtype).removeprefix("torch.")
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout != torch.strided:
            raise CheckpointStateError(
                f"{path}: a {type(tensor).__name__} of layout {tensor.layout} cannot be stored. Gather a DTensor with "
                "full_tensor() or store its to_local(); make a sparse tensor dense."
            )
        if dtype not in DTYPE_NAMES:
            raise CheckpointStateError(f"{path}: {tensor.dtype} cannot be stored; use one of {', '.join(DTYPE_NAMES)}")
        where = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
        if tensor.numel() and where in self._seen:
            return self._seen[where]
        name, number = path or "tensor", 1
        while name in self.tensors or name == "__metadata__":
            number += 1
            name = f"{path}#{number}"
        self._seen[where] = name
        self.tensors[name] = tensor.detach()
        return name


def _join(path: str, key: object) -> str:
    return f"{path}.{key}" if path else str(key)


def _decode(node: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    if not isinstance(node, dict):
        return node
    ((kind, content),) = node.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "dict":
        return {key: _decode(item, tensors) for key, item in content}
    if kind == "bytes":
        return base64.b64decode(content)
    if kind not in ("list", "tuple"):
        raise ValueError(f"unknown kind {kind!r}")
    items = [_decode(item, tensors) for item in content]
    return items if kind == "list" else tuple(items)


class HostSnapshot:
    """A copy of a state dict in host memory, taken as fast as memory allows and kept for the next one to reuse.

    Buffers for tensors of a CUDA device are pinned. The first copy pays for the memory; the next of the same shapes
    only copy.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, torch.Tensor] = {}
        self._flat = _Flat()
        self._copying = HostCopying()

    @property
    def num_bytes(self) -> int:
        """Size of the tensors held."""
        return sum(tensor.nbytes for tensor in self._flat.tensors.values())

    def take(self, tree: Any) -> None:
        """Note `tree` and begin to copy its CUDA tensors. Raises CheckpointStateError."""
        flat = _Flat.of(tree)
        self._copying = HostCopying()
        copies = {name: self._copying.begin(tensor, self._buffers.get(name)) for name, tensor in flat.tensors.items()}
        self._buffers = copies
        self._flat = _Flat(structure=flat.structure, tensors=copies)

    def copy(self) -> None:
        """Copy what is left; when it returns, the originals may change."""
        self._copying.finish()

    def write(self, path: Path) -> FileEntry:
        """Write the snapshot to a file, as `save_state_dict` does."""
        return _write(self._flat, path)


def save_state_dict(path: Path, tree: Any) -> FileEntry:
    """Write `tree` to the safetensors file `path`: nested dict, list, tuple, tensors, str, bytes, numbers, None.

    Dict keys are strings, numbers or None. Returns, with the file on the disk, its size and checksum, computed while
    it was written: given to `CheckpointManager.publish` as one of `entries` they spare it reading the file again.
    Raises CheckpointStateError, with the dotted path of what cannot be stored.
    """
    return _write(_Flat.of(tree), Path(path))


def load_state_dict(path: Path, *, device: str = "cpu") -> Any:
    """What `save_state_dict` wrote to `path`: tensors on `device`, bit for bit, and the structure around them.

    Executes nothing from the file. Raises CheckpointNotFoundError when there is no such file, CheckpointStateError
    when another program wrote it.
    """
    from safetensors import SafetensorError, safe_open

    if not Path(path).is_file():
        raise CheckpointNotFoundError(f"{path}: no such file")
    try:
        with safe_open(path, "pt", device=device) as file:
            metadata = file.metadata() or {}
            if _STRUCTURE_KEY not in metadata:
                raise CheckpointStateError(f"{path}: was not written by save_state_dict; it lacks the structure")
            tensors = {name: file.get_tensor(name) for name in list(file.keys())}
            try:
                return _decode(json.loads(metadata[_STRUCTURE_KEY]), tensors)
            except (ValueError, TypeError, KeyError, RecursionError) as error:
                raise CheckpointStateError(f"{path}: its structure is none of save_state_dict's: {error}") from error
    except SafetensorError as error:
        raise CheckpointStateError(f"{path}: is no whole safetensors file: {error}") from error


def _write(flat: _Flat, path: Path) -> FileEntry:
    header: dict[str, Any] = {"__metadata__": {"format": "pt", _STRUCTURE_KEY: json.dumps(flat.structure)}}
    offset = 0
    # Wide types first, so that every tensor starts aligned.
    ordered = sorted(flat.tensors.items(), key=lambda item: -item[1].element_size())
    for name, tensor in ordered:
        dtype_name = DTYPE_NAMES[str(tensor.dtype).removeprefix("torch.")]
        end = offset + tensor.nbytes
        header[name] = {"dtype": dtype_name, "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    head = memoryview(len(text).to_bytes(8, "little") + text)
    num_bytes = head.nbytes + offset
    try:
        sha256 = write_hashed(path, itertools.chain([head], (_bytes_of(tensor) for _, tensor in ordered)), num_bytes)
    except OSError as error:
        path.unlink(missing_ok=True)
        if not is_disk_full(error):
            raise
        raise CheckpointSpaceError(
            f"{path}: {error.strerror} while {num_bytes:,} bytes were written; the file is deleted"
        ) from error
    return FileEntry(num_bytes=num_bytes, sha256=sha256)


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    import torch

    view: memoryview = tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
    return view
