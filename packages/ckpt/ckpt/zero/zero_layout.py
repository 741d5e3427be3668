"""Computes where ZeRO stores the elements of a parameter: arithmetic on sizes, without tensors or files.

Every rank has flat buffers, one per parameter group (stage 3: one per piece of a group). They hold

- at stages 1 and 2 the group's parameters end to end (with padding in between if specified), cut into one range per
  rank; the ranges of the last ranks may be shorter or empty, whether or not the padding at the end is stored;
- at stage 3 the rank's range of each parameter, one after the other: a parameter of n elements is cut into ranges of
  ceil(n / ranks), the last one padded.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ..errors import ShardError

Shape = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Span:
    """Elements [start, stop) of `rank`'s flat buffer number `buffer`."""

    rank: int
    buffer: int
    start: int
    stop: int


@dataclass(frozen=True, kw_only=True)
class ZeroLayout:
    """Layout of the trained parameters in the ranks' buffers."""

    stage: int
    num_ranks: int
    groups: tuple[Mapping[str, Shape], ...]
    """Shape by name for each group, in stored order."""
    paddings: tuple[tuple[int, ...], ...] | None = None
    """Stages 1 and 2: unused elements after each parameter of each group."""
    shapes: dict[str, Shape] = field(init=False, repr=False, compare=False, default_factory=dict)
    """Shape of every trained parameter by name, in stored order."""
    _places: dict[str, tuple[int, int]] = field(init=False, repr=False, compare=False, default_factory=dict)
    """Name -> (group, offset in it); at stage 3 the offset is that in a rank's buffers laid end to end."""
    _num_used: tuple[int, ...] = field(init=False, repr=False, compare=False, default=())
    """Elements of the named parameters: per group, or at stage 3 in a rank's buffers laid end to end."""

    def __post_init__(self) -> None:
        used = []
        offset = 0
        for group, shapes in enumerate(self.groups):
            if self.stage < 3:
                offset = 0
            for position, (name, shape) in enumerate(shapes.items()):
                self.shapes[name] = shape
                self._places[name] = (group, offset)
                numel = math.prod(shape)
                if self.stage == 3:
                    offset += self._shard_size(numel)
                else:
                    offset += numel + (self.paddings[group][position] if self.paddings is not None else 0)
            used.append(offset)
        object.__setattr__(self, "_num_used", tuple(used if self.stage < 3 else used[-1:]))

    def spans(self, name: str, start: int, stop: int, sizes: Sequence[Sequence[int]]) -> Iterator[Span]:
        """The spans that hold elements [start, stop) of the flattened parameter `name`, in order.

        `sizes`: number of elements of each buffer of each rank. Raises ShardError when the buffers are too short.
        """
        group, offset = self._places[name]
        if self.stage < 3:
            for rank, begin, end in _cut([buffers[group] for buffers in sizes], offset + start, offset + stop):
                yield Span(rank=rank, buffer=group, start=begin, stop=end)
            return
        shard = self._shard_size(math.prod(self.shapes[name]))
        while start < stop:
            rank = start // shard
            end_of_shard = min(stop, (rank + 1) * shard)
            begin = offset + start - rank * shard
            for buffer, first, last in _cut(sizes[rank], begin, begin + end_of_shard - start):
                yield Span(rank=rank, buffer=buffer, start=first, stop=last)
            start = end_of_shard

    def check(self, sizes: Sequence[Sequence[int]]) -> None:
        """Raise ShardError unless buffers of these sizes hold exactly the named parameters and padding."""
        if self.stage < 3:
            counts = {len(buffers) for buffers in sizes}
            if counts != {len(self.groups)}:
                raise ShardError(field="groups", value=sorted(counts), allowed=f"{len(self.groups)} groups of names")
            pairs = [
                (used, sum(buffers[group] for buffers in sizes), 2 * self.num_ranks)
                for group, used in enumerate(self._num_used)
            ]
        else:
            pairs = [(sum(self._num_used), sum(buffers), 1) for buffers in sizes]
        for index, (used, held, alignment) in enumerate(pairs):
            if -(-used // alignment) != -(-held // alignment):
                place = f"group {index}" if self.stage < 3 else f"rank {index}"
                raise ShardError(field=place, value=held, allowed=f"{used} elements, as its named weights have")

    def _shard_size(self, numel: int) -> int:
        return -(-numel // self.num_ranks)


def _cut(sizes: Sequence[int], start: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """(piece, begin, end) of elements [start, stop) of pieces of these sizes laid end to end."""
    offset = 0
    for piece, size in enumerate(sizes):
        begin, end = max(start - offset, 0), min(stop - offset, size)
        if begin < end:
            yield piece, begin, end
        offset += size
    if stop > max(offset, start):
        raise ShardError("a parameter ends after the end of its group", field="stop", value=stop, allowed=str(offset))
