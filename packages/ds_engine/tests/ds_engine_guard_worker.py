"""Plain torch.distributed programs of two ranks under the collective guard, most of which go wrong.

    ds_engine_guard_worker.py OUT BACKEND SCENARIO:MODE...

Each rank's stdout, one line of JSON with what it raised and after how many seconds, goes to
OUT/SCENARIO-MODE-RANK.out, its stderr to .err. Prints the exit codes by SCENARIO:MODE as JSON.
"""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import timedelta
from functools import partial
from multiprocessing.connection import wait
from multiprocessing.context import ForkProcess
from pathlib import Path

import torch
import torch.distributed as dist

from ds_engine.guard.collective_guard import CollectiveGuard, mark
from plinth_testing import fork_ranks

LARGE = 440_467  # document 5's stuck gradient all-reduce had a thousand times as many elements


def grad_norm_all_reduce() -> None:
    dist.all_reduce(torch.ones(1))


def gradient_all_reduce() -> None:
    dist.all_reduce(torch.ones(LARGE))


def uneven_ranks(rank: int) -> None:
    """One rank reduces its gradient norm while the other still reduces gradients."""
    for step in range(3):
        mark(f"step {step}")
        gradient_all_reduce()
    mark("step 3")
    if rank == 0:
        grad_norm_all_reduce()
    gradient_all_reduce()


def hanging_pair(rank: int) -> None:
    """Two operations gloo cannot tell apart: both ranks wait indefinitely."""
    mark("step 0")
    if rank == 0:
        dist.all_reduce(torch.ones(1))
    else:
        dist.broadcast(torch.ones(LARGE), src=1)


def stalled_rank(rank: int) -> None:
    dist.all_reduce(torch.ones(4))
    if rank == 1:
        time.sleep(6)
    dist.all_reduce(torch.ones(4))


def dead_rank(rank: int) -> None:
    dist.all_reduce(torch.ones(4))
    if rank == 1:
        os._exit(0)
    dist.all_reduce(torch.ones(4))


def never_began(rank: int) -> None:
    """One rank is stuck before its first collective."""
    if rank == 1:
        time.sleep(6)
    dist.all_reduce(torch.ones(4))


def destroyed_group(rank: int) -> None:
    """A subgroup is used and destroyed, as when an engine is closed; other groups continue."""
    both = dist.new_group([0, 1])
    dist.all_reduce(torch.ones(4), group=both)
    dist.destroy_process_group(both)
    time.sleep(1.5)  # the watcher looks twice a second
    dist.all_reduce(torch.ones(4))


def one_leaves_first(rank: int) -> None:
    """The rank that hosts the store ends; the other works on for seconds, without collectives."""
    dist.all_reduce(torch.ones(4))
    if rank == 1:
        time.sleep(4)


def agreeing(rank: int) -> None:
    """Legitimate programs: all operations, a subgroup of one rank, separate code for roots, uneven all-to-all."""
    alone = [dist.new_group([r]) for r in range(2)]
    for _ in range(100):
        dist.all_reduce(torch.ones(8))
    if rank == 0:
        dist.broadcast(torch.ones(3), src=0)
        dist.scatter(torch.empty(2), [torch.ones(2), torch.ones(2)], src=0)
        dist.gather(torch.ones(2), [torch.empty(2), torch.empty(2)], dst=0)
        dist.all_reduce(torch.ones(5), group=alone[0])
    else:
        dist.broadcast(torch.empty(3), src=0)
        dist.scatter(torch.empty(2), src=0)
        dist.gather(torch.ones(2), dst=0)
    dist.all_gather([torch.empty(4), torch.empty(4)], torch.ones(4))
    dist.all_gather_into_tensor(torch.empty(8), torch.ones(4))
    dist.reduce_scatter_tensor(torch.empty(4), torch.ones(8))
    dist.all_to_all_single(
        torch.empty(3), torch.ones(3), [1, 2] if rank == 0 else [2, 1], [1, 2] if rank == 0 else [2, 1]
    )
    dist.all_gather_object([None, None], {"rank": "x" * rank})
    dist.barrier()


def play(out: Path, backend: str, scenario: str, mode: str, rank: int) -> None:
    for descriptor, kind in ((1, "out"), (2, "err")):
        os.dup2(os.open(out / f"{scenario}-{mode}-{rank}.{kind}", os.O_WRONLY | os.O_CREAT), descriptor)
    if backend == "nccl":
        torch.cuda.set_device(rank)
        torch.set_default_device("cuda")
    dist.init_process_group(backend, timeout=timedelta(seconds=120))
    original = vars(dist.ProcessGroup)["allreduce"]
    dist.barrier()
    began = time.monotonic()
    report: dict[str, object] = {"rank": rank, "error": None}
    guard = CollectiveGuard(mode=mode, stall_timeout_s=2.0, exit_after_s=1.0)
    guard.start()
    try:
        globals()[scenario](rank)
        if backend == "nccl":
            torch.cuda.synchronize()  # until then a collective is only queued
    except Exception as error:
        report |= {"error": type(error).__name__, "text": str(error)}
    report["seconds"] = time.monotonic() - began
    guard.stop()
    if report["error"] is None and scenario != "one_leaves_first":
        dist.all_reduce(torch.ones(2))  # torch's own methods work again
    report["restored"] = vars(dist.ProcessGroup)["allreduce"] is original
    print(json.dumps(report), flush=True)
    os._exit(0)  # a group with a failed rank cannot be destroyed cleanly


def main() -> None:
    out, backend, worlds = Path(sys.argv[1]), sys.argv[2], sys.argv[3:]
    at_once = 2 if backend == "gloo" else 1  # they mostly sleep; more would look like stalls on a busy machine
    running: dict[str, list[ForkProcess]] = {}
    codes: dict[str, list[int | None]] = {}
    while worlds or running:
        while worlds and len(running) < at_once:
            world = worlds.pop(0)
            running[world] = fork_ranks(partial(play, out, backend, *world.split(":")))
        wait([process.sentinel for ranks in running.values() for process in ranks if process.is_alive()], timeout=1)
        for world, ranks in list(running.items()):
            if not any(process.is_alive() for process in ranks):
                codes[world] = [process.exitcode for process in running.pop(world)]
    print(json.dumps(codes))


if __name__ == "__main__":
    main()
