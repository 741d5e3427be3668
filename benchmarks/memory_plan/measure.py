"""Compares the memory planner's estimate with the measured peak for random-weight Qwen3 models on one GPU.

    python -m benchmarks.memory_plan.measure [--out FILE]           # 0.6B, 1.7B and 4B at stage 2
    python -m benchmarks.memory_plan.measure --device cpu --tiny    # tests the script; measures nothing

Each case runs two training steps on packed sequences with rl_core's fused log-prob op, in its own process, at world
size 1. Prints one line of JSON per case, with the ratio of the estimate to the measured peak of torch's allocator.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.random_model import CONFIGS, model_config
from benchmarks.runs import json_line
from ds_engine import (
    EngineConfig,
    LoraConfig,
    LossOutput,
    OffloadConfig,
    SimpleBatch,
    ZeroConfig,
    ZeroEngine,
    estimate_memory,
    init_distributed,
)
from ds_engine.model.attention import ATTENTION_NAME, register_packed_attention
from ds_engine.model.nf4 import quantize_base
from rl_core import linear_log_prob

# Model -> (tokens per micro batch, tokens with activation checkpointing). Both fit into 141 GB.
CASES = {"qwen3-0.6b": (16384, 32768), "qwen3-1.7b": (12288, 32768), "qwen3-4b": (6144, 24576)}


def random_batch(num_tokens: int, length: int, vocab: int) -> SimpleBatch:
    """Packed random sequences of `length` tokens; the prompt is the first token of each."""
    ids = torch.randint(vocab, (num_tokens,), generator=torch.Generator().manual_seed(0)).tolist()
    rows = [ids[start : start + length] for start in range(0, num_tokens, length)]
    return SimpleBatch.pack([(row[:1], row[1:]) for row in rows])


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Run two training steps of one case in this process."""
    from transformers import AutoModelForCausalLM

    device = torch.device("cuda", 0) if args.device == "cuda" else torch.device("cpu")
    init_distributed(0, 1, "127.0.0.1", args.port, device)
    register_packed_attention()
    shape = model_config(args.models[0])
    config = EngineConfig(
        zero=ZeroConfig(stage=args.stage, offload=OffloadConfig(optimizer=args.offload)),
        lora=LoraConfig(rank=16, base_format="nf4") if args.nf4 else None,
        gradient_checkpointing=args.recompute,
        compile=args.compile,
        dtype=args.dtype,
    )
    dtype = torch.float32 if args.dtype == "float32" else torch.bfloat16
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(shape, dtype=dtype, attn_implementation=ATTENTION_NAME)
    if args.nf4:
        quantize_base(model, device=device)
        torch.cuda.empty_cache()
    engine = ZeroEngine(model, config, log_prob_fn=linear_log_prob, device=device)
    batch = random_batch(args.tokens, args.length, shape.vocab_size)
    num_targets = batch.target_ids_K.numel()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    for _ in range(2):
        engine.train_mini_batch(
            [batch] * args.micro_batches, lambda out, _: LossOutput(loss=-out.log_probs_K.sum() / num_targets)
        )
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else None
    engine.close()
    estimate = estimate_memory(
        shape.to_dict(),
        config,
        tokens_per_micro_batch=args.tokens,
        targets_per_micro_batch=num_targets,
        num_micro_batches=args.micro_batches,
    )
    return {
        "model": args.models[0],
        "stage": args.stage,
        "recompute": args.recompute,
        "compile": args.compile,
        "offload": args.offload,
        "nf4": args.nf4,
        "tokens": args.tokens,
        "micro_batches": args.micro_batches,
        "estimate_gb": {name: round(place.device / 1e9, 3) for name, place in estimate.rows()},
        "estimated_gb": round(estimate.device_bytes / 1e9, 3),
        "measured_gb": None if peak is None else round(peak / 1e9, 3),
        "ratio": None if peak is None else round(estimate.device_bytes / peak, 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", choices=sorted(CONFIGS), nargs="+", default=list(CASES))
    parser.add_argument("--stage", type=int, default=2)
    parser.add_argument("--tokens", type=int, help="tokens per micro batch; the default depends on the model")
    parser.add_argument("--length", type=int, default=512, help="tokens per sequence")
    parser.add_argument("--micro-batches", type=int, default=2)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--offload", choices=["none", "cpu"], default="none", help="optimizer offload")
    parser.add_argument("--nf4", action="store_true", help="train LoRA adapters of rank 16 on an NF4 base")
    parser.add_argument("--recompute", action="store_true", help="only with activation checkpointing (default: both)")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="use a model of half a million parameters and few tokens")
    parser.add_argument("--port", type=int, default=29631)
    parser.add_argument("--out", type=Path, help="file to which the lines are appended")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.here:
        print(json.dumps(measure(args)), flush=True)
        return
    cases = {"qwen3-tiny": (256, 256)} if args.tiny else {name: CASES.get(name, (8192, 8192)) for name in args.models}
    here = [sys.executable, "-m", "benchmarks.memory_plan.measure", *sys.argv[1:], "--here"]
    for name, sizes in cases.items():
        for recompute in [True] if args.recompute else [False, True]:
            tokens = str(args.tokens or sizes[recompute])
            line = json_line([*here, "--models", name, "--tokens", tokens, *(["--recompute"] if recompute else [])])
            print(line, flush=True)
            if args.out is not None:
                with args.out.open("a") as out:
                    out.write(line + "\n")


if __name__ == "__main__":
    main()
