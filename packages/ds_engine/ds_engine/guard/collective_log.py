"""Log of the collectives of a process group, and pure functions that compare the logs of its ranks.

The signature of a collective consists of everything that must be equal on all ranks: operation, dtype, number of
elements and the source line of the call. It omits the line for operations with a root, which programs often call from
two branches, and the size where ranks may have different ones.
"""

from __future__ import annotations

import sys
import zlib
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

ROOTED = frozenset({"broadcast", "reduce", "gather", "scatter"})
"""Operations with a root: compared without their call site."""

METHODS: dict[str, int | None] = {
    **dict.fromkeys(("allgather", "allreduce", "broadcast", "reduce", "scatter"), 0),
    **dict.fromkeys(("allgather_coalesced", "allreduce_coalesced"), 0),
    **dict.fromkeys(("gather", "reduce_scatter"), 1),
    **dict.fromkeys(("_allgather_base|all_gather_single", "_reduce_scatter_base|reduce_scatter_single"), 1),
    "allgather_into_tensor_coalesced|all_gather_single_coalesced": 1,
    "reduce_scatter_tensor_coalesced|reduce_scatter_single_coalesced": 1,
    **dict.fromkeys(("alltoall", "alltoall_base|all_to_all_single", "barrier"), None),
}
"""Collective methods of torch's ProcessGroup, "a|b" for one that torch renamed, with the positional argument that has
the same number of elements on every rank. Point-to-point calls are not compared: they have no common order."""
SIZED_BY = {name: position for names, position in METHODS.items() for name in names.split("|")}

_NAMES = {
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "_allgather_base": "all_gather_into_tensor",
    "all_gather_single": "all_gather_into_tensor",
    "_reduce_scatter_base": "reduce_scatter_tensor",
    "reduce_scatter_single": "reduce_scatter_tensor",
}
_PLUMBING = (
    "torch/distributed/",
    "torch/utils/_contextlib",
    "deepspeed/comm/",
    "deepspeed/utils/nvtx",
    "typing_extensions",
    "ds_engine/guard/collective_",
    "plinth_base/fence",
)


@dataclass(frozen=True)
class CollectiveRecord:
    """One collective of one rank."""

    index: int
    """Index of the collective in its group, from 0."""
    operation: str
    dtype: str
    num_elements: int
    """Elements of the tensor whose size must be equal on all ranks; 0 if there is none."""
    site: str
    """Source line of the call: "file:line in function"."""
    label: str = ""
    """Label set by `mark`, such as a step and a micro batch."""

    @property
    def signature(self) -> str:
        """Text that must be equal on every rank."""
        site = "" if self.operation in ROOTED else self.site
        return f"{self.operation}|{self.dtype}|{self.num_elements}|{site}"

    def __str__(self) -> str:
        size = f" of {self.num_elements} {self.dtype}" if self.num_elements else ""
        during = f" during {self.label}" if self.label else ""
        return f"{self.operation}{size} at {self.site}{during}"


class GroupLog:
    """Collectives of one rank in one group: their number, a hash over all of them, and the last `keep` records."""

    def __init__(self, *, keep: int = 512) -> None:
        self.count = 0
        self.recent: deque[CollectiveRecord] = deque(maxlen=keep)
        self._hashes: deque[tuple[int, int]] = deque(maxlen=keep)
        self._hash = 0

    def append(self, operation: str, dtype: str, num_elements: int, site: str, label: str = "") -> CollectiveRecord:
        """Log one collective."""
        record = CollectiveRecord(self.count, operation, dtype, num_elements, site, label)
        self._hash = zlib.crc32(record.signature.encode(), self._hash)
        self.recent.append(record)
        self._hashes.append((self.count + 1, self._hash))
        self.count += 1  # last, because another thread reads records below count
        return record

    def hash_at(self, count: int) -> int | None:
        """Hash over the first `count` collectives; None if it is no longer kept, or not reached yet."""
        if count == 0:
            return 0
        if not self._hashes or not self._hashes[0][0] <= count <= self.count:
            return None
        at_count, value = self._hashes[count - self._hashes[0][0]]
        return value if at_count == count else None  # another thread may have appended meanwhile


@dataclass(frozen=True, kw_only=True)
class RankDump:
    """State of one rank's log and main thread, for the diagnosis of a failure."""

    rank: int
    count: int
    records: tuple[CollectiveRecord, ...]
    idle_s: float
    """Seconds since its last collective in the group."""
    position: str
    """Source line of the main thread."""

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> RankDump:
        """Inverse of `asdict`, after JSON."""
        records = tuple(CollectiveRecord(**record) for record in value["records"])
        return cls(**{**value, "records": records})


def describe_call(method: str, args: Sequence[Any]) -> tuple[str, str, int]:
    """(operation, dtype, elements) of a call `group.method(*args)` on torch's ProcessGroup."""
    position = SIZED_BY[method]
    dtype, num_elements = "", 0
    for tensor in _tensors(args[position if position is not None else 0] if args else None):
        dtype = _dtype_name(tensor.dtype)
        if position is not None:
            num_elements += tensor.numel()
    return _NAMES.get(method, method), dtype, num_elements


def _tensors(value: Any) -> list[Any]:
    if isinstance(value, list | tuple):
        return [tensor for item in value for tensor in _tensors(item)]
    return [value] if hasattr(value, "numel") else []


# Cached because every guarded collective calls these three with the same few files, lines and dtypes.
@cache
def _dtype_name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


@cache
def _is_plumbing(file: str) -> bool:
    return any(part in file for part in _PLUMBING)


@cache
def _site(file: str, line: int, function: str) -> str:
    path = file.rsplit("site-packages/", 1)[-1]
    return f"{'/'.join(path.split('/')[-3:])}:{line} in {function}"


def call_site() -> str:
    """The innermost source line outside of torch.distributed, deepspeed.comm and this package's guard."""
    frame = sys._getframe(1)
    while frame.f_back is not None and _is_plumbing(frame.f_code.co_filename):
        frame = frame.f_back
    return _site(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)


def diagnose(group: str, ranks: Sequence[int], dumps: Mapping[int, RankDump]) -> tuple[str, bool]:
    """Explain a failure.

    Args:
        ranks: global ranks of the group.
        dumps: of the ranks that answered.

    Returns:
        (one sentence for the user, True if ranks diverged or False if a rank stalled)
    """
    silent = [rank for rank in ranks if rank not in dumps]
    where = f"in group {group!r} of ranks {list(ranks)}"
    split = _first_difference(list(dumps.values()))
    if split is not None:
        index, callers = split
        parts = [f"{_ranks(members)} called {record}" for record, members in callers]
        return f"ranks diverge {where} at collective {index}: {'; '.join(parts)}", True
    if silent:
        parts = [f"rank {d.rank} waits in {d.records[-1]}" for d in dumps.values() if d.records]
        return (
            f"{_ranks(silent)} no longer answer(s) {where}: the process ended or is frozen; {'; '.join(parts)}",
            False,
        )
    behind = min(dump.count for dump in dumps.values())
    if all(dump.count == behind for dump in dumps.values()):
        return f"no rank makes progress {where}, yet all issued the same {behind} collectives", False
    parts = []
    for dump in dumps.values():
        if dump.count == behind:
            last = f"after collective {dump.count - 1} ({dump.records[-1]})" if dump.records else "before its first"
            parts.append(f"rank {dump.rank} has issued none for {dump.idle_s:.0f} s {last} and is at {dump.position}")
    for dump in dumps.values():
        if dump.count > behind:
            record = next((str(r) for r in dump.records if r.index == behind), "(no longer logged)")
            parts.append(f"rank {dump.rank} waits in collective {behind}: {record}")
    return f"{where[3:]} is stalled: {'; '.join(parts)}", False


def _first_difference(
    dumps: Sequence[RankDump],
) -> tuple[int, list[tuple[CollectiveRecord, list[int]]]] | None:
    """The first collective that differs between ranks, with each version and the ranks that called it."""
    by_index: dict[int, list[tuple[CollectiveRecord, int]]] = {}
    for dump in dumps:
        for record in dump.records:
            by_index.setdefault(record.index, []).append((record, dump.rank))
    for index in sorted(by_index):
        callers: dict[str, tuple[CollectiveRecord, list[int]]] = {}
        for record, rank in by_index[index]:
            callers.setdefault(record.signature, (record, []))[1].append(rank)
        if len(callers) > 1:
            return index, list(callers.values())
    return None


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
