"""Groups of gloo ranks under DeepSpeed, for tests.

A test calls `run_script` with one of the scripts in this folder. The script imports the libraries once and forks
its ranks: `run_ranks(job, folder)` calls `job(rank)` in each, joined and ready for `deepspeed.initialize`. Several
scripts use `build` and `compare`.
"""

import tempfile
from collections.abc import Callable
from functools import partial
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

import plinth_testing


def run_script(name: str, *arguments: object, timeout_s: float = 400.0) -> str:
    """Run the script `name` and return its output. Raises AssertionError with the end of its output when it fails."""
    return plinth_testing.run_script(Path(__file__).with_name(name), *arguments, timeout_s=timeout_s)


# For the scripts


def fork_ranks(job: Callable[[int], None], folder: Path) -> list[ForkProcess]:
    """Start `job(rank)` in two processes that meet through a new file in `folder`; they die with this one."""
    return plinth_testing.fork_ranks(_joined(job, folder))


def run_ranks(job: Callable[[int], None], folder: Path) -> None:
    """Start `job(rank)` in two processes and wait; the script ends when one fails."""
    plinth_testing.run_ranks(_joined(job, folder))


def _joined(job: Callable[[int], None], folder: Path) -> Callable[[int], None]:
    # Before the fork: otherwise every rank imports the compiler, which takes longest.
    import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401
    import torch._dynamo  # noqa: F401

    return partial(_join_and_run, job, Path(tempfile.mkdtemp(prefix=".store_", dir=folder)) / "store")


def _join_and_run(job: Callable[[int], None], store: Path, rank: int) -> None:
    import deepspeed
    import torch

    # Not needed; a compiler that is killed leaves a lock for which every later process waits indefinitely.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    # A file, not a server in rank 0: that may be killed first.
    file_store = torch.distributed.FileStore(str(store), 2)
    torch.distributed.init_process_group("gloo", store=file_store, rank=rank, world_size=2)
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
    job(rank)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def build(stage: int, layers: list[Any], **options: Any) -> Any:
    """A DeepSpeed engine of `layers` in bf16 with AdamW and `options`; all ranks have the same weights."""
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
    """Compare all tensors and values of two state dicts bit for bit. Raises AssertionError with the place."""
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
