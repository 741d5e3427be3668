"""Mismatch of a server and a trainer of a mixture of experts: with the trainer's own routes, and with those replayed.

`python -m benchmarks.router_replay FOLDER` writes a model with random weights to FOLDER, starts a server, samples from
it, and prints, as JSON: tokens per second of the server, bytes of routes, the share of tokens whose routes differ, and
for each way of routing the mismatch of the log-probs and the seconds of log-probs and updates.
"""

import argparse
import dataclasses
import json
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.random_model import byte_tokenizer
from ds_engine import EngineConfig, LossOutput, OptimConfig, ZeroEngine, init_distributed
from plinth_testing import free_port
from rl_core import Batch, linear_log_prob, mismatch_metrics
from rl_runtime.samples import batch_of
from rollout_vllm import Request, RolloutClient, RolloutConfig, Sample, SamplingConfig, ServerGroup

SIZES: dict[str, dict[str, Any]] = {
    # Qwen3-30B-A3B, with 4 of its 48 layers and a smaller vocabulary.
    "cut": {
        "hidden_size": 2048,
        "num_hidden_layers": 4,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
    },
    "small": {
        "hidden_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "moe_intermediate_size": 96,
        "num_experts": 32,
        "num_experts_per_tok": 4,
    },
}


def write_model(folder: Path, size: str, dtype: str, device: str) -> None:
    """Writes a Qwen3-MoE folder with random weights and a byte-level tokenizer, unless it exists."""
    import transformers

    if (folder / "config.json").exists():
        return
    tokenizer, common = (
        byte_tokenizer(),
        {"vocab_size": 32_768, "norm_topk_prob": True, "max_position_embeddings": 4096},
    )
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = transformers.Qwen3MoeConfig(**SIZES[size], **common, **ends, tie_word_embeddings=False)
    torch.manual_seed(0)
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def sampled(folder: Path, args: argparse.Namespace, *, routes: bool) -> tuple[list[Sample], float]:
    """Samples of a server, and its tokens per second after one warm-up."""
    config = RolloutConfig(
        routes=routes,
        dtype=args.dtype,
        max_model_len=args.prompt_tokens + args.new_tokens + 8,
        kv_cache_gib=args.kv_cache_gib,
        enforce_eager=True,  # starts sooner
    )
    random = np.random.default_rng(0)
    requests = [
        Request(prompt_id=str(i), prompt_ids=random.integers(3, 30_000, args.prompt_tokens), seed=1000 * i)
        for i in range(args.prompts)
    ]
    sampling = SamplingConfig(n=args.samples, max_tokens=args.new_tokens, ignore_eos=True)
    with ServerGroup.launch(folder, config, log_dir=folder / f"log_{routes}") as servers:
        servers.wait_ready()
        with RolloutClient(servers.endpoints, config) as client:
            client.generate_blocking(requests[:2], dataclasses.replace(sampling, max_tokens=8))
            started = time.monotonic()
            groups = client.generate_blocking(requests, sampling)
            seconds = time.monotonic() - started
    samples = [dataclasses.replace(sample, score=0.0) for group in groups for sample in group.samples]
    assert len(samples) == args.prompts * args.samples, [group.failures for group in groups]
    return samples, sum(sample.num_generated for sample in samples) / seconds


def loss(outputs: Any, batch: Any) -> LossOutput:
    """Negative log-likelihood, small enough to change nothing."""
    return LossOutput(loss=-1e-6 * outputs.log_probs_K.mean())


def without_prompts(batch: Batch) -> Batch:
    """The batch whose prompts are routed by the trainer itself (-1)."""
    is_prompt_T = torch.ones(batch.num_tokens, dtype=torch.bool)
    is_prompt_T[batch.target_index_K + 1] = False
    routes_TLk = batch.per_token["routes"].short()
    routes_TLk[is_prompt_T] = -1
    return dataclasses.replace(batch, per_token={"routes": routes_TLk})


def measure(
    engine: ZeroEngine, batches: list[Batch], mode: Any, num_updates: int
) -> tuple[dict[str, float], list[Any]]:
    """Mismatch and seconds of one way of routing; and the outputs."""
    engine.config = dataclasses.replace(engine.config, router_replay=mode)
    seconds = []
    for _ in range(2):
        started = time.monotonic()
        outputs = engine.log_probs(batches)
        seconds.append(time.monotonic() - started)
    log_probs_K = torch.cat([output.log_probs_K for output in outputs])
    rollout_K = torch.cat([batch.columns["rollout_log_probs"] for batch in batches])
    lens_S = torch.cat([batch.response_lens_S for batch in batches])
    metrics = mismatch_metrics(log_probs_K, rollout_K, response_lens_S=lens_S)
    row = {name: metrics[name] for name in ("abs_mean", "abs_max", "kl_k3", "ess", "seq_ess")}
    row["log_probs_s"] = seconds[-1]
    if num_updates:
        replay, engine._micro_batches.replay = engine._micro_batches.replay, None
        if mode == "R3":
            engine._micro_batches.replay = replay
        times = []
        for _ in range(num_updates):
            started = time.monotonic()
            stats = engine.train_mini_batch(batches, loss)
            times.append(time.monotonic() - started)
        row |= {"update_s": statistics.median(times), "routes_differ": stats.metrics.get("routes_differ", 0.0)}
        engine._micro_batches.replay = replay
    return row, outputs


def differing(batches: list[Batch], outputs: list[Any]) -> dict[str, Any]:
    """Shares of tokens that server and trainer route to other experts: by layer, in any layer, of prompts alone."""
    differs, prompts = [], []
    for batch, output in zip(batches, outputs, strict=True):
        known_T = torch.ones(batch.num_tokens, dtype=torch.bool)
        known_T[batch.cu_seqlens_S1[1:].long() - 1] = False
        is_prompt_T = torch.ones(batch.num_tokens, dtype=torch.bool)
        is_prompt_T[batch.target_index_K + 1] = False
        own, servers = (x.short().sort(-1)[0] for x in (output.routes_TLk, batch.per_token["routes"]))
        differs.append((own != servers).any(-1)[known_T])
        prompts.append(is_prompt_T[known_T])
    differs_TL, is_prompt_T = torch.cat(differs).double(), torch.cat(prompts)
    return {
        "by_layer": [round(float(share), 5) for share in differs_TL.mean(0)],
        "any_layer": float(differs_TL.amax(1).mean()),
        "any_layer_prompts": float(differs_TL.amax(1)[is_prompt_T].mean()),
        "tokens": len(differs_TL),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--sequences", type=int, default=8, help="per micro batch")
    parser.add_argument("--updates", type=int, default=0)
    parser.add_argument("--kv-cache-gib", type=float, default=0.5)
    parser.add_argument("--throughput", action="store_true", help="also of a server without routes")
    args = parser.parse_args()
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    write_model(args.folder, args.size, args.dtype, device.type)
    if args.throughput:
        print(json.dumps({"tokens_per_s_without_routes": sampled(args.folder, args, routes=False)[1]}), flush=True)
    samples, speed = sampled(args.folder, args, routes=True)
    assert samples[0].routes is not None
    per_token = samples[0].routes.nbytes // len(samples[0].routes)
    print(json.dumps({"tokens_per_s": speed, "bytes_per_token": per_token, "device": str(device)}), flush=True)
    batch = batch_of(samples)
    places = range(0, batch.num_sequences, args.sequences)
    batches = [batch.select(list(range(i, min(i + args.sequences, batch.num_sequences)))) for i in places]
    init_distributed(rank=0, world_size=1, master_addr="127.0.0.1", master_port=free_port(), device=device)
    engine = ZeroEngine.from_pretrained(
        str(args.folder),
        EngineConfig(dtype=args.dtype, router_replay="R3", optim=OptimConfig(lr=1e-12)),
        log_prob_fn=linear_log_prob,
        device=device,
        trainable=args.updates > 0,
    )
    row, outputs = measure(engine, batches, "R2", args.updates)
    print(json.dumps({"differ": differing(batches, outputs)}), flush=True)
    print(json.dumps({"routes": "the trainer's own", **row}), flush=True)
    print(json.dumps({"routes": "replayed", **measure(engine, batches, "R3", args.updates)[0]}), flush=True)
    alone = [without_prompts(batch) for batch in batches]
    print(json.dumps({"routes": "replayed, responses alone", **measure(engine, alone, "R3", 0)[0]}), flush=True)
    engine.close()


if __name__ == "__main__":
    main()
