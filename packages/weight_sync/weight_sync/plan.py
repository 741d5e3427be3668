"""The bucket plan: a pure function of the manifest, so that every rank and every receiver derives the same one."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .errors import ManifestError
from .manifest import DTYPE_BYTES, Manifest, TensorEntry

#: Every slot starts at a multiple of this many bytes: enough for any dtype, for checksums over 64-bit words and for
#: aligned vector loads on a GPU.
ALIGN_BYTES = 256


@dataclass(frozen=True)
class Slot:
    """Where one tensor lies in its bucket."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    offset: int
    nbytes: int
    room: int
    """Bytes reserved from ``offset``: ``nbytes``, shard padding, and filling up to the alignment."""


@dataclass(frozen=True)
class Bucket:
    """A run of consecutive slots that travels as one piece."""

    index: int
    slots: tuple[Slot, ...]
    nbytes: int


@dataclass(frozen=True)
class BucketPlan:
    """All buckets in sending order, and a digest of exactly this layout (SHA-256, hexadecimal)."""

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

    def slot_bytes(self, num_slots: int = 2) -> tuple[int, ...]:
        """Bytes each of ``num_slots`` persistent segments needs when bucket k goes to segment k modulo their number."""
        sizes = [0] * num_slots
        for bucket in self.buckets:
            sizes[bucket.index % num_slots] = max(sizes[bucket.index % num_slots], bucket.nbytes)
        return tuple(sizes)

    def to_json(self) -> dict[str, Any]:
        """The plan as plain lists, for the wire."""
        return {"digest": self.digest, "buckets": _plain(self.buckets)}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "BucketPlan":
        """Rebuild a plan from the wire, recomputing its digest.

        Raises ManifestError when the digest in ``data`` is not that of its buckets or a slot lies outside its bucket.
        """
        buckets = tuple(
            Bucket(index, tuple(Slot(n, tuple(s), d, o, b, r) for n, s, d, o, b, r in slots), nbytes)
            for index, (nbytes, slots) in enumerate(data["buckets"])
        )
        digest = _digest(buckets)
        if digest != data["digest"]:
            raise ManifestError(f"the plan's digest is {data['digest']!r} but its content gives {digest!r}")
        _check(buckets)
        return cls(buckets, digest)


def plan_buckets(manifest: Manifest, bucket_bytes: int) -> BucketPlan:
    """Pack the manifest's tensors, in order, into buckets of at most ``bucket_bytes`` bytes.

    A tensor that alone exceeds the bound gets a bucket of its own. Deterministic: it depends on nothing but its
    arguments, so ranks need not agree on anything else. Raises ManifestError for a bound below 1 byte.
    """
    if bucket_bytes < 1:
        raise ManifestError(f"bucket_bytes: {bucket_bytes} given, must be at least 1")
    groups: list[list[Slot]] = []
    used = 0
    for entry in manifest.entries:
        room = _align(entry.room_bytes)
        if not groups or used + room > bucket_bytes:
            groups.append([])
            used = 0
        groups[-1].append(_slot(entry, used, room))
        used += room
    buckets = tuple(
        Bucket(index, tuple(slots), slots[-1].offset + slots[-1].room) for index, slots in enumerate(groups)
    )
    return BucketPlan(buckets, _digest(buckets))


def _slot(entry: TensorEntry, offset: int, room: int) -> Slot:
    return Slot(entry.name, entry.shape, entry.dtype, offset, entry.num_bytes, room)


def _align(nbytes: int) -> int:
    return -(-nbytes // ALIGN_BYTES) * ALIGN_BYTES


def _plain(buckets: Sequence[Bucket]) -> list[Any]:
    return [
        [b.nbytes, [[s.name, list(s.shape), s.dtype, s.offset, s.nbytes, s.room] for s in b.slots]] for b in buckets
    ]


def _digest(buckets: Sequence[Bucket]) -> str:
    return hashlib.sha256(json.dumps(_plain(buckets), separators=(",", ":")).encode()).hexdigest()


def _check(buckets: Sequence[Bucket]) -> None:
    """Refuse a plan from the wire that would read outside its buckets or name a tensor twice."""
    entries = []
    for bucket in buckets:
        end = 0
        for slot in bucket.slots:
            entry = TensorEntry(name=slot.name, shape=slot.shape, dtype=slot.dtype)
            entries.append(entry)
            if slot.offset < end or slot.offset % DTYPE_BYTES[slot.dtype] or entry.num_bytes != slot.nbytes:
                raise ManifestError(f"{slot.name}: offset {slot.offset} or size {slot.nbytes} does not fit its shape")
            end = slot.offset + slot.room
            if slot.nbytes > slot.room or end > bucket.nbytes:
                raise ManifestError(f"{slot.name}: ends at byte {end} of a bucket of {bucket.nbytes}")
    Manifest.of(entries)
