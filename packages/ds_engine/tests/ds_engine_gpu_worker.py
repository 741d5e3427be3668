"""A rank on a GPU: checks on CUDA and NCCL what the CPU tests cannot. Started by test_ds_engine_gpu.py, one per GPU.

Prints one line of JSON per check.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
from ds_engine_reshape_check import hand_over
from ds_engine_testkit import make_batch, make_samples, token_loss
from ds_engine_trees import DEEP, GROUP, tree_batch

import ds_engine
from ds_engine import (
    EngineConfig,
    LossOutput,
    OffloadConfig,
    OptimConfig,
    ZeroConfig,
    ZeroEngine,
    dense_log_prob,
)
from ds_engine.model import prefix_tree
from ds_engine.model.attention import choose_kernel
from ds_engine.model.compilation import compile_layers
from ds_engine.model.loading import load_model
from ds_engine.model.packed_model import install_packed_forward, packed_inputs


def weighted_loss(outputs: Any, batch: Any) -> LossOutput:
    return LossOutput(loss=token_loss(outputs.log_probs_K, outputs.entropy_K, batch.columns["weights"]))


def engine_for(folder: str, device: torch.device, **options: Any) -> ZeroEngine:
    zero = {name: options.pop(name) for name in list(options) if name in ("stage", "offload", "step_each_micro")}
    config = EngineConfig(
        zero=ZeroConfig(**zero, param_persistence_elements=0), optim=OptimConfig(lr=1e-3, eps=1e-4), **options
    )
    return ZeroEngine.from_pretrained(folder, config, log_prob_fn=dense_log_prob, device=device)


def train(engine: ZeroEngine, rank: int, steps: range) -> list[list[float]]:
    """(loss, norm) of each step; three micro batches, rank 1's last one empty."""
    results = []
    for step in steps:
        samples = make_samples(5 - rank * 2, seed=100 * step + rank, longest=60)
        stats = engine.train_mini_batch(
            [make_batch(samples[m::3] if m < 3 - rank else []) for m in range(3)], weighted_loss
        )
        results.append([stats.loss, stats.grad_norm])
    return results


def check_stages(folder: str, device: torch.device, rank: int) -> None:
    reference = None
    for stage in (1, 2, 3):
        for offload in ("none", "cpu"):
            engine = engine_for(folder, device, stage=stage, offload=OffloadConfig(optimizer=offload), dtype="float32")
            result = train(engine, rank, range(2))
            engine.close()
            reference = reference or result
            error = max(
                abs(a / b - 1)
                for row, ref in zip(result, reference, strict=True)
                for a, b in zip(row, ref, strict=True)
            )
            say(rank, check="stages", stage=stage, offload=offload, relative_error=error)


def check_attention(folder: str, device: torch.device, rank: int) -> None:
    batch = make_batch(make_samples(20, seed=rank, longest=200))
    outputs = {}
    for attention, dtype in (("auto", "bfloat16"), ("sdpa", "bfloat16"), ("sdpa", "float32")):
        engine = engine_for(folder, device, stage=2, dtype=dtype, attention=attention)
        outputs[attention, dtype] = engine.log_probs([batch])[0].log_probs_K
        kernel = engine._micro_batches.kernel
        norm = engine.train_mini_batch([batch], weighted_loss).grad_norm
        engine.close()
        error = float(
            (outputs[attention, dtype] - outputs.get(("sdpa", "float32"), outputs[attention, dtype])).abs().mean()
        )
        say(rank, check="attention", attention=attention, dtype=dtype, kernel=kernel, grad_norm=norm, error=error)
    exact = outputs["sdpa", "float32"]
    errors = {a: float((outputs[a, "bfloat16"] - exact).abs().mean()) for a in ("auto", "sdpa")}
    say(rank, check="attention_error", **errors)


def check_compiled(folder: str, device: torch.device, rank: int) -> None:
    """Batches of several shapes through compiled layers: no more rounding, and no compilation for every shape."""
    batches = [make_batch(make_samples(num, seed=num + rank, longest=40 * num)) for num in (20, 3, 9, 14, 6)]
    results = {}
    for name, options in (("exact", {"dtype": "float32"}), ("eager", {}), ("compiled", {"compile": True})):
        engine = engine_for(folder, device, stage=2, **options)
        log_probs = [o.log_probs_K for o in engine.log_probs(batches)]
        norms = [engine.train_mini_batch([batch], weighted_loss).grad_norm for batch in batches]
        engine.close()
        results[name] = torch.cat(log_probs), torch.tensor(norms)
    errors = {
        name: [float((ours - exact).abs().mean()) for ours, exact in zip(results[name], results["exact"], strict=True)]
        for name in ("eager", "compiled")
    }
    say(rank, check="compiled", **errors, graphs=torch._dynamo.utils.counters["stats"]["unique_graphs"])


def check_prefixes(folder: str, device: torch.device, rank: int) -> None:
    """Log-probs and gradients of bf16 with and without shared prefixes, and with graphs, against fp64; and the same
    bits with kept paths as with paths that are gathered again."""
    batches = [
        tree_batch(parents, [40 * n for n in lengths], seed=4 * rank + seed)
        for seed in range(4)
        for parents, lengths in ((*GROUP,), (*DEEP,))
    ]
    never, always = (0.0, 0.0), (1e9, 1e9)
    results: dict[str, list[torch.Tensor]] = {}
    torch.use_deterministic_algorithms(True, warn_only=True)
    for name, dtype, kernel, share, limits in (
        ("exact", "float64", "sdpa", False, never),
        ("whole", "bfloat16", "auto", False, never),
        ("in place", "bfloat16", "auto", True, never),
        ("again", "bfloat16", "auto", True, never),
        ("gathered", "bfloat16", "auto", True, always),
        ("kept", "bfloat16", "auto", True, always),
        ("half gathered", "bfloat16", "auto", True, (1e9, 0.0)),
        ("varlen", "bfloat16", "varlen", True, never),
        ("compiled", "bfloat16", "auto", True, always),
    ):
        prefix_tree.FORWARD_ROWS, prefix_tree.BACKWARD_ROWS, prefix_tree.MOST_PATH_ROWS = *limits, 1e9
        config = EngineConfig(dtype="float32" if dtype == "float64" else dtype)
        model = load_model(folder, config, device=device, ds_config={}).to(device, getattr(torch, dtype))
        kernel = choose_kernel(kernel, device_type="cuda", dtype=torch.bfloat16)
        if name == "compiled":
            compile_layers(model, device_type="cuda", kernel=kernel)
        install_packed_forward(model, dense_log_prob, count_calls=name != "compiled")
        outputs, gradients = [], []
        for batch in batches:
            prefixes = batch.prefixes if share else None
            keeps = name in ("kept", "compiled")
            inputs, _ = packed_inputs(batch, device=device, kernel=kernel, prefixes=prefixes, keeps_paths=keeps)
            model.zero_grad()
            rows_RK = model(packed=inputs)
            token_loss(rows_RK[0], rows_RK[1], batch.columns["weights"].to(device)).backward()
            outputs.append(rows_RK[0].detach())
            gradients += [p.grad.flatten() for p in model.parameters() if p.grad is not None]
        results[name] = [torch.cat(outputs).double(), torch.cat(gradients).double()]
    errors = {
        name: [float((a - b).norm() / b.norm()) for a, b in zip(result, results["exact"], strict=True)]
        for name, result in results.items()
    }
    torch.use_deterministic_algorithms(False)
    pairs = (("again", "in place"), ("kept", "gathered"))
    same = [a.equal(b) for ours, others in pairs for a, b in zip(results[ours], results[others], strict=True)]
    say(rank, check="prefixes", same=same, errors=errors)


def check_offload(folder: str, device: torch.device, rank: int) -> None:
    for stage in (1, 2, 3):
        plain = engine_for(folder, device, stage=stage)
        expected = train(plain, rank, range(4))
        plain.close()
        del plain
        torch.cuda.empty_cache()
        engine = engine_for(folder, device, stage=stage)
        result = train(engine, rank, range(2))
        freed = []
        for include_params in (False, True):
            before = torch.cuda.memory_allocated(device)
            moved = engine.offload(include_params=include_params)
            after = torch.cuda.memory_allocated(device)
            engine.reload()
            freed.append([before - after, moved, after, torch.cuda.memory_allocated(device) - before])
        result += train(engine, rank, range(2, 4))
        numel = sum(getattr(p, "ds_numel", p.numel()) for p in engine.module.parameters())
        engine.close()
        say(rank, check="offload", stage=stage, equal=result == expected, freed=freed, numel=numel)


def check_checkpointing(folder: str, device: torch.device, rank: int) -> None:
    batch = make_batch(make_samples(200, seed=rank, longest=200))
    for stage in (2, 3):
        for options in (
            {},
            {"gradient_checkpointing": True},
            {"gradient_checkpointing": True, "checkpoint_to_cpu": True},
        ):
            engine = engine_for(folder, device, stage=stage, **options)
            torch.cuda.reset_peak_memory_stats(device)
            before = torch.cuda.memory_allocated(device)
            norm = engine.train_mini_batch([batch], weighted_loss).grad_norm
            peak = torch.cuda.max_memory_allocated(device) - before
            engine.close()
            say(rank, check="checkpointing", stage=stage, options=options, grad_norm=norm, peak_mib=peak / 2**20)


def check_sequence_parallel(folder: str, device: torch.device, rank: int, size: int) -> None:
    """Two ranks on the same micro batch against one rank that has it alone."""
    if size != 2:
        return
    samples = make_samples(6, seed=7, longest=90)
    cases: list[dict[str, Any]] = [{"stage": stage, "dtype": "float32", "attention": "sdpa"} for stage in (1, 2, 3)]
    cases += [{"stage": 2}, {"stage": 3, "gradient_checkpointing": True}, {"stage": 2, "compile": True}]
    for options in cases:
        results = []
        for sp in (1, 2):
            engine = engine_for(folder, device, sequence_parallel=sp, **options)
            batch = make_batch(samples if sp == 2 or rank == 0 else [])
            steps = [engine.train_mini_batch([batch], weighted_loss) for _ in range(3)]
            engine.close()
            results.append([[stats.loss, stats.grad_norm] for stats in steps])
        say(rank, check="sequence_parallel", options=options, alone=results[0], shared=results[1])


def check_reshape(folder: str, device: torch.device, rank: int) -> None:
    """State from one layout to the next: to the bit, and the next step goes on from there."""
    on_cpu = {"offload": OffloadConfig(optimizer="cpu")}
    layouts: list[dict[str, Any]] = [{"stage": 1}, {"stage": 3}, {"stage": 2, **on_cpu}, {"stage": 3, **on_cpu}]
    for first, second in zip(layouts, [*layouts[1:], layouts[0]], strict=True):
        result = hand_over(
            lambda options=first: engine_for(folder, device, dtype="float32", **options),
            lambda options=second: engine_for(folder, device, dtype="float32", **options),
            lambda engine, steps: train(engine, rank, steps),
        )
        say(rank, check="reshape", first=first["stage"], second=second["stage"], **result)


def say(rank: int, **values: Any) -> None:
    print(json.dumps({"rank": rank} | values), flush=True)


def main() -> None:
    folder, rank, size, port = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    device = torch.device("cuda", rank)
    ds_engine.init_distributed(rank, size, "127.0.0.1", port, device, timeout_s=120)
    check_stages(folder, device, rank)
    check_attention(folder, device, rank)
    check_compiled(folder, device, rank)
    check_prefixes(folder, device, rank)
    check_offload(folder, device, rank)
    check_checkpointing(folder, device, rank)
    check_sequence_parallel(folder, device, rank, size)
    check_reshape(folder, device, rank)
    say(rank, check="done")
    ds_engine.shutdown_distributed()


if __name__ == "__main__":
    main()
