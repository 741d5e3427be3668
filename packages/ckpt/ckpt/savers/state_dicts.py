"""Stores state dicts as safetensors files: nested dicts, lists and tuples of tensors and plain values, no pickle.

A file holds the tensors under dotted names, which any safetensors reader can list, and in its metadata the nesting as
JSON. A tensor that appears twice (tied weights) is stored once and loaded as one tensor.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..digest import FileEntry
from ..errors import CheckpointNotFoundError, CheckpointStateError
from ..tensor_file import DTYPE_NAMES, stored_dtype, write_tensors
from .capture import HostTree, tensor_identity

if TYPE_CHECKING:
    import torch


_STRUCTURE_KEY = "plinth_ckpt_structure"


@dataclass
class _Flat:
    """A flattened state dict: `structure` is its nesting as JSON and refers to `tensors` by name."""

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
                    raise CheckpointStateError(field=path or None, value=key, allowed="string and number keys")
            return {"dict": [[key, self._encode(item, _join(path, key))] for key, item in value.items()]}
        if isinstance(value, list | tuple):
            items = [self._encode(item, _join(path, index)) for index, item in enumerate(value)]
            return {"list" if isinstance(value, list) else "tuple": items}
        if isinstance(value, bytes):
            return {"bytes": base64.b64encode(value).decode()}
        raise CheckpointStateError(
            f"a {type(value).__module__}.{type(value).__qualname__} cannot be stored",
            field=path or None,
            allowed="tensors, dict, list, tuple, str, bytes, int, float, bool and None",
        )

    def _add(self, tensor: torch.Tensor, path: str) -> str:
        import torch

        if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout != torch.strided:
            raise CheckpointStateError(
                f"a {type(tensor).__name__} of layout {tensor.layout} cannot be stored",
                field=path or None,
                remedy="gather a DTensor with full_tensor() or store its to_local(); make a sparse tensor dense",
            )
        if stored_dtype(tensor.dtype) is None:
            raise CheckpointStateError(
                f"{tensor.dtype} cannot be stored", field=path or None, allowed=", ".join(DTYPE_NAMES)
            )
        identity = tensor_identity(tensor)
        if tensor.numel() and identity in self._seen:
            return self._seen[identity]
        name, number = path or "tensor", 1
        while name in self.tensors or name == "__metadata__":
            number += 1
            name = f"{path}#{number}"
        self._seen[identity] = name
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


class HostSnapshot(HostTree):
    """A copy of a state dict in host memory that can be stored."""

    def take(self, tree: Any) -> None:
        """Copies everything except host tensors, which `copy` copies. Raises CheckpointStateError before it does."""
        _Flat.of(tree)
        super().take(tree)

    def write(self, path: Path) -> FileEntry:
        """Write the copy to a file, as `save_state_dict` does."""
        return save_state_dict(path, self.tree)


def save_state_dict(path: Path, tree: Any) -> FileEntry:
    """Write `tree` to the safetensors file `path`: nested dict, list, tuple, tensors, str, bytes, numbers, None.

    Dict keys are strings, numbers or None. When it returns, the file is on the disk. Returns the file's size and its
    checksum, which was computed while writing; pass them to `CheckpointManager.publish` in `entries`, which then does
    not read the file again. Raises CheckpointStateError with the dotted path of a value that cannot be stored.
    """
    flat = _Flat.of(tree)
    return write_tensors(Path(path), flat.tensors, {_STRUCTURE_KEY: json.dumps(flat.structure)})


def load_state_dict(path: Path, *, device: str = "cpu") -> Any:
    """The tree that `save_state_dict` wrote to `path`, bit for bit, with its tensors on `device`.

    Executes nothing from the file. Raises CheckpointNotFoundError when the file does not exist, CheckpointStateError
    when `save_state_dict` did not write it.
    """
    from safetensors import SafetensorError, safe_open

    if not Path(path).is_file():
        raise CheckpointNotFoundError("no such file", field="path", value=str(path))
    try:
        with safe_open(path, "pt", device=device) as file:
            metadata = file.metadata() or {}
            if _STRUCTURE_KEY not in metadata:
                raise CheckpointStateError(
                    "was not written by save_state_dict: it lacks the structure", field="path", value=str(path)
                )
            tensors = {name: file.get_tensor(name) for name in list(file.keys())}
            try:
                return _decode(json.loads(metadata[_STRUCTURE_KEY]), tensors)
            except (ValueError, TypeError, KeyError, RecursionError) as error:
                raise CheckpointStateError(
                    f"its structure is invalid: {error}", field="path", value=str(path)
                ) from error
    except SafetensorError as error:
        problem = f"is not a complete safetensors file: {error}"
        raise CheckpointStateError(problem, field="path", value=str(path)) from error
