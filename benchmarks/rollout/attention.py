"""Attention of a decoding step: FlashAttention 3 as vLLM calls it, vLLM's Triton kernel, and `servers/fast/attention`.

`python -m benchmarks.rollout.attention` prints microseconds per layer on a GPU, in CUDA graphs of 8 layers with a KV
cache each, more than the GPU's own caches hold. Prompts come in groups of `--n` whose blocks are shared. `--sweep`
tries ways to divide the work. Every result is compared with FlashAttention's.
"""

import argparse
import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import torch

from benchmarks.runs import table_header, table_row
from rollout_vllm.servers.fast import attention

LAYERS = 8
Call = Callable[[int], Any]


class Work:
    """Queries, paged caches and tables of one decoding step."""

    def __init__(self, args: argparse.Namespace, requests: int) -> None:
        self.requests, self.block = requests, args.block
        shared, own = args.prompt_tokens // args.block, []
        lengths = [args.prompt_tokens + args.generated] * requests
        rows, used = [], 1  # block 0 is vLLM's padding
        for index, length in enumerate(lengths):
            if index % args.n == 0:
                prompt = list(range(used, used := used + shared))
            own = list(range(used, used := used - (-length // args.block) - shared))
            rows.append(prompt + own)
        order = list(range(1, used))
        random.Random(0).shuffle(order)
        width = max(map(len, rows))
        table = [[order[block - 1] for block in row] + [0] * (width - len(row)) for row in rows]
        options: Any = {"dtype": torch.bfloat16, "device": "cuda"}
        self.table = torch.tensor(table, dtype=torch.int32, device="cuda")
        self.lengths = torch.tensor(lengths, dtype=torch.int32, device="cuda")
        self.longest = args.most_tokens
        self.caches = []
        for _ in range(LAYERS):
            shape = (used, args.key_heads, args.block, 2 * args.width)
            if args.layout == "NHD":
                cache = torch.randn((used, args.block, args.key_heads, 2 * args.width), **options)
                self.caches.append(cache.split(args.width, dim=-1))
            else:
                self.caches.append(torch.randn(shape, **options).transpose(1, 2).split(args.width, dim=-1))
        self.q = torch.randn((requests, args.heads, args.width), **options)
        self.out = torch.empty_like(self.q)
        self.starts = torch.arange(requests + 1, dtype=torch.int32, device="cuda")
        self.scale = args.width**-0.5
        token = 2 * args.key_heads * args.width * 2
        self.logical_bytes = sum(lengths) * token
        self.bytes = (used - 1) * args.block * token


def flash(work: Work) -> Call:
    """As vLLM calls it in a graph of decoding steps."""
    from vllm.vllm_flash_attn.flash_attn_interface import flash_attn_varlen_func, get_scheduler_metadata

    version = 3 if torch.cuda.get_device_capability()[0] == 9 else 2
    key = work.caches[0][0]
    metadata = None
    if version == 3:
        metadata = get_scheduler_metadata(
            batch_size=work.requests, max_seqlen_q=1, max_seqlen_k=work.longest, num_heads_q=work.q.shape[1],
            num_heads_kv=key.shape[2], headdim=key.shape[3], cache_seqlens=work.lengths, qkv_dtype=torch.bfloat16,
            cu_seqlens_q=work.starts, page_size=work.block, causal=True, window_size=(-1, -1), num_splits=32,
        )  # fmt: skip

    def call(layer: int) -> None:
        k, v = work.caches[layer]
        flash_attn_varlen_func(
            q=work.q, k=k, v=v, out=work.out, cu_seqlens_q=work.starts, max_seqlen_q=1, seqused_k=work.lengths,
            max_seqlen_k=work.longest, softmax_scale=work.scale, causal=True, window_size=[-1, -1],
            block_table=work.table, scheduler_metadata=metadata, fa_version=version,
            num_splits=32 if version == 3 else 0,
        )  # fmt: skip

    return call


def unified(work: Work) -> Call:
    """vLLM's Triton kernel."""
    from vllm.v1.attention.ops.triton_unified_attention import unified_attention

    def call(layer: int) -> None:
        k, v = work.caches[layer]
        unified_attention(
            q=work.q, k=k, v=v, out=work.out, cu_seqlens_q=work.starts, max_seqlen_q=1, seqused_k=work.lengths,
            max_seqlen_k=work.longest, softmax_scale=work.scale, causal=True, window_size=(-1, -1),
            block_table=work.table, softcap=0.0, q_descale=None, k_descale=None, v_descale=None,
        )  # fmt: skip

    return call


def ours(work: Work, **options: int) -> Call:
    def call(layer: int) -> None:
        k, v = work.caches[layer]
        attention.decode(work.out, work.q, k, v, work.table, work.lengths, work.scale, **options)

    return call


def time_layer(call: Call) -> float:
    """Microseconds per layer."""
    for layer in range(LAYERS):
        call(layer)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for layer in range(LAYERS):
            call(layer)
    times: list[float] = []
    for _ in range(7):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(5):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / 5 / LAYERS * 1e3)
    return sorted(times)[len(times) // 2]


def contestants(args: argparse.Namespace) -> Iterator[tuple[str, Callable[[Work], Call]]]:
    yield "FlashAttention", flash
    yield "vLLM's Triton kernel", unified
    ways = [n for n in (1, 2, 4) if n * (args.heads // args.key_heads) <= 16]
    for together in ways:
        yield f"ours, {together} together", lambda work, together=together: ours(work, together=together)  # type: ignore[misc]
    if args.sweep:
        for together, tile, stages, registers in itertools.product(ways, (32, 64), (2, 3), (96, 128, 0)):
            options = {"together": together, "tile": tile, "stages": stages, "registers": registers}
            yield str(options), lambda work, options=options: ours(work, **options)  # type: ignore[misc]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, nargs="+", default=[256, 128, 32])
    parser.add_argument("--n", type=int, default=4, help="samples of a prompt")
    parser.add_argument("--prompt-tokens", type=int, default=297)
    parser.add_argument("--generated", type=int, default=256)
    parser.add_argument("--most-tokens", type=int, default=832, help="vLLM's --max-model-len")
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--key-heads", type=int, default=8)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--block", type=int, default=16, help="tokens of a block of the KV cache")
    parser.add_argument("--layout", choices=["NHD", "HND"], default="NHD")
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--rows", type=int, default=12, help="of the sweep, the fastest")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a GPU")
    print(torch.cuda.get_device_name(), args, flush=True)
    for requests in args.requests:
        work = Work(args, requests)
        sizes = f"{work.bytes / 1e6:.0f} MB per layer, {work.logical_bytes / 1e6:.0f} read by each alone"
        processors = torch.cuda.get_device_properties(0).multi_processor_count
        together = attention.requests_together(requests, args.heads, args.key_heads, processors)
        choice = f"servers compute {together} together" if together else "servers leave them to FlashAttention"
        print(f"\n{requests} requests ({choice}): {sizes}\n")
        measured, expected = [], None
        for name, make in contestants(args):
            try:
                call = make(work)
                work.out.zero_()
                call(0)
                result = work.out.clone()
                expected = result if expected is None else expected
                error = (result.float() - expected.float()).abs().max().item()
                measured.append((name, time_layer(call), error))
            except Exception as problem:
                print(f"{name}: {type(problem).__name__}: {str(problem)[:200]}")
        print(table_header(["", "us per layer", "TB/s of each alone", "largest difference"]))
        for name, micros, error in [*measured[:2], *sorted(measured[2:], key=lambda row: row[1])[: args.rows]]:
            print(
                table_row([name, round(micros, 1), round(work.logical_bytes / micros / 1e6, 2), f"{error:.1e}"]),
                flush=True,
            )
        del work


if __name__ == "__main__":
    main()
