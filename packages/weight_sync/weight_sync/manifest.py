"""What will be sent: names, shapes and dtypes, in order. Pure; no tensors, no torch."""

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

from .errors import ManifestError

#: Bytes of one element, by the name torch gives the dtype.
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
    """One tensor on the wire.

    ``padding`` counts the elements that the trainer's shard layout needs after the tensor (ZeRO-3 pads a parameter
    to a multiple of the world size); they travel, and the receiver ignores them.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    padding: int = 0

    def __post_init__(self) -> None:
        if not self.name:
            raise ManifestError("a tensor without a name")
        if self.dtype not in DTYPE_BYTES:
            raise ManifestError(f"{self.name}: dtype {self.dtype!r} is not one of {', '.join(DTYPE_BYTES)}")
        if any(size < 0 for size in self.shape) or self.padding < 0:
            raise ManifestError(f"{self.name}: negative size in shape {self.shape} or padding {self.padding}")

    @property
    def numel(self) -> int:
        """Number of elements, without padding."""
        return prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor, without padding."""
        return self.numel * DTYPE_BYTES[self.dtype]

    @property
    def room_bytes(self) -> int:
        """Bytes the tensor takes in a bucket: with padding, before alignment."""
        return (self.numel + self.padding) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True)
class Manifest:
    """The tensors of one policy in the order they are sent. Tied weights appear once, under their first name."""

    entries: tuple[TensorEntry, ...]

    def __post_init__(self) -> None:
        seen: set[str] = set()
        for entry in self.entries:
            if entry.name in seen:
                raise ManifestError(f"{entry.name} appears twice; tied weights are listed once, under their first name")
            seen.add(entry.name)

    @classmethod
    def of(cls, entries: Iterable[TensorEntry]) -> "Manifest":
        """Build from any iterable of entries."""
        return cls(tuple(entries))

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors, without padding."""
        return sum(entry.num_bytes for entry in self.entries)
