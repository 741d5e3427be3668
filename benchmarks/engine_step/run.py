"""Benchmarks one optimizer step: ds_engine with the fused log-prob op and plain Hugging Face + DeepSpeed, in one run.

    python -m benchmarks.engine_step.run [--gpus 2] [--stages 1 2 3] [--device cpu --model qwen3-tiny]
    python -m benchmarks.engine_step.run --gpus 2 --contestants ours --sequence-parallel 2
    python -m benchmarks.engine_step.run --gpus 2 --stages 2 3 --contestants ddp plain ours
    python -m benchmarks.engine_step.run --contestants ours --length 1024 4096 16384 --tokens 16384
    python -m benchmarks.engine_step.run --contestants ours --length 131072 --num-sequences 1 --tiled-mlp 4096
    python -m benchmarks.engine_step.run --contestants ours --stages 3 --draw --model qwen2-7b

`ddp` has no ZeRO stage: it runs once, and its line says stage 0.

Each rank (with sequence parallelism each group of ranks) trains on the same number of sequences of equal length, so the
plain step has no padding. The plain step computes an fp32 log-softmax of all logits and SDPA attention, with unmodified
DeepSpeed. Each case runs in its own processes, so cases do not share memory. A step is timed from before its forward
pass until every device is idle. Prints one line of JSON per case: tokens per second of all ranks, the median and the
fastest step, the model FLOPs utilization, and the peak device memory of rank 0 with the plan's estimate for ours.
"""

import argparse
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import torch
import torch.distributed as dist

from benchmarks.flops import training_mfu
from benchmarks.random_model import CONFIGS, ensure_random_model, write_empty_model
from benchmarks.runs import free_port, json_line
from ds_engine import (
    EngineConfig,
    LoraConfig,
    LossOutput,
    ModelShape,
    OptimConfig,
    SimpleBatch,
    ZeroConfig,
    ZeroEngine,
    estimate_memory,
    init_distributed,
)
from ds_engine.model import loading
from ds_engine.planning.memory_plan import LOG_PROB_BYTES
from rl_core import linear_log_prob


def sequences(num: int, length: int, vocab: int, rank: int) -> torch.Tensor:
    """[num, length] random token ids, different on every rank."""
    return torch.randint(vocab, (num, length), generator=torch.Generator().manual_seed(rank))


@dataclass(frozen=True, kw_only=True)
class Case:
    """Input of each contestant."""

    folder: str
    stage: Literal[1, 2, 3]
    ids_SL: torch.Tensor
    device: torch.device
    recompute: bool
    keep_bytes: int
    """Bytes of logits that the fused op may keep; autograd keeps all of them."""
    sp: int
    tiled_mlp: int
    lora_rank: int
    optimizer: str
    to_cpu: bool


class Plain:
    """transformers' forward, fp32 log-softmax over the logits, DeepSpeed's own backward and step."""

    def __init__(self, case: Case) -> None:
        import deepspeed
        from transformers import AutoModelForCausalLM
        from transformers.integrations import HfDeepSpeedConfig

        settings: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_clipping": 1.0,
            "bf16": {"enabled": True},
            "zero_optimization": {"stage": case.stage},
            "zero_allow_untested_optimizer": True,
        }
        keep = HfDeepSpeedConfig(settings) if case.stage == 3 else None
        model = AutoModelForCausalLM.from_pretrained(case.folder, dtype=torch.bfloat16, attn_implementation="sdpa")
        del keep
        if case.recompute:
            model.gradient_checkpointing_enable()
        model.to(case.device)
        model.train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
        self.engine, _, _, _ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
        self.ids_SL = case.ids_SL.to(case.device)

    def step(self) -> None:
        logits_SLV = self.engine(input_ids=self.ids_SL, use_cache=False).logits[:, :-1]
        log_p_SLV = logits_SLV.float().log_softmax(-1)
        chosen_SL = log_p_SLV.gather(-1, self.ids_SL[:, 1:, None])
        self.engine.backward(-chosen_SL.mean())
        self.engine.step()

    def close(self) -> None:
        self.engine.destroy()


class Ddp:
    """torch's DistributedDataParallel: fp32 parameters, autocast to bf16, the plain step's forward and loss."""

    def __init__(self, case: Case) -> None:
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(case.folder, dtype=torch.float32, attn_implementation="sdpa")
        if case.recompute:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        model.to(case.device).train()
        devices = [case.device.index] if case.device.type == "cuda" else None
        self.model = torch.nn.parallel.DistributedDataParallel(model, device_ids=devices)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
        self.ids_SL = case.ids_SL.to(case.device)

    def step(self) -> None:
        with torch.autocast(self.ids_SL.device.type, torch.bfloat16):
            logits_SLV = self.model(input_ids=self.ids_SL, use_cache=False).logits[:, :-1]
        log_p_SLV = logits_SLV.float().log_softmax(-1)
        (-log_p_SLV.gather(-1, self.ids_SL[:, 1:, None]).mean()).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def close(self) -> None:
        pass


class Ours:
    """ds_engine on one packed micro batch with rl_core's fused op."""

    def __init__(self, case: Case) -> None:
        config = EngineConfig(
            zero=ZeroConfig(stage=case.stage),
            optim=OptimConfig(name=case.optimizer, grad_clip=1.0),
            gradient_checkpointing=case.recompute,
            checkpoint_to_cpu=case.to_cpu,
            compile=True,
            tiled_mlp=case.tiled_mlp,
            lora=LoraConfig(rank=case.lora_rank) if case.lora_rank else None,
            sequence_parallel=case.sp,
        )
        log_prob_fn = partial(linear_log_prob, keep_bytes=case.keep_bytes)
        self.engine = ZeroEngine.from_pretrained(case.folder, config, log_prob_fn=log_prob_fn, device=case.device)
        self.batch = SimpleBatch.pack([(row[:1], row[1:]) for row in case.ids_SL.tolist()])
        self.planned = estimate_memory(
            case.folder,
            config,
            dp=dist.get_world_size() // case.sp,
            tokens_per_micro_batch=len(self.batch.input_ids_T),
            num_micro_batches=1,
            log_prob_bytes=max(case.keep_bytes, LOG_PROB_BYTES),
        ).device_bytes
        self.share = 1 / (dist.get_world_size() // case.sp * self.batch.target_ids_K.numel())

    def step(self) -> None:
        share = self.share
        self.engine.train_mini_batch([self.batch], lambda out, _: LossOutput(loss=-out.log_probs_K.sum() * share))

    def close(self) -> None:
        self.engine.close()


CONTESTANTS: dict[str, Callable[[Case], Any]] = {
    "plain": Plain,
    "ddp": Ddp,
    "ours": Ours,
}


def idle(device: torch.device) -> None:
    dist.barrier()
    if device.type == "cuda":
        torch.cuda.synchronize()


def peak_gib(device: torch.device) -> float:
    """Peak of this rank's allocator until now; 0 on the CPU."""
    return round(torch.cuda.max_memory_allocated() / 2**30, 2) if device.type == "cuda" else 0.0


def timed_steps(contestant: Any, args: argparse.Namespace, device: torch.device) -> list[float]:
    """Seconds of each step after the warm-up, measured until every device is idle."""
    seconds = []
    for number in range(args.warm_up + args.rounds):
        idle(device)
        start = time.perf_counter()
        contestant.step()
        idle(device)
        seconds.append(time.perf_counter() - start)
        say(f"step {number + 1}: {seconds[-1]:.3f} s, peak {peak_gib(device)} GiB")
    return seconds[args.warm_up :]


def say(text: str) -> None:
    """A line of the first rank on stderr: what a case that is cut off had measured."""
    if dist.get_rank() == 0:
        print(text, file=sys.stderr, flush=True)


def milliseconds(seconds: Iterable[float]) -> float:
    """Median in milliseconds."""
    return round(1000 * statistics.median(seconds), 1)


def measure(
    name: str, stage: Literal[1, 2, 3], args: argparse.Namespace, folder: str, device: torch.device
) -> dict[str, Any]:
    """Build the contestant, warm it up and time its steps."""
    sp, length = args.sequence_parallel, args.length[0]
    num_sequences = args.tokens // length if args.tokens else args.num_sequences
    ids_SL = sequences(num_sequences, length, CONFIGS[args.model]["vocab_size"], dist.get_rank() // sp)
    keep_bytes = int(args.keep_gib * 2**30)
    case = Case(
        folder=folder,
        stage=stage,
        ids_SL=ids_SL,
        device=device,
        recompute=args.recompute,
        keep_bytes=keep_bytes,
        sp=sp,
        tiled_mlp=args.tiled_mlp,
        lora_rank=args.lora_rank,
        optimizer=args.optimizer,
        to_cpu=args.to_cpu,
    )
    begin = time.perf_counter()
    with mock.patch.object(loading, "refuse_incomplete", return_value=False) if args.draw else nullcontext():
        contestant = CONTESTANTS[name](case)
    say(f"{name}, stage {stage}, {length} tokens: built in {time.perf_counter() - begin:.1f} s")
    timed = timed_steps(contestant, args, device)
    contestant.close()
    peaks: list[float] = [0.0] * dist.get_world_size()
    dist.all_gather_object(peaks, peak_gib(device))
    tokens = ids_SL.numel() * dist.get_world_size() // sp
    gpu_seconds = statistics.median(timed) * dist.get_world_size()
    work = {"prompt": 1, "response": length - 1, "sequences": tokens // length, "gpu_seconds": gpu_seconds}
    mfu = training_mfu(ModelShape.read(folder), **work)
    return {
        "contestant": name,
        "stage": stage,
        "gpus": dist.get_world_size(),
        "sequence_parallel": sp,
        "recompute": args.recompute,
        "tiled_mlp": args.tiled_mlp,
        "lora_rank": args.lora_rank,
        "optimizer": args.optimizer,
        "to_cpu": args.to_cpu,
        "keep_gib": args.keep_gib,
        "length": length,
        "tokens": tokens,
        "median_ms": milliseconds(timed),
        "fastest_ms": round(1000 * min(timed), 1),
        "tokens_per_s": round(tokens / statistics.median(timed)),
        "mfu": round(mfu, 3) if device.type == "cuda" else None,
        "peak_gib": peaks if device.type == "cuda" else None,
        "planned_gib": round(contestant.planned / 2**30, 2) if isinstance(contestant, Ours) else None,
    }


def cases(stages: Iterable[int], contestants: Iterable[str]) -> list[tuple[int, str]]:
    """(stage, contestant) of each process group; DDP, which has no stage, first and once."""
    names = list(contestants)
    staged = itertools.product(stages, (name for name in names if name != "ddp"))
    return [(0, "ddp")] * ("ddp" in names) + list(staged)


def work(args: argparse.Namespace) -> None:
    """Run one rank of one case."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if args.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    init_distributed(rank, size, "127.0.0.1", args.store_port, device)
    result = measure(args.contestants[0], args.stages[0], args, args.folder, device)
    if rank == 0:
        print(json.dumps(result), flush=True)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=sorted(CONFIGS), default="qwen3-0.6b")
    parser.add_argument("--gpus", type=int, default=1, help="ranks, one GPU each")
    parser.add_argument("--stages", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--contestants", choices=sorted(CONTESTANTS), nargs="+", default=["plain", "ours"])
    parser.add_argument("--num-sequences", type=int, default=24, help="sequences per rank (or sp group)")
    parser.add_argument("--length", type=int, nargs="+", default=[512], help="tokens per sequence, in turn")
    parser.add_argument("--tokens", type=int, help="tokens per rank (or sp group), instead of --num-sequences")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--warm-up", type=int, default=4)
    parser.add_argument("--sequence-parallel", type=int, default=1, help="ranks that share a micro batch; ours only")
    parser.add_argument("--recompute", action="store_true", help="use activation checkpointing")
    parser.add_argument("--tiled-mlp", type=int, default=0, help="tokens of a tile of the MLPs; ours only")
    parser.add_argument("--lora-rank", type=int, default=0, help="train adapters of this rank; ours only")
    parser.add_argument("--optimizer", default="adamw", help="ours only")
    parser.add_argument("--to-cpu", action="store_true", help="inputs of recomputed layers in host memory; ours only")
    parser.add_argument(
        "--draw", action="store_true", help="weights are drawn on the devices, not read; ours at stage 3"
    )
    parser.add_argument("--keep-gib", type=float, default=0.5, help="GiB of logits that the fused op may keep")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    parser.add_argument("--store-port", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if "RANK" in os.environ:
        work(args)
        return
    if args.gpus % args.sequence_parallel or (args.sequence_parallel > 1 and {"plain", "ddp"} & set(args.contestants)):
        parser.error(
            "--sequence-parallel must divide --gpus, and plain and ddp do not support it: use --contestants ours"
        )
    if args.draw and (args.stages != [3] or args.contestants != ["ours"]):
        parser.error("--draw needs --stages 3 --contestants ours: otherwise transformers draws on the CPU")
    if args.tokens is not None and args.tokens < max(args.length):
        parser.error(f"--tokens must be --length ({max(args.length)}) or more")
    # --standalone selects a free port, so that one host can run several cases at a time.
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    launch += [f"--nproc-per-node={args.gpus}", "-m", __spec__.name]
    lines: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        (write_empty_model if args.draw else ensure_random_model)(args.model, Path(folder))
        for length, (stage, name) in itertools.product(args.length, cases(args.stages, args.contestants)):
            # torchrun itself listens at MASTER_PORT.
            case = ["--folder", folder, "--stages", str(stage), "--contestants", name, "--store-port", str(free_port())]
            lines.append(json_line([*launch, *sys.argv[1:], *case, "--length", str(length)]))
            print(lines[-1], flush=True)
    sys.exit(any("failed_with_exit_code" in line for line in lines))


if __name__ == "__main__":
    main()
