"""Source for the safetensors files of a Hugging Face model folder."""

import json
import struct
from pathlib import Path

import torch
from torch import Tensor

from ..errors import SourceError
from ..manifest import TensorEntry, WeightManifest
from ..plan import Bucket
from .base import staged

_TORCH_NAMES = {
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


class HfFolderSource:
    """The safetensors files of a Hugging Face model folder, sent unchanged. Raises SourceError for unreadable files."""

    def __init__(self, path: str | Path) -> None:
        self._files: dict[str, tuple[Path, int]] = {}
        entries = []
        paths = [file for file in sorted(Path(path).glob("*.safetensors")) if file.is_file()]
        if not paths:
            raise SourceError("the folder has no *.safetensors file", value=str(path))
        for file in paths:
            for name, shape, dtype, start in _read_header(file):
                self._files[name] = (file, start)
                entries.append(TensorEntry(name=name, shape=shape, dtype=dtype))
        self._manifest = WeightManifest.of(entries)

    def manifest(self) -> WeightManifest:
        """The tensors of all files: files by name, tensors by position in the file."""
        return self._manifest

    def fill(self, bucket: Bucket, out: Tensor | None) -> None:
        """Raises SourceError when a file is shorter than its header says."""
        if out is None:
            return
        with staged(bucket, out, torch.device("cpu")) as host:
            for slot in bucket.slots:
                file, start = self._files[slot.name]
                with file.open("rb") as stream:
                    stream.seek(start)
                    target = memoryview(host[slot.offset : slot.offset + slot.nbytes].numpy().data)
                    if stream.readinto(target) != slot.nbytes:
                        raise SourceError(f"the file ends within {slot.name}", value=str(file))


def _read_header(file: Path) -> list[tuple[str, tuple[int, ...], str, int]]:
    """(name, shape, dtype, first byte in the file) of each tensor, by position."""
    with file.open("rb") as stream:
        head = stream.read(8)
        size = struct.unpack("<Q", head)[0] if len(head) == 8 else 0
        if not 0 < size <= file.stat().st_size - 8:
            raise SourceError("not a safetensors file", value=str(file))
        text = stream.read(size)
    tensors = []
    name, end = "the header", file.stat().st_size - 8 - size
    try:
        for name, info in json.loads(text).items():
            if name == "__metadata__":
                continue
            first, last = info["data_offsets"]
            if info["dtype"] not in _TORCH_NAMES:
                raise SourceError(f"{name} has dtype {info['dtype']}, which cannot be sent", value=str(file))
            entry = TensorEntry(name=name, shape=tuple(info["shape"]), dtype=_TORCH_NAMES[info["dtype"]])
            if not 0 <= first <= last <= end or last - first != entry.num_bytes:
                raise SourceError(f"{name} lies at bytes {first} to {last} of {end}", value=str(file))
            tensors.append((name, entry.shape, entry.dtype, 8 + size + first))
    except (LookupError, TypeError, AttributeError, RecursionError, ValueError) as error:
        problem = f"{name} cannot be read: {type(error).__name__}: {error}"
        raise SourceError(problem, value=str(file)) from error
    return sorted(tensors, key=lambda item: item[3])
