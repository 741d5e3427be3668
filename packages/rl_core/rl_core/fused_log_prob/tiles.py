"""Planning for the Triton backend, without importing Triton: tile shapes, blocks of the backward pass, the tuner."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from .types import Keeping

EXTRA_BYTES = 2**29  # limit of the working memory of the backward pass beyond the gradients
BLOCK_BYTES = 264 * 2**20  # size of one block of da; 16384 tokens x 8448 columns in bf16
MAX_BLOCK_ROWS = 16384
MAX_GROUPS = 4  # row groups of one backward pass, see plan_groups
# 4224 = 33 * 128 columns: 128 x 256 tiles of both 16384 x C and C x 1024 then fill whole waves of 132 programs.
COLUMN_STEPS = (4224, 256)
# Candidate widths of the blocks kept in the memory of the weight's gradient, in whole tiles of 256; the first fits.
GRAD_BLOCK_WIDTHS = (8448, 4096, 2048)


@dataclass(frozen=True, kw_only=True)
class TileConfig:
    """Tile shape of one program, and its Triton launch options."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


# The first one is the default: used without a GPU, with ``deterministic``, and during CUDA graph capture.
_AMPERE = (
    TileConfig(block_m=128, block_n=128, block_k=32, num_warps=4, num_stages=4),
    TileConfig(block_m=128, block_n=256, block_k=32, num_warps=8, num_stages=3),
    TileConfig(block_m=128, block_n=128, block_k=64, num_warps=8, num_stages=3),
)
_HOPPER = (
    TileConfig(block_m=128, block_n=256, block_k=64, num_warps=8, num_stages=3),
    TileConfig(block_m=128, block_n=128, block_k=64, num_warps=4, num_stages=3),
    TileConfig(block_m=128, block_n=128, block_k=64, num_warps=8, num_stages=4),
)
_FLOAT32 = (
    TileConfig(block_m=64, block_n=64, block_k=32, num_warps=4, num_stages=2),
    TileConfig(block_m=128, block_n=64, block_k=32, num_warps=8, num_stages=2),
)
_INTERPRETER = (TileConfig(block_m=32, block_n=32, block_k=32, num_warps=4, num_stages=1),)


def tile_configs(dtype: torch.dtype, capability: tuple[int, int] | None) -> Sequence[TileConfig]:
    """Candidate tile shapes for this compute capability; None is Triton's interpreter on a CPU."""
    if capability is None:
        return _INTERPRETER
    if dtype == torch.float32:
        return _FLOAT32
    return _HOPPER if capability[0] == 9 else _AMPERE


def plan_groups(num_rows: int, hidden_size: int) -> int:
    """Rows whose gradient of hidden is summed in float32 at a time: all, or equal groups of at most MAX_BLOCK_ROWS.

    Each group rounds its contribution to the weight's gradient, so there are at most MAX_GROUPS groups. Above 4 * 16384
    tokens with H = 4096 the sums therefore take more than half of EXTRA_BYTES.
    """
    if num_rows * hidden_size * 4 <= EXTRA_BYTES // 2:
        return num_rows
    groups = min(MAX_GROUPS, -(-num_rows // MAX_BLOCK_ROWS))
    return min(num_rows, -(-num_rows // (128 * groups)) * 128)


def sum_bytes(num_rows: int, group_rows: int, hidden_size: int, itemsize: int) -> int:
    """Memory of hidden's float32 sums beyond its gradient, which a single group allocates only after the sums."""
    return group_rows * hidden_size * (4 if group_rows < num_rows else 4 - itemsize)


def plan_blocks(num_rows: int, num_columns: int, itemsize: int, other_bytes: int) -> tuple[int, int]:
    """Rows and columns of one block of da in the backward pass, given ``other_bytes`` of other working memory.

    Rows: all up to MAX_BLOCK_ROWS, otherwise equal parts of at most that. Columns: what fits the budget, in multiples
    of COLUMN_STEPS. The budget is EXTRA_BYTES minus ``other_bytes``, at most BLOCK_BYTES. If that is less than half of
    BLOCK_BYTES, the budget is BLOCK_BYTES: exceeding EXTRA_BYTES is better than narrow blocks.
    """
    parts = -(-num_rows // MAX_BLOCK_ROWS)
    rows = min(num_rows, -(-num_rows // (128 * parts)) * 128)
    left = EXTRA_BYTES - 2**23 - other_bytes
    budget = min(BLOCK_BYTES, left) if left >= BLOCK_BYTES // 2 else BLOCK_BYTES
    fitting = budget // (rows * itemsize)
    for step in COLUMN_STEPS:
        if fitting >= step:
            return rows, min(num_columns, fitting // step * step)
    return rows, min(num_columns, max(256, fitting // 256 * 256))


def kept_columns(num_rows: int, num_columns: int, itemsize: int, keep_bytes: int, tile_columns: int) -> int:
    """Number of leading columns that fit ``keep_bytes``, including the lse of their tiles: all, or whole tiles."""
    row_bytes = tile_columns * itemsize + 4
    tiles = keep_bytes // (num_rows * row_bytes)
    return min(num_columns, tiles * tile_columns)


@dataclass(frozen=True, kw_only=True)
class KeepPlan:
    """Columns whose probabilities are kept, by where they are kept.

    First ``num_grad_blocks`` blocks of ``grad_block_width`` columns in the memory of the weight's gradient, then
    ``own`` columns in separate memory. ``whole``: all are kept, and the backward pass may allocate a copy of hidden.
    """

    num_grad_blocks: int = 0
    grad_block_width: int = 0
    own: int = 0
    whole: bool = False


def plan_keeping(
    num_rows: int, num_columns: int, hidden_size: int, itemsize: int, tile_columns: int, keeping: Keeping
) -> KeepPlan:
    """Plan the columns to keep under `types.Keeping`; by default all if they fit EXTRA_BYTES, else those that fit.

    The working memory of the forward pass is the statistics of the tiles, minus the size of hidden's gradient, which
    does not exist yet. That of the backward pass is the size of the float32 accumulator beyond that gradient.
    """
    if keeping.own_bytes is not None:
        own = kept_columns(num_rows, num_columns, itemsize, keeping.own_bytes, tile_columns)
        return KeepPlan(own=own, whole=own == num_columns)
    copy = num_rows * hidden_size * itemsize
    statistics = 8 * num_rows * -(-num_columns // tile_columns) - copy
    left = EXTRA_BYTES - 2**23 - max(num_rows * hidden_size * (4 - itemsize), statistics, 0)
    own = kept_columns(num_rows, num_columns, itemsize, max(0, left - copy), tile_columns)
    if own == num_columns:
        return KeepPlan(own=own, whole=True)
    if num_rows > MAX_BLOCK_ROWS or left < BLOCK_BYTES // 2:
        return KeepPlan()  # little to gain: the part that fits shrinks with the number of tokens
    blocks, width = plan_grad_blocks(num_rows, num_columns, hidden_size) if keeping.use_grad_memory else (0, 0)
    left -= 4 * num_rows * blocks * width // tile_columns  # the lse of their tiles
    rest = num_columns - blocks * width
    own = kept_columns(num_rows, rest, itemsize, left, tile_columns)
    whole = own == rest and own == kept_columns(num_rows, rest, itemsize, max(0, left - copy), tile_columns)
    return KeepPlan(num_grad_blocks=blocks, grad_block_width=width, own=own, whole=whole)


def plan_grad_blocks(num_rows: int, num_columns: int, hidden_size: int) -> tuple[int, int]:
    """Number and width of the blocks that fit at the end of the memory of the weight's gradient.

    Writing the gradient must not overwrite a block that is still needed. With n blocks of w columns, in elements: block
    i starts at V H - (n - i) w T. The product that reads block i writes the gradient up to row (i + 1) w, which must
    therefore end before the block starts. Both sides are linear in i, so the first and the last block decide.
    """
    size = num_columns * hidden_size
    for width in GRAD_BLOCK_WIDTHS:
        first = (size - width * hidden_size) // (width * num_rows)
        last = (size - width * num_rows) // (width * hidden_size)
        if min(first, last) > 0:
            return min(first, last), width
    return 0, 0


class Tuner:
    """Caches the fastest candidate of each key. One lock keeps threads from disturbing each other's measurements."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._choices: dict[tuple[object, ...], TileConfig] = {}

    def choose(
        self, key: tuple[object, ...], candidates: Sequence[TileConfig], launch: Callable[[TileConfig], object]
    ) -> TileConfig:
        """The fastest of ``candidates`` for ``key``; a new key is measured by calling ``launch``.

        ``launch`` must be repeatable. Candidates that exceed the resources of the device are skipped.
        """
        with self._lock:
            if key not in self._choices:
                timed = [(self._milliseconds(launch, candidate), i) for i, candidate in enumerate(candidates)]
                self._choices[key] = candidates[min(timed)[1]]
            return self._choices[key]

    @staticmethod
    def _milliseconds(launch: Callable[[TileConfig], object], candidate: TileConfig) -> float:
        from triton.runtime.errors import OutOfResources

        times: list[float] = []
        try:
            for _ in range(4):  # the first compiles and warms up
                start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                start.record()
                launch(candidate)
                end.record()
                end.synchronize()
                times.append(start.elapsed_time(end))
        except OutOfResources:
            return float("inf")
        return sorted(times[1:])[1]
