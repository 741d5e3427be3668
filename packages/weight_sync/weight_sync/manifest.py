"""The weight manifest: names, shapes and dtypes of the tensors to send, in order. Does not import torch."""

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

from .errors import WeightManifestError

#: Bytes of one element, by torch's name of the dtype. Only these dtypes can be sent.
DTYPE_BYTES = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}


@dataclass(frozen=True, kw_only=True)
class TensorEntry:
    """One tensor to send. ``dtype`` is torch's name, such as ``bfloat16``.

    ``padding`` is the number of elements that the trainer's shards need after the tensor (ZeRO-3 pads a parameter to a
    multiple of the world size); they are sent, and the receiver ignores them.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    padding: int = 0

    def __post_init__(self) -> None:
        if not self.name:
            raise WeightManifestError("a tensor has no name")
        if self.dtype not in DTYPE_BYTES:
            raise WeightManifestError(f"{self.name}: dtype {self.dtype!r} is not one of {', '.join(DTYPE_BYTES)}")
        if any(size < 0 for size in self.shape) or self.padding < 0:
            raise WeightManifestError(f"{self.name}: negative size in shape {self.shape} or padding {self.padding}")

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor, without padding."""
        return prod(self.shape) * DTYPE_BYTES[self.dtype]

    @property
    def padded_bytes(self) -> int:
        """Bytes of the tensor with padding, before alignment."""
        return (prod(self.shape) + self.padding) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True)
class WeightManifest:
    """The tensors of one policy in sending order. Tied weights appear once, under their first name."""

    entries: tuple[TensorEntry, ...]

    def __post_init__(self) -> None:
        seen: set[str] = set()
        for entry in self.entries:
            if entry.name in seen:
                raise WeightManifestError(f"{entry.name} appears twice; list tied weights once, under their first name")
            seen.add(entry.name)

    @classmethod
    def of(cls, entries: Iterable[TensorEntry]) -> "WeightManifest":
        """Build a manifest from an iterable of entries. Raises WeightManifestError for a name that appears twice."""
        return cls(tuple(entries))
