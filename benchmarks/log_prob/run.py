"""Benchmark of the fused log-prob op on one GPU: accuracy against float64, and speed and memory against other packages.

    python -m benchmarks.log_prob.run --out outputs/log_prob

Prints Markdown tables, and writes them and all numbers (``results.jsonl``) to the output folder. The table gives the
reason for implementations that are not installed, run out of memory or fail. ``--help`` lists the options.
"""

import argparse
import functools
import json
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.log_prob.contestants import CONTESTANTS, Call, Contestant

VOCABS, HIDDENS, TOKENS = (151936, 32000), (1024, 4096, 2048), (16384, 4096, 65536)
GIB = 2**30


def make_inputs(num_tokens: int, hidden_size: int, vocab: int, spread: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    """bf16 hidden and weight whose logits have standard deviation ``spread``, and random targets."""
    generator = torch.Generator("cuda").manual_seed(0)
    hidden = torch.randn(num_tokens, hidden_size, generator=generator, device="cuda").bfloat16()
    weight = torch.randn(vocab, hidden_size, generator=generator, device="cuda")
    weight = (weight * (spread / hidden_size**0.5)).bfloat16()
    targets = torch.randint(vocab, (num_tokens,), generator=generator, device="cuda")
    return hidden.requires_grad_(), weight.requires_grad_(), targets


def chosen(args: argparse.Namespace) -> list[Contestant]:
    return [c for c in CONTESTANTS if c.name.startswith(tuple(args.only))]


def loss_of(outputs: tuple[Tensor, ...], names: tuple[str, ...]) -> Tensor:
    """A scalar of all outputs; without entropy it is minus the mean log-prob for every implementation."""
    loss = outputs[0] if names[0] == "loss" else -outputs[0].mean()
    return loss - 0.01 * outputs[1].float().mean() if len(outputs) > 1 else loss


def median_ms(function: Callable[[], object], expected_ms: float) -> float:
    from triton.testing import do_bench

    rep = max(150.0, 5 * expected_ms)
    return float(do_bench(function, warmup=min(50.0, expected_ms), rep=rep, return_mode="median"))


def time_one(contestant: Contestant, inputs: tuple[Tensor, Tensor, Tensor], call: Call) -> dict[str, float]:
    """Milliseconds of the forward pass (without graph) and of forward and backward; peak memory beyond gradients."""
    hidden, weight, targets = inputs
    floor_ms = 8 * targets.numel() * weight.numel() / 600e9

    def step() -> None:
        hidden.grad = weight.grad = None
        loss_of(call(hidden, weight, targets), contestant.outputs).backward()

    step()
    hidden.grad = weight.grad = None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    gradient_bytes = 2 * (hidden.numel() + weight.numel())
    result = {"extra_gib": (torch.cuda.max_memory_allocated() - before - gradient_bytes) / GIB}
    result["step_ms"] = median_ms(step, floor_ms)
    if contestant.forward:
        with torch.no_grad():
            result["forward_ms"] = median_ms(lambda: call(hidden, weight, targets), floor_ms / 4)
    hidden.grad = weight.grad = None
    return result


def guarded(contestant: Contestant, work: Callable[[Call], dict[str, float]]) -> dict[str, Any]:
    """The result of ``work`` with the implementation, or the reason why it did not run."""
    try:
        return work(contestant.build())
    except torch.cuda.OutOfMemoryError:
        return {"reason": "out of memory"}
    except ImportError as error:
        return {"reason": "not installed", "error": str(error)[:300]}
    except Exception as error:  # one failure must not end the benchmark
        return {"reason": "failed", "error": f"{type(error).__name__}: {str(error)[:300]}"}
    finally:
        torch.cuda.empty_cache()


def speed(args: argparse.Namespace, record: Callable[[dict[str, Any]], None]) -> list[dict[str, Any]]:
    rows = []
    shapes = [(t, h, v) for v in args.vocabs for t in args.tokens for h in args.hiddens]
    start = time.monotonic()
    for num_tokens, hidden_size, vocab in shapes:
        inputs = make_inputs(num_tokens, hidden_size, vocab)
        for contestant in chosen(args):
            row: dict[str, Any] = {"kind": "speed", "T": num_tokens, "H": hidden_size, "V": vocab}
            row["name"] = contestant.name
            late = time.monotonic() - start > args.budget_s and not contestant.name.startswith("plinth")
            if late or num_tokens > (contestant.largest_tokens or num_tokens):
                row["reason"] = "not run"
            else:
                row.update(guarded(contestant, functools.partial(time_one, contestant, inputs)))
            record(row)
            rows.append(row)
        del inputs
        torch.cuda.empty_cache()
    return rows


def reference(inputs: tuple[Tensor, Tensor, Tensor], names: tuple[str, ...], dtype: torch.dtype) -> list[Tensor]:
    """Outputs and gradients of the plain formula, computed in ``dtype`` from the same bf16 inputs."""
    from rl_core import linear_log_prob

    hidden, weight = (x.detach().to(dtype).requires_grad_() for x in inputs[:2])
    outputs = linear_log_prob(hidden, weight, inputs[2], backend="reference")[: len(names)]
    grads = torch.autograd.grad(loss_of(tuple(outputs), names), (hidden, weight))
    return [*(x.detach() for x in outputs), *grads]


def errors(results: list[Tensor], truth: list[Tensor], names: tuple[str, ...]) -> dict[str, float]:
    out: dict[str, float] = {}
    for name, value, exact in zip((*names, "hidden", "weight"), results, truth, strict=True):
        difference = value.double() - exact
        absolute = name in ("log_prob", "entropy")
        out[name] = (difference.abs().max() if absolute else difference.norm() / exact.norm()).item()
    return out


def accuracy_one(contestant: Contestant, inputs: tuple[Tensor, Tensor, Tensor], call: Call) -> dict[str, float]:
    hidden, weight, targets = inputs
    names = contestant.outputs
    outputs = call(hidden, weight, targets)
    grads = torch.autograd.grad(loss_of(outputs, names), (hidden, weight))
    compared = names if names[0] != "loss" else ()
    truth = reference(inputs, names if names[0] != "loss" else ("log_prob",), torch.float64)
    if not compared:
        truth = truth[1:]
        outputs = ()
    return errors([*outputs, *grads], truth, compared)


def accuracy(args: argparse.Namespace, record: Callable[[dict[str, Any]], None]) -> list[dict[str, Any]]:
    rows = []
    for hidden_size, spread in ((1024, 1.0), (1024, 4.0), (4096, 4.0)):
        inputs = make_inputs(2048, hidden_size, VOCABS[0], spread)
        base = {"kind": "accuracy", "T": 2048, "H": hidden_size, "V": VOCABS[0], "spread": spread}
        names = ("log_prob", "entropy")
        plain = [x.to(torch.bfloat16) if x.ndim == 2 else x for x in reference(inputs, names, torch.float32)]
        row = {**base, "name": "float32 throughout"}
        row.update(errors(plain, reference(inputs, names, torch.float64), names))
        rows.append(row)
        record(row)
        for contestant in chosen(args):
            row = {**base, "name": contestant.name}
            row.update(guarded(contestant, functools.partial(accuracy_one, contestant, inputs)))
            rows.append(row)
            record(row)
        del inputs, plain
        torch.cuda.empty_cache()
    return rows


def matmul_tflops() -> str:
    """TFLOP/s of a plain bf16 matrix product at the shapes of the op, as an upper bound."""
    parts = []
    for hidden_size in sorted(HIDDENS):
        hidden, weight = (x.detach() for x in make_inputs(16384, hidden_size, 33792)[:2])
        ms = median_ms(functools.partial(torch.mm, hidden, weight.T), 10.0)
        parts.append(f"{2 * hidden.numel() * 33792 / ms / 1e9:.0f} (H={hidden_size})")
    return ", ".join(parts)


def cell(row: dict[str, Any], key: str, form: str) -> str:
    return format(row[key], form) if key in row else row.get("reason", "–")


def speed_tables(rows: list[dict[str, Any]]) -> str:
    names = list(dict.fromkeys(r["name"] for r in rows))
    lines = []
    for key, title, form in (
        ("step_ms", "Forward + backward, ms", ".2f"),
        ("forward_ms", "Forward alone, ms", ".2f"),
        ("extra_gib", "Peak memory beyond inputs and gradients, GiB", ".2f"),
    ):
        shown = [n for n in names if key != "forward_ms" or any("forward_ms" in r for r in rows if r["name"] == n)]
        lines += [
            "",
            f"**{title}**",
            "",
            "| T | H | V | " + " | ".join(shown) + " |",
            "|" + " --: |" * (3 + len(shown)),
        ]
        shapes = list(dict.fromkeys((r["T"], r["H"], r["V"]) for r in rows))
        for shape in sorted(shapes, key=lambda s: (s[2], s[0], s[1])):
            by_name = {r["name"]: r for r in rows if (r["T"], r["H"], r["V"]) == shape}
            cells = [cell(by_name[n], key, form) for n in shown]
            lines.append(f"| {shape[0]} | {shape[1]} | {shape[2]} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def accuracy_table(rows: list[dict[str, Any]]) -> str:
    keys = ("log_prob", "entropy", "hidden", "weight")
    lines = [
        "| H | std of logits | | log-prob, max abs | entropy, max abs | d hidden, relative | d weight, relative |",
        "| --: | --: | --- | --: | --: | --: | --: |",
    ]
    for row in rows:
        cells = " | ".join(cell(row, key, ".1e") for key in keys)
        lines.append(f"| {row['H']} | {row['spread']:g} | {row['name']} | {cells} |")
    return "\n".join(lines)


def environment() -> str:
    from importlib.metadata import PackageNotFoundError, version

    parts = [torch.cuda.get_device_name(), f"Python {platform.python_version()}", f"torch {torch.__version__}"]
    for name in ("triton", "liger-kernel", "nvidia-cutlass-dsl", "cut-cross-entropy"):
        try:
            parts.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            parts.append(f"{name} not installed")
    return ", ".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("outputs/log_prob"))
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--hiddens", type=int, nargs="+", default=HIDDENS)
    parser.add_argument("--vocabs", type=int, nargs="+", default=VOCABS)
    parser.add_argument("--only", nargs="+", default=[""], help="run only names with these prefixes")
    parser.add_argument("--budget-s", type=float, default=1800, help="seconds after which only this package is timed")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    with (args.out / "results.jsonl").open("a") as log:

        def record(row: dict[str, Any]) -> None:
            log.write(json.dumps(row) + "\n")
            log.flush()
            print(json.dumps(row), flush=True)

        head = f"{environment()}. bf16 matrix product, TFLOP/s: {matmul_tflops()}."
        sections = [head, accuracy_table(accuracy(args, record)), speed_tables(speed(args, record))]
    text = "\n\n".join(sections)
    (args.out / "tables.md").write_text(text + "\n")
    print("\n" + text, flush=True)


if __name__ == "__main__":
    main()
