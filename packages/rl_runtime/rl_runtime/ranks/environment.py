"""The one place where this package reads or sets environment variables."""

import os
import sys
from collections.abc import Sequence

from ..errors import PlacementError

# Libraries that would otherwise write progress bars and warnings over the run's own lines.
_QUIET = {
    "TQDM_DISABLE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "KINETO_LOG_LEVEL": "99",
}


def prepare_driver(device: str) -> None:
    """Sets, where the user has not, what the libraries in this process and the processes it starts should know.

    Comes before they are imported: several read their variables only then. `device`: "auto", "cpu" or "cuda".
    """
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    # transformers imports DeepSpeed, which would probe for an accelerator and warn that it found none.
    os.environ.setdefault("DS_ACCELERATOR", "cpu" if device == "cpu" or not visible_gpus() else "cuda")


def visible_gpus() -> list[int]:
    """Indices of the GPUs this process may use.

    Raises:
        PlacementError: CUDA_VISIBLE_DEVICES names GPUs by UUID (ranks and servers are told theirs by index), or none
            of this host's, as it may in a job that was handed another node's list.
    """
    import torch  # here, because importing it imports libraries that read what prepare_driver sets

    count = torch.cuda.device_count()
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if listed and count == 0 and torch.version.cuda and any(entry.strip().isdigit() for entry in listed.split(",")):
        raise PlacementError(
            f"CUDA_VISIBLE_DEVICES is {listed}, but no such GPU is here: unset it, name GPUs of this host, or leave it "
            "empty to run on the CPU"
        )
    if listed is None or count == 0:
        return list(range(count))
    ids = [entry.strip() for entry in listed.split(",")][:count]
    if not all(entry.isdigit() for entry in ids):
        raise PlacementError(f"CUDA_VISIBLE_DEVICES is {listed}; give indices such as 0,1 instead of UUIDs")
    return [int(entry) for entry in ids]


def rank_env(gpus: Sequence[int], num_threads: int) -> dict[str, str]:
    """The environment of a trainer rank."""
    return {
        **{name: os.environ.get(name, value) for name, value in _QUIET.items()},
        "PYTHONPATH": python_path(),
        "PYTHONWARNINGS": "ignore::FutureWarning",
        "OMP_NUM_THREADS": str(num_threads),
        "MKL_NUM_THREADS": str(num_threads),
        # Ray would hide the GPUs of an actor that reserved none; the placement decides instead.
        "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1",
        "CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus)),
        "DS_ACCELERATOR": "cuda" if gpus else "cpu",
    }


def python_path() -> str:
    """This process's import path for the ranks: what imports here (an app, a pex) imports there."""
    stdlib = os.path.dirname(os.__file__)
    entries = [os.path.abspath(entry or os.getcwd()) for entry in sys.path]
    return os.pathsep.join(e for e in dict.fromkeys(entries) if os.path.exists(e) and e != stdlib)
