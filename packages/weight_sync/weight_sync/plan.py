"""The bucket plan: a pure function of the manifest, so that every rank and every receiver derives the same plan."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from plinth_base.dtypes import DTYPE_BYTES

from .errors import WeightManifestError
from .manifest import TensorEntry, WeightManifest

#: Every slot starts at a multiple of this many bytes. Enough for any dtype, for checksums over 64-bit words and for
#: aligned vector loads on a GPU.
ALIGN_BYTES = 256

#: Persistent buffers of a transport: the pusher fills one while the receivers read the other.
NUM_BUFFERS = 2


@dataclass(frozen=True)
class Slot:
    """Position of one tensor in its bucket."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    offset: int
    """First byte in the bucket."""
    nbytes: int
    reserved_bytes: int
    """Bytes reserved from ``offset``: ``nbytes``, shard padding, and alignment."""

    @property
    def numel(self) -> int:
        """Number of elements, without padding."""
        return prod(self.shape)


@dataclass(frozen=True)
class Bucket:
    """Consecutive slots that are sent together."""

    index: int
    slots: tuple[Slot, ...]
    nbytes: int


@dataclass(frozen=True)
class BucketPlan:
    """All buckets in sending order, and the SHA-256 digest (hexadecimal) of this layout."""

    buckets: tuple[Bucket, ...]
    digest: str

    @property
    def num_tensors(self) -> int:
        """Number of tensors in all buckets."""
        return sum(len(bucket.slots) for bucket in self.buckets)

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors, without padding or alignment."""
        return sum(slot.nbytes for bucket in self.buckets for slot in bucket.slots)

    def buffer_bytes(self) -> list[int]:
        """Bytes of each persistent buffer; bucket ``k`` uses buffer ``k % NUM_BUFFERS``. Never 0."""
        used = (self.buckets[index::NUM_BUFFERS] for index in range(min(NUM_BUFFERS, len(self.buckets))))
        return [max(ALIGN_BYTES, *(bucket.nbytes for bucket in buckets)) for buckets in used]

    def to_json(self) -> dict[str, Any]:
        """The plan as plain lists, for the wire."""
        return {"digest": self.digest, "buckets": _as_lists(self.buckets)}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "BucketPlan":
        """Rebuild a plan from the wire and recompute its digest.

        Raises WeightManifestError when ``data`` is no plan, its digest differs or a slot lies outside its bucket.
        """
        try:
            buckets = tuple(
                Bucket(index, tuple(Slot(n, tuple(s), d, o, b, r) for n, s, d, o, b, r in slots), nbytes)
                for index, (nbytes, slots) in enumerate(data["buckets"])
            )
            announced, digest = data["digest"], _digest(buckets)
            if digest != announced:
                raise WeightManifestError(f"its content gives {digest!r}", field="digest", value=announced)
            _check(buckets)
        except (LookupError, TypeError, AttributeError, RecursionError, ValueError) as error:
            if isinstance(error, WeightManifestError):
                raise
            raise WeightManifestError(f"this is no plan: {type(error).__name__}: {error}") from error
        return cls(buckets, digest)


def plan_buckets(manifest: WeightManifest, bucket_bytes: int) -> BucketPlan:
    """Pack the manifest's tensors, in order, into buckets of at most ``bucket_bytes`` bytes.

    A larger tensor gets a bucket of its own. Deterministic, so ranks need not agree on anything else. Raises
    WeightManifestError for a bound below 1 byte.
    """
    if bucket_bytes < 1:
        raise WeightManifestError(field="bucket_bytes", value=bucket_bytes, allowed="at least 1")
    groups: list[list[Slot]] = []
    used = 0
    for entry in manifest.entries:
        reserved = -(-entry.padded_bytes // ALIGN_BYTES) * ALIGN_BYTES
        if not groups or used + reserved > bucket_bytes:
            groups.append([])
            used = 0
        groups[-1].append(Slot(entry.name, entry.shape, entry.dtype, used, entry.num_bytes, reserved))
        used += reserved
    buckets = tuple(
        Bucket(index, tuple(slots), slots[-1].offset + slots[-1].reserved_bytes) for index, slots in enumerate(groups)
    )
    return BucketPlan(buckets, _digest(buckets))


def _as_lists(buckets: Sequence[Bucket]) -> list[Any]:
    return [
        [b.nbytes, [[s.name, list(s.shape), s.dtype, s.offset, s.nbytes, s.reserved_bytes] for s in b.slots]]
        for b in buckets
    ]


def _digest(buckets: Sequence[Bucket]) -> str:
    return hashlib.sha256(json.dumps(_as_lists(buckets), separators=(",", ":")).encode()).hexdigest()


def _check(buckets: Sequence[Bucket]) -> None:
    """Reject a plan from the wire that would read outside its buckets or name a tensor twice."""
    entries = []
    for bucket in buckets:
        sizes = [n for slot in bucket.slots for n in (*slot.shape, slot.offset, slot.nbytes, slot.reserved_bytes)]
        if any(type(size) is not int for size in (bucket.nbytes, *sizes)):  # JSON has NaN, which compares as fitting
            raise WeightManifestError(field=f"buckets.{bucket.index}", allowed="sizes that are whole numbers")
        end = 0
        for slot in bucket.slots:
            entry = TensorEntry(name=slot.name, shape=slot.shape, dtype=slot.dtype)
            entries.append(entry)
            if slot.offset < end or slot.offset % DTYPE_BYTES[slot.dtype] or entry.num_bytes != slot.nbytes:
                problem = f"offset {slot.offset} or size {slot.nbytes} does not fit its shape"
                raise WeightManifestError(problem, field=slot.name)
            end = slot.offset + slot.reserved_bytes
            if slot.nbytes > slot.reserved_bytes or end > bucket.nbytes:
                raise WeightManifestError(f"ends at byte {end} of a bucket of {bucket.nbytes}", field=slot.name)
    WeightManifest.of(entries)
