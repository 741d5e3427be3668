"""A tiny model, its batches and a process group of one rank, shared by the reproductions; `show` prints a result."""

import json
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from benchmarks.random_model import write_random_model
from benchmarks.runs import free_port
from ds_engine import SimpleBatch, init_distributed

CPU = torch.device("cpu")
VOCAB = 512


def start() -> str:
    """Starts the process group and returns the folder of a model with random weights."""
    init_distributed(0, 1, "127.0.0.1", free_port(), CPU)
    return str(write_random_model("qwen3-tiny", Path(tempfile.mkdtemp())))


def rows(number: int, length: int = 32) -> torch.Tensor:
    """[number, length] random token ids."""
    return torch.randint(VOCAB - 10, (number, length), generator=torch.Generator().manual_seed(0))


def packed(ids_BL: torch.Tensor) -> SimpleBatch:
    """The rows as a micro batch in which every token but the first is a target."""
    return SimpleBatch.pack([(row[:1], row[1:]) for row in ids_BL.tolist()])


def deepspeed_engine(model: torch.nn.Module, stage: int, **settings: Any) -> Any:
    """DeepSpeed as it comes, with torch's AdamW."""
    import deepspeed

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": stage}}
    options = {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config | options | settings)[0]


def show(package: str, /, **numbers: Any) -> None:
    """Prints one line of JSON: the package of the peer with its version, and the numbers."""
    print(json.dumps({"release": f"{package} {version(package)}", **numbers}), flush=True)
