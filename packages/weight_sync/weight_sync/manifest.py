"""The weight manifest: names, shapes and dtypes of the tensors to send, in order. Does not import torch."""

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

from plinth_base.dtypes import DTYPE_BYTES

from .errors import WeightManifestError


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
            raise WeightManifestError("a tensor has no name", field="name", value=self.name)
        if self.dtype not in DTYPE_BYTES:
            problem = f"tensor {self.name}"
            raise WeightManifestError(problem, field="dtype", value=self.dtype, allowed=", ".join(DTYPE_BYTES))
        if any(size < 0 for size in self.shape) or self.padding < 0:
            problem = f"tensor {self.name} has a negative size or padding {self.padding}"
            raise WeightManifestError(problem, field="shape", value=self.shape)

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
                raise WeightManifestError(
                    "it appears twice",
                    field="name",
                    value=entry.name,
                    remedy="list tied weights once, under their first name",
                )
            seen.add(entry.name)

    @classmethod
    def of(cls, entries: Iterable[TensorEntry]) -> "WeightManifest":
        """Build a manifest from an iterable of entries. Raises WeightManifestError for a name that appears twice."""
        return cls(tuple(entries))
