"""The update of workload W on several ranks without Ray and servers: `python -m benchmarks.scaling.updates MODEL`.

Every rank plans the same batch and computes its own part. A line of JSON for each rank and step has the seconds of the
phases, of the calls of the rank, and of the rest, which is a driver's work. Cases are ZeRO-1, which reduces gradients
once in an update and not after each micro batch, ZeRO-2, and the collective guard on. The last step is traced:
milliseconds of kernels, of NCCL's kernels beside no other, and of an idle GPU. On a CPU it only shows that it runs.
"""

import argparse
import json
import os
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.multiprocessing.spawn import spawn

from benchmarks.grpo_step.workload import NEW_TOKENS, NUM_PROMPTS, PROMPT_TOKENS, SAMPLES
from benchmarks.runs import free_port
from rl_core import Batch, BatchConfig, pack, split_mini_batches


class OneRank:
    """The `WorkerGroup` of a driver that each rank runs for itself, with the seconds of its calls."""

    def __init__(self, worker: Any, num_ranks: int) -> None:
        self.worker, self.world_size, self.spent = worker, num_ranks, defaultdict[str, float](float)

    def run(self, method: Any, *args: Any, **keywords: Any) -> list[Any]:
        begin = time.perf_counter()
        result = method(self.worker, *args, **keywords)
        self.spent[method.__name__] += time.perf_counter() - begin
        return [result] * self.world_size

    def run_each(self, method: Any, parts: Sequence[Any], *args: Any, **keywords: Any) -> list[Any]:
        return self.run(method, parts[self.worker.rank], *args, **keywords)


def batch_of_step(seed: int, num_prompts: int, tokens: int) -> Batch:
    """A step of W with random tokens and scores."""
    draw, size = np.random.default_rng(seed), num_prompts * SAMPLES
    prompts, responses = (list(draw.integers(5, 200, (size, length))) for length in (PROMPT_TOKENS, tokens))
    facts = {"scores": torch.from_numpy(draw.integers(0, 2, size).astype(np.float64))}
    facts |= {"group_ids": torch.arange(size) // SAMPLES, "is_truncated": torch.ones(size, dtype=torch.bool)}
    facts["total_lens"] = torch.full((size,), tokens)
    columns = {"rollout_log_probs": torch.full((size * tokens,), -2.0), "staleness": torch.zeros(size * tokens)}
    return pack(prompts, responses, columns=columns, per_sequence=facts)


def traced(path: Path) -> Iterator[dict[str, Any]]:
    """Milliseconds of the GPU in each call of a rank, from a Chrome trace."""
    events = json.loads(path.read_text())["traceEvents"]
    kernels = sorted((e["ts"], e["ts"] + e["dur"], "nccl" in e["name"]) for e in events if e.get("cat") == "kernel")
    for span in events:
        if span.get("cat") != "user_annotation" or not span["name"].startswith("actor:"):
            continue
        own = [one for one in kernels if span["ts"] <= one[0] < span["ts"] + span["dur"]]
        busy, compute = covered(own), covered([one for one in own if not one[2]])
        times = {"wall": span["dur"], "kernels": compute, "nccl_alone": busy - compute, "idle": span["dur"] - busy}
        yield {"call": span["name"], **{f"{name}_ms": round(us / 1e3, 1) for name, us in times.items()}}


def covered(spans: Sequence[tuple[float, float, bool]]) -> float:
    """The time that at least one of these spans, in the order of their starts, covers."""
    total, end = 0.0, 0.0
    for first, last, _ in spans:
        total, end = total + max(0.0, last - max(first, end)), max(end, last)
    return total


def run_rank(rank: int, port: int, args: argparse.Namespace) -> None:
    """One rank: all cases."""
    os.environ["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7").split(",")[rank]
    from ds_engine import EngineConfig
    from ds_engine.guard.collective_guard import start_guard
    from rl_runtime import ModelHandle, OldLogProbs, PolicyConfig, TrainBatch, advantages, loss_weights, policy_loss
    from rl_runtime.ranks.trainer_worker import TrainerWorker

    device = "cuda" if torch.cuda.is_available() else "cpu"
    worker = TrainerWorker(rank, args.ranks, device=device, num_threads=1)
    worker.connect("127.0.0.1", port)
    num_prompts = args.prompts * args.ranks
    limits = BatchConfig(train_batch_size=num_prompts, mini_batch_size=num_prompts // 2)
    group: Any = OneRank(worker, args.ranks)
    actor, engine = ModelHandle(group, "actor", limits), EngineConfig(compile=device == "cuda")
    algorithm = PolicyConfig(kl_coef=0.0)
    loss = partial(policy_loss, config=algorithm, kl_coef=0.0)

    def say(**row: Any) -> None:
        print(json.dumps({"rank": rank, **row}) + "\n", end="", flush=True)

    def step(case: str, number: int) -> None:
        batch, phases = batch_of_step(number, num_prompts, args.tokens), defaultdict[str, float](float)

        @contextmanager
        def phase(name: str) -> Iterator[None]:
            begin = time.perf_counter()
            yield
            phases[name] += time.perf_counter() - begin

        group.spent.clear()
        torch.distributed.barrier()
        begin = time.perf_counter()
        minis = split_mini_batches(batch.per_sequence["group_ids"].tolist(), limits.mini_batch_size)
        batch.add_columns(**loss_weights(batch, algorithm, max_tokens=args.tokens, mini_batches=minis))
        with TrainBatch(batch, mini_batches=minis) as train_batch:
            old = OldLogProbs(actor, train_batch, defer_first=True)
            with phase("old_log_prob"):
                old.compute()
            batch.add_columns(**advantages(batch, algorithm, max_tokens=args.tokens, kl_coef=0.0)[0])
            with phase("update_actor"):
                for mini in train_batch.mini_batches:
                    old.update(mini, loss)
        wall = time.perf_counter() - begin
        times = {"step": wall, **phases, **group.spent, "driver": wall - sum(group.spent.values())}
        say(case=case, **{key: round(s, 3) for key, s in times.items()})

    for stage in (1, 2):
        worker.build("actor", args.model, replace(engine, zero=replace(engine.zero, stage=stage)), 100)
        for number in range(args.steps):
            step(f"ZeRO-{stage}", number)
    guard = start_guard("auto", stall_timeout_s=200.0)
    for number in range(args.steps):
        step("ZeRO-2, guarded", number)
    if guard is not None:
        guard.stop()
    with tempfile.TemporaryDirectory() as folder:
        worker.start_profile()
        step("ZeRO-2, traced", 0)
        worker.stop_profile(path := f"{folder}/trace.json")
        for line in traced(Path(path)):
            say(**line)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a folder, such as benchmarks.grpo_step.workload writes")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=4, help="of each case; the first of a stage compiles")
    parser.add_argument("--prompts", type=int, default=NUM_PROMPTS, help="per rank")
    parser.add_argument("--tokens", type=int, default=NEW_TOKENS, help="of a response")
    args = parser.parse_args()
    spawn(run_rank, (free_port(), args), nprocs=args.ranks)


if __name__ == "__main__":
    main()
