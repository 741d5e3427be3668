"""The collective guard of ds_engine in plain DDP and FSDP2 scripts, which do not use DeepSpeed.

    python examples/collective_guard.py
    torchrun --nproc-per-node 2 your_script.py      # in a script of your own: `with CollectiveGuard(): train()`

What it buys: a rank that calls a collective alone, such as a gradient norm that only one rank logs, becomes an error on
every rank that names both calls. Without the guard ranks hang until the timeout of the process group (30 minutes by
default), or the backend fails without naming the cause. The script plants that mistake in both kinds of training, with
and without the guard, and measures what the guard costs.

Measured with this command on two CPU cores (gloo, lockstep mode, which compares ranks before every collective):

* DDP: `CollectiveMismatchError` on both ranks after 0.5 s, naming `all_reduce of 1 float32` on rank 1 and its line
  against `all_reduce of 263168 float32` on rank 0. Without the guard rank 1 aborts (SIGABRT) inside gloo and rank 0
  reports "Connection reset by peer". A step of 7.2 ms takes 9.4 ms.
* FSDP2: the same error after 0.3 s. Without the guard both ranks still hang after 10 s. A step of 41 ms takes 48 ms.

On GPUs the guard compares twice per second instead ("watch"); docs/ds_engine.md has what that costs.
"""

import argparse
import contextlib
import queue
import time
from collections.abc import Iterator
from functools import partial
from multiprocessing import get_context
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from ds_engine import CollectiveGuard, CollectiveMismatchError, mark
from plinth_testing import fork_ranks

KINDS = ("ddp", "fsdp2")


def build(kind: str) -> Any:
    """The same weights on both ranks, replicated or sharded."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(256, 256) for _ in range(4)]
    model: Any = torch.nn.Sequential(*layers)
    if kind == "ddp":
        model = DistributedDataParallel(model)
        # DDP's own all-reduce is called from C++, where the guard cannot see it. This hook is the same, from Python.
        model.register_comm_hook(None, allreduce_hook)
        return model
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def train(model: Any, num_steps: int, *, mistake_at: int | None) -> None:
    """A usual loop; at step `mistake_at` rank 1 alone calls an all-reduce."""
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(num_steps):
        mark(f"step {step}")  # optional: the label appears in the error
        model(torch.randn(8, 256)).square().mean().backward()
        if step == mistake_at and dist.get_rank() == 1:
            dist.all_reduce(torch.ones(1))  # the planted mistake
        optimizer.step()
        optimizer.zero_grad()


def rank_main(rank: int, *, kind: str, guarded: bool, mistake_at: int | None, num_steps: int, results: Any) -> None:
    """One rank: trains and reports seconds and the error, if any."""
    dist.init_process_group("gloo")
    model = build(kind)
    guard = CollectiveGuard(stall_timeout_s=30) if guarded else contextlib.nullcontext()
    error = ""
    with guard:
        train(model, 3, mistake_at=None)  # warm-up
        dist.barrier()
        start = time.perf_counter()
        try:
            train(model, num_steps, mistake_at=mistake_at)
        except (RuntimeError, CollectiveMismatchError) as caught:
            error = f"{type(caught).__name__}: {str(caught).splitlines()[0]}"
        results.put((rank, time.perf_counter() - start, error))


@contextlib.contextmanager
def two_ranks(**settings: Any) -> Iterator[tuple[Any, list[Any]]]:
    """Queue of results and processes; the processes are killed at the end."""
    results = get_context("fork").Queue()
    ranks = fork_ranks(partial(rank_main, results=results, **settings))
    try:
        yield results, ranks
    finally:
        for process in ranks:
            process.kill()
            process.join()


def step_ms(kind: str, guarded: bool, num_steps: int) -> float:
    """Milliseconds per step of a healthy run, on the slower rank."""
    with two_ranks(kind=kind, guarded=guarded, mistake_at=None, num_steps=num_steps) as (results, _):
        slower_s: float = max(results.get(timeout=120)[1] for _ in range(2))
    return 1000 * slower_s / num_steps


def plant_mistake(kind: str, guarded: bool, limit_s: float) -> dict[int, str]:
    """Outcome of each rank after the mistake, watched for `limit_s`."""
    start = time.perf_counter()
    outcomes: dict[int, str] = {}
    with two_ranks(kind=kind, guarded=guarded, mistake_at=2, num_steps=5) as (results, ranks):
        while True:
            try:
                rank, seconds, error = results.get(timeout=0.2)
                outcomes[rank] = f"after {seconds:.1f} s {error or 'ended training without an error'}"
            except queue.Empty:
                running = [rank for rank, process in enumerate(ranks) if process.exitcode is None]
                if not set(running) - outcomes.keys() or time.perf_counter() - start > limit_s:
                    break
        for rank, process in enumerate(ranks):
            ended = f"the process ended with code {process.exitcode}"
            outcomes.setdefault(rank, ended if process.exitcode is not None else f"still hangs after {limit_s:.0f} s")
    return outcomes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--steps", type=int, default=200, help="steps of each healthy run")
    parser.add_argument("--limit-s", type=float, default=10.0, help="seconds to watch a run without the guard")
    options = parser.parse_args()
    for kind in options.kinds:
        plain, guarded = (step_ms(kind, on, options.steps) for on in (False, True))
        print(f"{kind}: {plain:.2f} ms per step, {guarded:.2f} ms with the guard", flush=True)
        for name, on, limit_s in (("guard", True, 60.0), ("no guard", False, options.limit_s)):
            for rank, outcome in sorted(plant_mistake(kind, on, limit_s).items()):
                print(f"{kind}, {name}, rank {rank}: {outcome}", flush=True)


if __name__ == "__main__":
    main()
