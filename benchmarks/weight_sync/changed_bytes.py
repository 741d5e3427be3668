"""Measures how many bytes of the weights one optimizer step changes, and whether sending only those would be faster.

    python -m benchmarks.weight_sync.changed_bytes --model small --lr 1e-6 --lr 1e-5 --lr 1e-4

Trains a Qwen3 shape with AdamW in float32 on random tokens and compares the weights before and after a step, as
bfloat16 and as float32: changed elements, unchanged blocks, tensors and buckets, and the size of two delta encodings.
It times their encoding and decoding on one thread and prints the link speed below which a delta is faster than sending
everything.
"""

import argparse
import time
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.weight_sync.push import SHAPES, model_config

SHAPES["small"] = (512, 1536, 4, 8192, 8, 4, 64, True)
BLOCKS = (64, 256, 4096)


def main() -> None:
    """Print one line per learning rate and dtype."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SHAPES, default="small")
    parser.add_argument("--lr", type=float, action="append")
    parser.add_argument("--steps", type=int, default=20, help="steps before the compared step")
    parser.add_argument("--bucket-mib", type=float, default=64)
    args = parser.parse_args()
    torch.set_num_threads(1)
    for lr in args.lr or [1e-6, 1e-5, 1e-4]:
        before, after = train(args.model, lr, args.steps)
        for dtype in (torch.bfloat16, torch.float32):
            old, new = ([t.to(dtype) for t in tensors] for tensors in (before, after))
            print(f"lr {lr:g} {str(dtype).removeprefix('torch.')}: {describe(old, new, args.bucket_mib)}", flush=True)


def train(name: str, lr: float, steps: int) -> tuple[list[Tensor], list[Tensor]]:
    """The parameters before and after one step that follows ``steps`` steps."""
    import transformers

    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(model_config(name), dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
    before: list[Tensor] = []
    for _ in range(steps + 1):
        before = [p.detach().clone() for p in model.parameters()]
        ids = torch.randint(0, model.config.vocab_size, (4, 64))
        model(input_ids=ids, labels=ids).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return before, [p.detach() for p in model.parameters()]


def describe(old: list[Tensor], new: list[Tensor], bucket_mib: float) -> str:
    """The changed shares, and the link speed below which a delta is faster."""
    a, b = (torch.cat([t.reshape(-1) for t in tensors]).view(torch.uint8) for tensors in (old, new))
    width = old[0].element_size()
    changed = (a.view(-1, width) != b.view(-1, width)).any(1)
    parts = [f"{100 * changed.float().mean():.1f} % of the elements changed"]
    blocks = [f"{size} B {100 * unchanged(a, b, size):.1f} %" for size in (*BLOCKS, int(bucket_mib * 2**20))]
    same = sum(torch.equal(x, y) for x, y in zip(old, new, strict=True))
    parts.append(f"unchanged blocks: {', '.join(blocks)}; unchanged tensors {same} of {len(old)}")
    for name, code in (("bit mask", Bits), ("positions", Positions)):
        seconds, size = time_delta(a, b, width, code)
        saved = b.numel() - size
        link = f"faster below {saved / seconds / 1e9:.2f} GB/s" if saved > 0 else "never faster"
        parts.append(f"delta with {name}: {100 * size / b.numel():.1f} % of the bytes, {link}")
    return "; ".join(parts)


class Bits:
    """One bit per element and the changed values."""

    @staticmethod
    def encode(old: Any, new: Any) -> tuple[Any, Any]:
        """Packed bits and changed values."""
        mask = old != new
        return np.packbits(mask), new[mask]

    @staticmethod
    def decode(target: Any, where: Any, values: Any) -> None:
        """Update ``target`` in place."""
        target[np.unpackbits(where, count=len(target)).view(bool)] = values


class Positions:
    """The position (4 bytes) and the value of each changed element."""

    @staticmethod
    def encode(old: Any, new: Any) -> tuple[Any, Any]:
        """Positions and changed values."""
        where = np.flatnonzero(old != new).astype(np.uint32)
        return where, new[where]

    @staticmethod
    def decode(target: Any, where: Any, values: Any) -> None:
        """Update ``target`` in place."""
        target[where] = values


def unchanged(a: Tensor, b: Tensor, size: int) -> float:
    """Share of unchanged blocks of ``size`` bytes."""
    same = [torch.equal(x, y) for x, y in zip(a.split(size), b.split(size), strict=True)] if size > 10**6 else None
    if same is not None:
        return sum(same) / len(same)
    whole = a.numel() // size * size
    return float((a[:whole].view(-1, size) == b[:whole].view(-1, size)).all(1).float().mean())


def time_delta(a: Tensor, b: Tensor, width: int, code: Any) -> tuple[float, int]:
    """Seconds to encode and decode, best of three, and the bytes of the delta."""
    kind: Any = {2: np.int16, 4: np.int32}[width]
    old, new = a.numpy().view(kind), b.numpy().view(kind)
    best, size = float("inf"), 0
    for _ in range(3):
        target = old.copy()
        start = time.perf_counter()
        where, values = code.encode(old, new)
        code.decode(target, where, values)
        best = min(best, time.perf_counter() - start)
        assert np.array_equal(target, new)
        size = where.nbytes + values.nbytes
    return best, size


if __name__ == "__main__":
    main()
