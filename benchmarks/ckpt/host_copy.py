"""Measures ways to copy tensors within host memory, which is what blocks a CPU loop during a background save.

    python -m benchmarks.ckpt.host_copy [--gib 1.0] [--repeats 7] [--threads N]

Copies the same bytes in several ways, interleaved, and prints the median and the best GB/s of each:

    fresh      torch's copy_ into newly allocated memory, whose pages are touched for the first time
    reused     torch's copy_ into memory used before, as AsyncSaver does from its second save on
    memmove    the C library's memmove into the same memory, 64 MiB per call, on N threads; it may bypass the caches
    huge       torch's copy_ into huge pages used before
"""

import argparse
import ctypes
import mmap
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

_PIECE_BYTES = 64 << 20
_HUGE_PAGE_BYTES = 2 << 20


def huge_pages(num_bytes: int) -> torch.Tensor:
    """uint8 memory with transparent huge pages requested."""
    memory = mmap.mmap(-1, num_bytes + _HUGE_PAGE_BYTES)
    memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    start = -whole.data_ptr() % _HUGE_PAGE_BYTES
    return whole[start : start + num_bytes]


def move(pool: ThreadPoolExecutor, target: torch.Tensor, source: torch.Tensor) -> None:
    """memmove, piece by piece, on the pool's threads."""
    signature = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    memmove = signature(("memmove", ctypes.CDLL(None)))  # a call through ctypes releases the GIL
    pieces = [
        pool.submit(memmove, target.data_ptr() + at, source.data_ptr() + at, min(_PIECE_BYTES, source.nbytes - at))
        for at in range(0, source.nbytes, _PIECE_BYTES)
    ]
    for piece in pieces:
        piece.result()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    num_bytes = int(options.gib * 2**30)
    source = torch.randint(0, 255, (num_bytes,), dtype=torch.uint8)
    reused, huge = torch.empty_like(source), huge_pages(num_bytes)
    with ThreadPoolExecutor(options.threads) as pool:
        ways: dict[str, Callable[[], object]] = {
            "fresh": lambda: torch.empty_like(source).copy_(source),
            "reused": lambda: reused.copy_(source),
            "memmove": lambda: move(pool, reused, source),
            "huge": lambda: huge.copy_(source),
        }
        rates: dict[str, list[float]] = {name: [] for name in ways}
        for repeat in range(options.repeats + 1):
            for name, copy in ways.items():
                started = time.perf_counter()
                copy()
                if repeat:  # the first touches pages
                    rates[name].append(num_bytes / (time.perf_counter() - started) / 1e9)
    assert torch.equal(reused, source)
    print(f"{options.threads} threads, {options.gib} GiB\nway\tmedian_gb_per_s\tbest_gb_per_s")
    for name, measured in rates.items():
        print(f"{name}\t{statistics.median(measured):.1f}\t{max(measured):.1f}")


if __name__ == "__main__":
    main()
