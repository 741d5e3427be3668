"""Groups of gloo ranks under DeepSpeed, for tests.

A test calls `run_script`, which starts one of the scripts beside this file in a process group of its own. The script
imports the libraries once and forks its ranks: `run_ranks(job, folder)` calls `job(rank)` in each, joined and ready for
`deepspeed.initialize`. `build` and `compare` are what several scripts need.
"""

import contextlib
import ctypes
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import wait
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

CPU_ENVIRONMENT = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
_PR_SET_PDEATHSIG = 1


def run_script(name: str, *arguments: object, timeout_s: float = 400) -> str:
    """Run the script `name` and return what it printed; an AssertionError with the end of it when it failed."""
    command = [sys.executable, str(Path(__file__).with_name(name)), *map(str, arguments)]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, env=os.environ | CPU_ENVIRONMENT, start_new_session=True
        )
        try:
            code: int | str = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            code = f"stopped after {timeout_s} s"
        finally:
            with contextlib.suppress(ProcessLookupError):  # its ranks too
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        log.seek(0)
        text = log.read().decode(errors="replace")
    assert code == 0, f"{name}: {code}\n{text[-6000:]}"
    return text


# In the scripts


def fork_ranks(job: Callable[[int], None], folder: Path, *, num_ranks: int = 2) -> list[ForkProcess]:
    """Start `job(rank)` in `num_ranks` processes that meet through a new file in `folder`; they die with this one."""
    # Every rank's optimizer would import the compiler for itself, which takes longer than all else.
    import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401
    import torch._dynamo  # noqa: F401

    store = Path(tempfile.mkdtemp(prefix=".store_", dir=folder)) / "store"
    ranks = [
        multiprocessing.get_context("fork").Process(target=_run_rank, args=(job, rank, num_ranks, store))
        for rank in range(num_ranks)
    ]
    for process in ranks:
        process.start()
    return ranks


def run_ranks(job: Callable[[int], None], folder: Path, *, num_ranks: int = 2) -> None:
    """Start `job(rank)` in `num_ranks` processes and wait; the script ends when one fails."""
    ranks = fork_ranks(job, folder, num_ranks=num_ranks)
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


def _run_rank(job: Callable[[int], None], rank: int, num_ranks: int, store: Path) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": str(num_ranks), "MASTER_ADDR": "127.0.0.1"}
    try:
        import deepspeed
        import torch

        torch.set_num_threads(1)
        # Not needed, and a compiler that is killed half-way leaves a lock that every later process waits for for ever.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        file_store = torch.distributed.FileStore(str(store), num_ranks)
        torch.distributed.init_process_group("gloo", store=file_store, rank=rank, world_size=num_ranks)
        deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
        job(rank)
        torch.distributed.barrier()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # the others wait in collectives; the parent ends them
    torch.distributed.destroy_process_group()


def build(stage: int, layers: list[Any], **options: Any) -> Any:
    """A DeepSpeed engine of `layers`, the same weights on every rank, in bf16 with AdamW; `options` to its settings."""
    import deepspeed
    import torch

    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True,
        **options,
    }
    model = torch.nn.Sequential(*layers).bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
    return engine


def compare(one: Any, other: Any, where: str) -> None:
    """Every tensor and value of two state dicts, to the last bit; AssertionError with the place."""
    import torch

    assert type(one) is type(other), (where, type(one), type(other))
    if isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype, where
        assert torch.equal(one, other), where
    elif isinstance(one, dict):
        assert list(one) == list(other), where
        for key in one:
            compare(one[key], other[key], f"{where}.{key}")
    elif isinstance(one, list | tuple):
        assert len(one) == len(other), where
        for index, (left, right) in enumerate(zip(one, other, strict=True)):
            compare(left, right, f"{where}.{index}")
    elif not hasattr(one, "__dict__"):
        assert one == other, where
    else:
        compare(vars(one), vars(other), where)
