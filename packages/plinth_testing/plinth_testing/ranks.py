"""Groups of ranks on one machine: scripts started once per rank, and ranks forked from a script.

`launch_ranks` is for tests: each rank is a Python process that runs the same file, with torchrun's variables (`RANK`,
`WORLD_SIZE`, `MASTER_ADDR`, `MASTER_PORT`) in its environment. `fork_ranks` and `run_ranks` are for such a file: its
imports are paid once for all ranks. `rank_pool.RankPool` keeps ranks for many calls.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import wait
from multiprocessing.context import ForkProcess
from pathlib import Path

from .processes import die_with_parent, free_port, start_process, stop_process


@dataclass(frozen=True, kw_only=True)
class FinishedRank:
    """End of a rank."""

    code: int | None
    """Exit code; negative: the signal that ended it; None: it was killed when time was up."""
    output: str
    """stdout and stderr."""


def launch_ranks(
    script: Path | str,
    *arguments: object,
    num_ranks: int = 2,
    env: Mapping[str, str] | None = None,
    timeout_s: float = 120.0,
    check: bool = True,
) -> list[FinishedRank]:
    """Runs a Python file on every rank and waits for all of them.

    Args:
        check: raises an AssertionError with all outputs unless every rank ended with exit code 0.
    """
    command = [sys.executable, str(script), *map(str, arguments)]
    # Pytest may have added folders to the path; a rank imports what its test does.
    shared = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **rendezvous(num_ranks), **(env or {})}
    with tempfile.TemporaryDirectory() as folder:
        logs = [Path(folder) / f"rank_{rank}" for rank in range(num_ranks)]
        deadline = time.monotonic() + timeout_s
        ranks = [start_process(command, log, shared | of_rank(rank)) for rank, log in enumerate(logs)]
        codes: list[int | None] = []
        try:
            for process in ranks:
                try:
                    codes.append(process.wait(max(0.1, deadline - time.monotonic())))
                except subprocess.TimeoutExpired:
                    codes.append(None)
        finally:
            for process in ranks:
                stop_process(process, grace_s=0.0)
        outputs = [log.read_text(errors="replace") for log in logs]
    finished = [FinishedRank(code=code, output=text) for code, text in zip(codes, outputs, strict=True)]
    if check:
        assert codes == [0] * num_ranks, f"exit codes {codes}\n" + "\n".join(text[-4000:] for text in outputs)
    return finished


def rendezvous(num_ranks: int) -> dict[str, str]:
    """torchrun's variables that all ranks share."""
    return {
        "WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "GLOO_SOCKET_IFNAME": "lo",
    }


def of_rank(rank: int) -> dict[str, str]:
    """torchrun's variables that each rank has its own of."""
    return {"RANK": str(rank), "LOCAL_RANK": str(rank)}


def fork_ranks(job: Callable[[int], None], *, num_ranks: int = 2) -> list[ForkProcess]:
    """Starts `job(rank)` in `num_ranks` forked processes with one compute thread each; they die with this process.

    The environment holds torchrun's variables. A rank that raises prints its traceback and ends with exit code 1.
    """
    variables = rendezvous(num_ranks)
    gc.freeze()  # what is imported stays: `gc.collect()` takes a rank half a second if it searches that, too
    ranks = [get_context("fork").Process(target=_run_rank, args=(job, rank, variables)) for rank in range(num_ranks)]
    for process in ranks:
        process.start()
    return ranks


def run_ranks(job: Callable[[int], None], *, num_ranks: int = 2) -> None:
    """`fork_ranks`, then waits for all; the script ends with exit code 1 when a rank fails, and no rank is left."""
    ranks = fork_ranks(job, num_ranks=num_ranks)
    pending = list(ranks)
    try:
        while pending:
            wait([process.sentinel for process in pending])
            pending = [process for process in pending if process.is_alive()]
            failed = [rank for rank, process in enumerate(ranks) if process.exitcode not in (None, 0)]
            if failed:
                sys.exit(f"ranks {failed} of {num_ranks} failed")
    finally:
        for process in ranks:
            process.kill()


def _run_rank(job: Callable[[int], None], rank: int, variables: dict[str, str]) -> None:
    die_with_parent()
    os.environ |= variables | of_rank(rank)
    try:
        if "torch" in sys.modules:  # imported later it reads OMP_NUM_THREADS
            sys.modules["torch"].set_num_threads(1)
        job(rank)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # the others wait in collectives; the parent ends them
