"""Hybrids on packed rows beside padded rows: updates at ZeRO-2 with random weights, in one process for each model.

    python -m benchmarks.hybrids.run [--models qwen3_5-0.8b] [--kernels fla torch] [--lengths W lognormal]
    python -m benchmarks.hybrids.run --models qwen3_5-tiny --kernels torch --rounds 1       # on a CPU
    python -m benchmarks.hybrids.run --trials qwen3_next mamba2                             # exactness of small copies

`rows` is transformers' own forward of padded rows, `packed` the engine's of one packed row; both compute the same
micro batches. With `--kernels torch` neither finds flash-linear-attention. Every line of output is JSON.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from functools import partial
from typing import Any, Literal

from benchmarks.runs import free_port
from benchmarks.sft_step.workload import lengths as lognormal_lengths

LENGTHS = {"W": [(297, 512)] * 64, "lognormal": lognormal_lengths(64)}
"""(prompt tokens, response tokens) of each sequence; W: every response has the largest number of tokens."""
MODELS: dict[str, dict[str, Any]] = {
    "qwen3_5-0.8b": {
        "model_type": "qwen3_5_text",
        "vocab_size": 151936,
        "hidden_size": 1024,
        "intermediate_size": 3584,
        "num_hidden_layers": 24,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 16,
        "tie_word_embeddings": True,
    },
    "mamba2-370m": {
        "model_type": "mamba2",
        "vocab_size": 50288,
        "hidden_size": 1024,
        "num_hidden_layers": 48,
        "num_heads": 32,
        "n_groups": 1,
        "tie_word_embeddings": True,
    },
    "lfm2-350m": {
        "model_type": "lfm2",
        "vocab_size": 65536,
        "hidden_size": 1024,
        "intermediate_size": 6656,
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
        "layer_types": ["full_attention" if i in (2, 5, 8, 10, 12, 14) else "conv" for i in range(16)],
    },
    "qwen3_5-tiny": {
        "model_type": "qwen3_5_text",
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
    },
}
"""Configurations of about these sizes; Qwen3.5's vocabulary is Qwen3's."""


def leave_untuned() -> None:
    """Lets every autotuned Triton kernel have one configuration, of four warps and three stages if it has that."""
    from triton.runtime.autotuner import Autotuner

    start = Autotuner.__init__

    def order(config: Any) -> tuple[Any, ...]:
        sizes = [value for value in config.kwargs.values() if type(value) is int]
        return (max(sizes, default=0) > 64, abs(config.num_warps - 4), abs(config.num_stages - 3), -sum(sizes))

    def init(self: Any, fn: Any, names: Any, configs: Any, *args: Any, **kwargs: Any) -> None:
        start(self, fn, names, [min(configs, key=order)] if configs else configs, *args, **kwargs)

    Autotuner.__init__ = init


def say(**record: Any) -> None:
    """Prints a record."""
    print(json.dumps(record), flush=True)


def build(name: str, *, rows: bool, compiled: bool, device: Any) -> Any:
    """An engine with random weights, the same for both ways."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from ds_engine import EngineConfig, ZeroConfig, ZeroEngine
    from ds_engine.model.attention import ATTENTION_NAME, register_packed_attention
    from ds_engine.model.packed_model import mark_way
    from rl_core import linear_log_prob

    register_packed_attention()
    shape = dict(MODELS[name])
    config = AutoConfig.for_model(shape.pop("model_type"), **shape)
    dtype: Literal["bfloat16", "float32"] = "bfloat16" if device.type == "cuda" else "float32"
    torch.manual_seed(0)
    with device:
        options = {} if rows else {"attn_implementation": ATTENTION_NAME}
        module = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype), **options)
    mark_way(module, rows=rows, shares_prefixes=False)  # as loading from a folder does, after its check
    engine_config = EngineConfig(zero=ZeroConfig(stage=2), dtype=dtype, compile=compiled)
    return ZeroEngine(module, engine_config, log_prob_fn=linear_log_prob, device=device)


def timed_update(engine: Any, batches: list[Any]) -> float:
    """Seconds of forward and backward passes and AdamW's step."""
    import torch

    from ds_engine import LossOutput

    share = 1 / sum(batch.num_targets for batch in batches)
    start = time.perf_counter()
    engine.train_mini_batch(batches, lambda out, _: LossOutput(loss=-out.log_probs_K.sum() * share))
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start


def measure(name: str, args: argparse.Namespace) -> None:
    """All ways and lengths of one model."""
    import numpy as np
    import torch

    from ds_engine import init_distributed
    from ds_engine.model.recurrence import has_kernels
    from rl_core import pack, plan_micro_batches

    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    init_distributed(0, 1, "127.0.0.1", free_port(), device)
    vocab = MODELS[name]["vocab_size"]
    scale = 1 if device.type == "cuda" else 32

    def batches_of(lengths: list[tuple[int, int]]) -> list[Any]:
        draw = np.random.default_rng(0)
        sizes = [(1 + p // scale, 1 + r // scale) for p, r in lengths]
        batch = pack(*([draw.integers(vocab, size=n) for n in part] for part in zip(*sizes, strict=True)))
        plan = plan_micro_batches(batch.seq_lens_S.tolist(), num_ranks=1, token_budget=args.tokens // scale)
        return [batch.select(samples) for samples in plan.assignment[0]]

    log_probs: dict[str, torch.Tensor] = {}
    for way in args.ways:
        engine = build(name, rows=way == "rows", compiled=way == "compiled", device=device)
        update = partial(timed_update, engine)
        small = batches_of([(60, 90), (10, 33), (200, 100)])
        log_probs[way] = torch.cat([output.log_probs_K for output in engine.log_probs(small)])
        start = time.perf_counter()
        update(small)  # compiles kernels
        say(model=name, way=way, kernels=has_kernels(), warm_up_s=round(time.perf_counter() - start, 1))
        for length in args.lengths:
            batches = batches_of(LENGTHS[length])
            tokens = sum(batch.num_tokens for batch in batches)
            record: dict[str, Any] = {"model": name, "way": way, "kernels": has_kernels(), "lengths": length}
            try:
                update(batches)
                if device.type == "cuda":
                    torch.cuda.reset_peak_memory_stats()
                seconds = [update(batches) for _ in range(args.rounds)]
            except torch.OutOfMemoryError:
                say(**record, out_of_memory=True)
                continue
            padded = sum(len(b.seq_lens_S) * int(b.seq_lens_S.max()) for b in batches)
            peak = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else None
            median = statistics.median(seconds)
            record |= {"tokens": tokens, "padded_tokens": padded, "micro_batches": len(batches), "peak_gib": peak}
            say(**record, seconds=median, fastest=min(seconds), tokens_per_s=tokens / median)
        engine.close()
        del engine, update
        torch.cuda.empty_cache()
    first, *others = log_probs.items()
    for way, values_K in others:
        difference_K = (values_K - first[1]).abs()
        say(model=name, between=[first[0], way], mean=float(difference_K.mean()), max=float(difference_K.max()))


def trials(families: list[str]) -> None:
    """Outputs and gradients of small copies, packed and alone, on the GPU if there is one."""
    import torch
    from transformers import CONFIG_MAPPING

    from ds_engine.model import trial

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for family in families:
        try:
            say(family=family, trial=str(trial._try_once(CONFIG_MAPPING[family](), "lm", device)))
        except Exception as error:  # recorded, and the next one is tried
            say(family=family, error=f"{type(error).__name__}: {error}"[:600])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["qwen3_5-0.8b", "mamba2-370m", "lfm2-350m"])
    parser.add_argument("--kernels", nargs="+", choices=("fla", "torch"), default=["fla", "torch"])
    parser.add_argument("--ways", nargs="+", choices=("rows", "packed", "compiled"), default=["rows", "packed"])
    parser.add_argument("--lengths", nargs="+", choices=LENGTHS, default=list(LENGTHS))
    parser.add_argument("--tokens", type=int, default=8192, help="tokens of a micro batch")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--untuned", action="store_true", help="one configuration of each kernel of fla")
    parser.add_argument("--trials", nargs="+", default=[], help="families whose small copies are tried instead")
    args = parser.parse_args()
    if args.untuned:
        leave_untuned()
    if args.trials:
        trials(args.trials)
    elif len(args.models) == len(args.kernels) == 1:
        if args.kernels == ["torch"]:
            sys.modules["fla"] = None  # type: ignore[assignment]  # an import of it fails, as where it is missing
        measure(args.models[0], args)
    else:
        for model in args.models:
            for kernels in args.kernels:
                rest = ["--ways", *args.ways, "--lengths", *args.lengths, "--tokens", str(args.tokens)]
                command = [sys.executable, "-m", "benchmarks.hybrids.run", "--models", model, "--kernels", kernels]
                subprocess.run([*command, *rest, "--rounds", str(args.rounds)], check=False)


if __name__ == "__main__":
    main()
