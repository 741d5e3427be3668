"""Forward and backward pass of the experts of one layer: the engine's grouped products beside transformers' own.

`python -m benchmarks.mixtures.layer [--model qwen3-30b-a3b-4-layers] [--tokens 16384]` prints a table: milliseconds,
share of an H100's peak, and memory in addition to weights and gradients. Rows: transformers' loop and its `grouped_mm`,
ours, and ours compiled. Tokens choose experts at random.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.flops import PEAK_FLOPS
from benchmarks.random_model import CONFIGS, model_config
from benchmarks.runs import table_header, table_row
from ds_engine.model.experts import experts_of, grouped_experts


def layer(config: Any, device: str, dtype: torch.dtype) -> Any:
    """The experts of one layer with random weights."""
    from transformers import AutoModelForCausalLM

    config.num_hidden_layers, config.vocab_size = 1, 8
    with torch.device(device):
        (experts,) = experts_of(AutoModelForCausalLM.from_config(config, dtype=dtype))
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    return experts


def measure(run: Callable[[], None], device: str, rounds: int) -> tuple[float, float]:
    """(median milliseconds of a call, GiB in use at the peak in addition to those before it)."""
    run()  # compiles, and allocates gradients
    times, before = [], 0
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    for _ in range(rounds):
        wait(device)
        started = time.perf_counter()
        run()
        wait(device)
        times.append(1e3 * (time.perf_counter() - started))
    peak = torch.cuda.max_memory_allocated() - before if device == "cuda" else 0
    return statistics.median(times), peak / 2**30


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=sorted(CONFIGS), default="qwen3-30b-a3b-4-layers")
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--rounds", type=int, default=10)
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = model_config(args.model)
    experts = layer(config, device, torch.bfloat16)
    per_token, width = config.num_experts_per_tok, config.hidden_size
    torch.manual_seed(0)
    hidden_TH = torch.randn(args.tokens, width, device=device, dtype=torch.bfloat16, requires_grad=True)
    index_TK = torch.rand(args.tokens, config.num_experts, device=device).topk(per_token).indices
    weights_TK = torch.rand(args.tokens, per_token, device=device).to(torch.bfloat16).requires_grad_()
    grad_TH = torch.randn_like(hidden_TH)
    operations = 6 * args.tokens * per_token * sum(p[0].numel() for p in experts.parameters())

    def upstream(name: str) -> Callable[..., Any]:
        def forward(*arguments: Any) -> Any:
            experts.config._experts_implementation = name
            return experts(*arguments[1:])

        return forward

    ways = {"loop": upstream("eager"), "transformers' grouped_mm": upstream("grouped_mm"), "ours": grouped_experts}
    ways["ours, compiled"] = torch.compile(grouped_experts, dynamic=True)
    print(f"{args.tokens:,} tokens, {per_token} of {config.num_experts} experts; {device}, torch {torch.__version__}")
    print(table_header(["experts", "ms", "of the peak", "GiB"]))
    for name, forward in ways.items():

        def run(forward: Callable[..., Any] = forward) -> None:
            forward(experts, hidden_TH, index_TK, weights_TK).backward(grad_TH)

        milliseconds, gib = measure(run, device, args.rounds)
        print(table_row([name, milliseconds, operations / (milliseconds / 1e3) / PEAK_FLOPS, gib]), flush=True)


if __name__ == "__main__":
    main()
