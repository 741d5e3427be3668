"""Where the weights come from: a plain module, or a Hugging Face folder. ZeRO has a module of its own.

A source names its tensors once (``manifest``) and then fills buckets on request. ``fill`` is a collective: every rank
calls it for every bucket in the same order; only the sending rank passes an ``out``.
"""

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

from ..errors import SourceError
from ..manifest import Manifest, TensorEntry
from ..plan import Bucket, Slot


class WeightSource(Protocol):
    """What the pusher needs from the trainer's side."""

    def manifest(self) -> Manifest:
        """The tensors, by Hugging Face name, in sending order. The same on every rank."""

    def fill(self, bucket: Bucket, out: Tensor | None) -> None:
        """Write the bucket's tensors into ``out`` (uint8, 1-D, at least ``bucket.nbytes`` long, any device).

        Every rank calls it; ``out`` is None where nothing is sent from. The bytes are in place when it returns, or
        are ordered before later work on the current stream of ``out``'s device.
        """


def dtype_name(dtype: torch.dtype) -> str:
    """``torch.bfloat16`` -> ``bfloat16``."""
    return str(dtype).removeprefix("torch.")


def torch_dtype(name: str) -> torch.dtype:
    """``bfloat16`` -> ``torch.bfloat16``. Raises SourceError for anything else."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise SourceError(f"unknown dtype {name!r}")
    return dtype


def slot_view(bytes_N: Tensor, slot: Slot) -> Tensor:
    """The slot's tensor inside its bucket, as a view with the slot's shape and dtype."""
    return bytes_N[slot.offset : slot.offset + slot.nbytes].view(torch_dtype(slot.dtype)).view(slot.shape)


class ModuleSource:
    """The parameters of a plain module that is whole on every rank; DTensors (FSDP2) are gathered one by one.

    ``dtype`` casts floating-point parameters on the wire. ``rename`` maps the module's names to those on the wire and
    leaves a parameter out by answering None. Tied parameters appear once, under their first name.
    """

    def __init__(
        self, module: nn.Module, dtype: torch.dtype | None = None, rename: Callable[[str], str | None] | None = None
    ) -> None:
        self._dtype = dtype
        self._module = module
        self._rename = rename or (lambda name: name)
        self._params: dict[str, nn.Parameter] = {}

    def manifest(self) -> Manifest:
        """Names, full shapes and wire dtypes of the module's parameters."""
        return Manifest.of(
            TensorEntry(name=name, shape=tuple(param.shape), dtype=dtype_name(wire_dtype(param, self._dtype)))
            for name, param in self._named().items()
        )

    def fill(self, bucket: Bucket, out: Tensor | None) -> None:
        """See WeightSource. Raises SourceError when the module lost a parameter or it changed its shape."""
        if bucket.index == 0 or not self._params:
            self._params = self._named()  # once a pass: walking a large module takes a millisecond
        params = [self._params.get(slot.name) for slot in bucket.slots]
        like = next((param for param in params if param is not None), torch.empty(0))
        to: list[Tensor] = []
        whole: list[Tensor] = []
        with torch.no_grad(), Staging(bucket, out, like) as stage:
            for slot, param in zip(bucket.slots, params, strict=True):
                if param is None or tuple(param.shape) != slot.shape:
                    found = "is gone" if param is None else f"has shape {tuple(param.shape)}"
                    raise SourceError(f"{slot.name}: planned with shape {slot.shape}, now {found}")
                full = param.full_tensor() if hasattr(param, "full_tensor") else param
                if stage.bytes_N is not None:
                    to.append(slot_view(stage.bytes_N, slot))
                    whole.append(full.detach())
            if to:
                torch._foreach_copy_(to, whole)

    def _named(self) -> dict[str, nn.Parameter]:
        named = ((self._rename(name), param) for name, param in self._module.named_parameters())
        return {name: param for name, param in named if name is not None}


class HfFolderSource:
    """The safetensors files of a Hugging Face model folder, sent as they are."""

    def __init__(self, path: str | Path) -> None:
        self._files: dict[str, tuple[Path, int]] = {}
        entries = []
        paths = sorted(Path(path).glob("*.safetensors"))
        if not paths:
            raise SourceError(f"{path}: no *.safetensors file")
        for file in paths:
            for name, shape, dtype, start in _read_header(file):
                self._files[name] = (file, start)
                entries.append(TensorEntry(name=name, shape=shape, dtype=dtype))
        self._manifest = Manifest.of(entries)

    def manifest(self) -> Manifest:
        """The tensors of all files, in file order, each file in the order of its bytes."""
        return self._manifest

    def fill(self, bucket: Bucket, out: Tensor | None) -> None:
        """See WeightSource. Raises SourceError when a file is shorter than its header says."""
        if out is None:
            return
        host = out if out.device.type == "cpu" else torch.empty(bucket.nbytes, dtype=torch.uint8)
        for slot in bucket.slots:
            file, start = self._files[slot.name]
            with file.open("rb") as stream:
                stream.seek(start)
                target = memoryview(host[slot.offset : slot.offset + slot.nbytes].numpy().data)
                if stream.readinto(target) != slot.nbytes:
                    raise SourceError(f"{file}: ends in the middle of {slot.name}")
        if host is not out:
            out[: bucket.nbytes].copy_(host)


class Staging:
    """A bucket assembled where its tensors live and moved to ``out`` in one copy when that is another device."""

    def __init__(self, bucket: Bucket, out: Tensor | None, like: Tensor) -> None:
        self._bucket = bucket
        self._out = out
        self.bytes_N = out
        if out is not None and out.device.type != like.device.type:
            self.bytes_N = torch.empty(bucket.nbytes, dtype=torch.uint8, device=like.device)

    def __enter__(self) -> "Staging":
        return self

    def __exit__(self, exc_type: object, *rest: object) -> None:
        if exc_type is None and self._out is not None and self.bytes_N is not None and self.bytes_N is not self._out:
            self._out[: self._bucket.nbytes].copy_(self.bytes_N)


def wire_dtype(param: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    """The dtype a parameter travels in: casts concern floating-point tensors only."""
    return dtype if dtype is not None and param.dtype.is_floating_point else param.dtype


_SAFETENSORS_DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}


def _read_header(file: Path) -> list[tuple[str, tuple[int, ...], str, int]]:
    """(name, shape, dtype, first byte in the file) of each tensor, by position."""
    with file.open("rb") as stream:
        head = stream.read(8)
        size = struct.unpack("<Q", head)[0] if len(head) == 8 else 0
        if not 0 < size <= file.stat().st_size - 8:
            raise SourceError(f"{file}: not a safetensors file")
        header = json.loads(stream.read(size))
    found = []
    for name, info in header.items():
        if name == "__metadata__":
            continue
        if info["dtype"] not in _SAFETENSORS_DTYPES:
            raise SourceError(f"{file}: {name} has dtype {info['dtype']}, which cannot be sent")
        dtype = _SAFETENSORS_DTYPES[info["dtype"]]
        found.append((name, tuple(info["shape"]), dtype, 8 + size + int(info["data_offsets"][0])))
    return sorted(found, key=lambda item: item[3])
