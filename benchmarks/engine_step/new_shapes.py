"""Seconds of engine steps over batches of new shapes, and what each of them compiled (one GPU).

    python -m benchmarks.engine_step.new_shapes [--model qwen3-0.6b] [--random 6]
    python -m benchmarks.engine_step.new_shapes --device cpu --model qwen3-tiny --scale 16     # tests the script

A step computes old log-probs and takes one update over 128 sequences. The first two steps have workload W's sequences,
298 prompt and 512 response tokens each; in the third one response is shorter; the others draw every length. A step
whose shapes make something compile again is slower than the next: each line counts Triton kernels and torch.compile's
graphs, and torch prints why it compiled a graph again.
"""

import argparse
import itertools
import time
from collections import Counter
from typing import Any, Literal

import torch

from benchmarks.random_model import CONFIGS, model_config
from ds_engine import EngineConfig, LossOutput, SimpleBatch, ZeroConfig, ZeroEngine, init_distributed
from ds_engine.model.attention import ATTENTION_NAME, register_packed_attention
from rl_core import linear_log_prob

PROMPT, RESPONSE, SEQUENCES, BUDGET = 298, 512, 128, 16384


def lengths(step: int, generator: torch.Generator, scale: int) -> list[tuple[int, int]]:
    """(prompt, response) tokens of each sequence of a step."""
    prompt, response = PROMPT // scale, RESPONSE // scale
    if step < 3:
        shorter = int(step == 2) * response // 2
        return [(prompt, response - shorter * (i == 0)) for i in range(SEQUENCES)]
    prompts = torch.randint(prompt // 2, prompt, (SEQUENCES,), generator=generator).tolist()
    responses = torch.randint(response // 8, response, (SEQUENCES,), generator=generator).tolist()
    return list(zip(prompts, responses, strict=True))


def micro_batches(step: int, vocab: int, scale: int) -> list[SimpleBatch]:
    """The sequences of a step in order, packed up to the token budget."""
    generator = torch.Generator().manual_seed(step)
    rows: list[list[tuple[list[int], list[int]]]] = [[]]
    used = 0
    for prompt, response in lengths(step, generator, scale):
        if used + prompt + response > BUDGET // scale:
            rows.append([])
            used = 0
        ids = torch.randint(vocab, (prompt + response,), generator=generator).tolist()
        rows[-1].append((ids[:prompt], ids[prompt:]))
        used += prompt + response
    return [SimpleBatch.pack(row) for row in rows]


def count_kernels(counts: Counter[str]) -> None:
    """Counts Triton's compilations by kernel, those found in its cache on disk too."""
    from triton import knobs

    def listener(*, src: Any, **_: Any) -> None:
        counts[getattr(getattr(src, "fn", None), "__name__", "other")] += 1

    knobs.compilation.listener = listener


def timed(engine: ZeroEngine, batches: list[SimpleBatch], num_targets: int) -> list[float]:
    """Seconds of old log-probs and of an update."""

    def synchronize() -> float:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter()

    times = [synchronize()]
    engine.log_probs(batches)
    times.append(synchronize())
    engine.train_mini_batch(batches, lambda out, _: LossOutput(loss=-out.log_probs_K.sum() / num_targets))
    times.append(synchronize())
    return [end - start for start, end in itertools.pairwise(times)]


def main() -> None:
    """Builds an engine and prints a line per step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=sorted(CONFIGS), default="qwen3-0.6b")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--random", type=int, default=6, help="steps of random lengths")
    parser.add_argument("--scale", type=int, default=1, help="divides lengths and token budget")
    parser.add_argument("--recompute", action="store_true", help="with gradient checkpointing")
    parser.add_argument("--port", type=int, default=29641)
    args = parser.parse_args()
    torch._logging.set_logs(recompiles=True)  # type: ignore[attr-defined]
    kernels: Counter[str] = Counter()
    on_gpu = args.device == "cuda"
    if on_gpu:
        count_kernels(kernels)
    device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
    init_distributed(0, 1, "127.0.0.1", args.port, device)
    register_packed_attention()
    from transformers import AutoModelForCausalLM

    shape = model_config(args.model)
    dtype: Literal["bfloat16", "float32"] = "bfloat16" if on_gpu else "float32"
    with device:
        model = AutoModelForCausalLM.from_config(shape, dtype=getattr(torch, dtype), attn_implementation=ATTENTION_NAME)
    config = EngineConfig(zero=ZeroConfig(stage=2), dtype=dtype, compile=on_gpu, gradient_checkpointing=args.recompute)
    engine = ZeroEngine(model, config, log_prob_fn=linear_log_prob, device=device)
    for step in range(3 + args.random):
        batches = micro_batches(step, min(shape.vocab_size, 50_000), args.scale)
        num_targets = sum(batch.target_ids_K.numel() for batch in batches)
        kernels.clear()
        graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        seconds = timed(engine, batches, num_targets)
        graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"] - graphs
        print(
            f"step {step + 1}: log-probs {seconds[0]:.2f} s, update {seconds[1]:.2f} s; {len(batches)} micro batches; "
            f"graphs {graphs}; kernels {sum(kernels.values())} {dict(kernels)}",
            flush=True,
        )
    engine.close()


if __name__ == "__main__":
    main()
