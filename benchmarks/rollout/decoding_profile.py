"""Time of a decoding step by Python function of the engine core and by GPU kernel.

`python -m benchmarks.rollout.decoding_profile` runs vLLM with the settings of a rollout server in one process, and
prints milliseconds per step three times: without a profiler, of each function (cProfile, which slows Python down by a
half or so), and of each kernel (torch's profiler). `--stock` leaves out what servers replace in vLLM. Prompts come in
groups of `--n` that are equal, as in a rollout; with 512 tokens the kernels are those of the middle of workload W.
The weights are random.
"""

import argparse
import cProfile
import os
import pstats
import shlex
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from benchmarks.random_model import CONFIGS, write_random_model
from benchmarks.rollout.throughput import engine_arguments, prompts, rollout_config
from benchmarks.runs import table_header, table_row
from rollout_vllm.servers import _serve
from rollout_vllm.servers.command import server_environment
from rollout_vllm.servers.device import detect_device


def generator(args: argparse.Namespace, model: Path) -> Callable[..., float]:
    """Loads the model; returns a function that generates under a profiler, and its seconds."""
    full = server_environment(
        os.environ, rollout_config(args), device=args.device, api_key="unused", num_cores=os.cpu_count() or 1
    )
    os.environ.update(full, VLLM_ENABLE_V1_MULTIPROCESSING="0")  # the engine core is in this process
    if not args.stock:
        _serve.prepare_engine_core()
    from vllm import LLM, SamplingParams
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    llm = LLM.from_engine_args(EngineArgs.from_cli_args(parser.parse_args(engine_arguments(args, model))))
    inputs: Any = [{"prompt_token_ids": ids} for ids in prompts(args, args.requests // args.n)]

    def generate(tokens: int, profiler: AbstractContextManager[Any] | None = None) -> float:
        settings = {"n": args.n, "max_tokens": tokens, "ignore_eos": True, "logprobs": 0, "detokenize": False}
        params = [SamplingParams(**settings, seed=i) for i in range(len(inputs))]
        with profiler or nullcontext():
            begin = time.perf_counter()
            llm.generate(inputs, params, use_tqdm=False)
            return time.perf_counter() - begin

    return generate


def show_functions(profile: cProfile.Profile, steps: int, num_rows: int) -> None:
    """The functions with most time of their own, and the calls that take longest with what they call."""
    measured: Any = pstats.Stats(profile).stats  # type: ignore[attr-defined]
    rows: list[tuple[str, int, float, float]] = [
        (name if file == "~" else f"{Path(file).parent.name}/{Path(file).name}:{line} {name}", calls, own, whole)
        for (file, line, name), (_, calls, own, whole, _) in measured.items()
    ]
    orders: dict[str, Callable[[Any], float]] = {
        "own time": lambda row: row[2],
        "time with their calls": lambda row: row[3],
    }
    for title, order in orders.items():
        print(f"\n## Functions by {title}, per step\n")
        print(table_header(["function", "calls", "own ms", "with calls, ms"]))
        for name, calls, own, whole in sorted(rows, key=order, reverse=True)[:num_rows]:
            print(table_row([name, calls / steps, 1e3 * own / steps, 1e3 * whole / steps]))


def show_kernels(events: Iterable[Any], steps: int, num_rows: int) -> None:
    """The kernels by their time."""
    rows = [(event.key, event.count, event.self_device_time_total) for event in events if event.self_device_time_total]
    print(f"\n## Kernels, per step: {sum(row[2] for row in rows) / steps / 1e3:.2f} ms\n")
    print(table_header(["kernel", "calls", "ms"]))
    for name, count, micros in sorted(rows, key=lambda row: -row[2])[:num_rows]:
        print(table_row([name[:100].replace("|", "/"), count / steps, micros / steps / 1e3]))


def profile(args: argparse.Namespace, folder: Path) -> None:
    """Prints the tables."""
    import torch

    generate = generator(args, write_random_model(args.model, folder / "model"))
    generate(8)
    seconds = generate(args.tokens)
    sizes = f"{args.requests} samples of {args.prompt_tokens}+{args.tokens} tokens"
    print(
        f"\n{args.model}, {sizes}, vLLM {detect_device()[1]}: {1e3 * seconds / args.tokens:.2f} ms per step", flush=True
    )
    functions = cProfile.Profile()
    seconds = generate(args.tokens, functions)
    print(f"under cProfile {1e3 * seconds / args.tokens:.2f} ms per step")
    show_functions(functions, args.tokens, args.rows)
    if args.device == "cuda":
        kernels = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
        few = min(40, args.tokens)
        seconds = generate(few, kernels)
        print(f"\nunder torch's profiler, the first {few} tokens: {1e3 * seconds / few:.2f} ms per step")
        show_kernels(kernels.key_averages(), few, args.rows)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default=detect_device()[0])
    parser.add_argument("--model", choices=sorted(CONFIGS), default="qwen3-0.6b")
    parser.add_argument("--requests", type=int, default=128)
    parser.add_argument("--n", type=int, default=4, help="samples of a prompt")
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--rows", type=int, default=40, help="of each table")
    parser.add_argument("--stock", action="store_true", help="vLLM as it is")
    parser.add_argument("--vllm-args", type=shlex.split, default=[], help="one string of vLLM arguments")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        profile(args, Path(folder))


if __name__ == "__main__":
    main()
