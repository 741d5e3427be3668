"""Environment variables of the driver and the ranks. No other module of this package reads or sets any."""

import os
import secrets
import socket
import sys
from collections.abc import Mapping, Sequence

from ..errors import PlacementError

GpuId = int | str
"""A GPU as CUDA_VISIBLE_DEVICES names it: an index, or a UUID of the GPU or of a part of it (MIG)."""

CACHE_VARIABLE = "PLINTH_CACHE_DIR"
"""Folder of everything that is compiled: layers, Triton and attention kernels, vLLM's graphs. It serves later runs."""

# Turns off progress bars, usage reports and warnings of libraries, which would disturb the output of the run.
_QUIET = {
    "TQDM_DISABLE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "KINETO_LOG_LEVEL": "99",
}


def prepare_driver(device: str) -> None:
    """Sets the variables of libraries for this process and its children, unless the user has set them.

    Call it before the libraries are imported: several read their variables only at import. `device`: "auto", "cpu"
    or "cuda".
    """
    for name, value in {**_QUIET, **cache_variables(os.environ)}.items():
        os.environ.setdefault(name, value)
    # transformers imports DeepSpeed, which would search for an accelerator and warn if it finds none.
    os.environ.setdefault("DS_ACCELERATOR", "cpu" if device == "cpu" or not visible_gpus() else "cuda")


def cache_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that keep compiled code across runs, in one folder: `PLINTH_CACHE_DIR` or `~/.cache/plinth`.

    None if it cannot be written: the libraries then use their own folders, of which torch's is in the system's for
    temporary files.
    """
    default = os.path.join(environment.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "plinth")
    folder = os.path.abspath(environment.get(CACHE_VARIABLE) or default)
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError:
        return {}
    return {
        "TORCHINDUCTOR_CACHE_DIR": os.path.join(folder, "inductor"),
        "TRITON_CACHE_DIR": os.path.join(folder, "triton"),
        "VLLM_CACHE_ROOT": os.path.join(folder, "vllm"),
        # FlashAttention-4 compiles its kernels in every process unless it is told to keep them.
        "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "1",
        "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR": os.path.join(folder, "flash_attention_4"),
    }


def visible_gpus() -> list[int]:
    """Indices of the GPUs that this process can use.

    Raises:
        PlacementError: CUDA_VISIBLE_DEVICES names GPUs by UUID (ranks and servers get theirs by index), or no GPU of
            this host, for example in a job with another node's list.
    """
    import torch  # imports libraries that read the variables of prepare_driver

    count = torch.cuda.device_count()
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if listed and count == 0 and torch.version.cuda and any(entry.strip().isdigit() for entry in listed.split(",")):
        raise PlacementError(
            f"CUDA_VISIBLE_DEVICES is {listed}, but this host has no such GPU: unset it, name GPUs of this host, or "
            "set it to an empty string to run on the CPU"
        )
    if listed is None or count == 0:
        return list(range(count))
    ids = [entry.strip() for entry in listed.split(",")][:count]
    if not all(entry.isdigit() for entry in ids):
        raise PlacementError(f"CUDA_VISIBLE_DEVICES is {listed}; give indices such as 0,1 instead of UUIDs")
    return [int(entry) for entry in ids]


def protect_ray() -> None:
    """Gives a Ray that this process starts a token of its own, unless the user has chosen.

    Ray from 2.60 then requires it of every connection. Only this user's processes can read the variable.
    """
    if not {"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} & os.environ.keys():
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)


def ray_has_token() -> bool:
    """Whether the Ray that this process has started requires a token."""
    return os.environ.get("RAY_AUTH_MODE", "").lower() == "token"


def rank_env(gpus: Sequence[GpuId], num_threads: int, interface: str | None = None) -> dict[str, str]:
    """The environment of a trainer rank.

    Args:
        interface: the network interface on which the ranks reach each other; None: they are all on this host.
    """
    if interface is None and _has_loopback():
        interface = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    return {
        **{name: os.environ.get(name, value) for name, value in {**_QUIET, **cache_variables(os.environ)}.items()},
        "PYTHONPATH": python_path(),
        "PYTHONWARNINGS": "ignore::FutureWarning",
        # gloo would listen on the address of the host's name.
        **({"GLOO_SOCKET_IFNAME": interface} if interface else {}),
        "OMP_NUM_THREADS": str(num_threads),
        "MKL_NUM_THREADS": str(num_threads),
        # Ray hides the GPUs of actors that reserve none; here the placement decides.
        "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1",
        "CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus)),
        "DS_ACCELERATOR": "cuda" if gpus else "cpu",
    }


def _has_loopback() -> bool:
    return "lo" in (name for _, name in socket.if_nameindex())


def python_path() -> str:
    """This process's import path, so that the ranks can import the same modules (of an app or a pex)."""
    stdlib = os.path.dirname(os.__file__)
    entries = [os.path.abspath(entry or os.getcwd()) for entry in sys.path]
    return os.pathsep.join(e for e in dict.fromkeys(entries) if os.path.exists(e) and e != stdlib)
