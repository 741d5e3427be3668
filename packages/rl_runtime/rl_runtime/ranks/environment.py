"""Environment variables of the driver and the ranks. No other module of this package reads or sets any."""

import gc
import hashlib
import os
import secrets
import socket
import struct
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.util import MAGIC_NUMBER, find_spec
from itertools import takewhile
from pathlib import Path

from run_kit.machine.gpus import Gpu, find_gpu, read_gpus

from ..errors import PlacementError

GpuId = int | str
"""A GPU as CUDA_VISIBLE_DEVICES names it: its index in nvidia-smi, or the UUID of a MIG instance or a GPU."""

CACHE_VARIABLE = "PLINTH_CACHE_DIR"
"""Folder of everything that is compiled: layers, Triton and attention kernels, vLLM's graphs, and bytecode of modules
that Python cannot keep beside their sources. It serves later runs."""

# Turns off progress bars, usage reports and warnings of libraries, which would disturb the output of the run.
_QUIET = {
    "TQDM_DISABLE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    # The driver reads the first error of the ranks; the others follow from it.
    "RAY_IGNORE_UNHANDLED_ERRORS": "1",
    "KINETO_LOG_LEVEL": "99",
}
# Index 0 is nvidia-smi's first GPU, not the fastest one: UUIDs are mapped to these indices, and memory is read there.
_ORDER = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
# Micro batches differ in length, so blocks of fixed segments rarely fit again: fine-tuning a 7B model with adapters
# reserved 148 GB for 63 GB in use, and 65 GB with segments that grow (benchmarks/sft_step).
_ALLOCATOR = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
_ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def prepare_driver(device: str) -> None:
    """Sets the variables of libraries for this process and its children, unless the user has set them.

    Call it before the libraries are imported: several read their variables only at import. `device`: "auto", "cpu"
    or "cuda".
    """
    prepare_imports()
    # transformers imports DeepSpeed, which would search for an accelerator and warn if it finds none.
    os.environ.setdefault("DS_ACCELERATOR", "cpu" if device == "cpu" or not visible_gpus() else "cuda")


def prepare_imports() -> None:
    """The part of `prepare_driver` that imports no library."""
    gc.set_threshold(100_000)  # imports make a million objects that stay; by default all are looked at again and again
    compiled = cache_variables(os.environ)
    if "PYTHONPYCACHEPREFIX" in compiled:  # this process has started without it
        sys.pycache_prefix, sys.dont_write_bytecode = compiled["PYTHONPYCACHEPREFIX"], False
        os.environ["PYTHONDONTWRITEBYTECODE"] = ""
    for name, value in {**_QUIET, **_ORDER, **compiled}.items():
        os.environ.setdefault(name, value)


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
        **_bytecode_variables(os.path.join(folder, "bytecode")),
    }


@cache
def _bytecode_variables(folder: str) -> dict[str, str]:
    """Keep bytecode in `folder` if the large libraries have no current one and Python would keep none: their folder
    cannot be written, or PYTHONDONTWRITEBYTECODE is set, as in many container images.

    Every process would compile their sources again, which takes longer than all other work of an import.
    """
    if sys.pycache_prefix is not None or all(map(_keeps_bytecode, ("torch", "transformers", "vllm"))):
        return {}
    # Python compares a source's time and size, which two images may share: each set of releases has a folder.
    key = hashlib.sha256("\n".join(installed_releases()).encode()).hexdigest()[:16]
    return {"PYTHONPYCACHEPREFIX": os.path.join(folder, key), "PYTHONDONTWRITEBYTECODE": ""}


def installed_releases() -> list[str]:
    """Names of the folders that describe the installed releases."""
    listings = (os.listdir(entry) for entry in sys.path if os.access(entry, os.R_OK) and os.path.isdir(entry))
    return sorted(name for names in listings for name in names if name.endswith((".dist-info", ".egg-info")))


def _keeps_bytecode(package: str) -> bool:
    """True if there is current bytecode of the package, or Python will write it; also without such a package."""
    spec = find_spec(package)
    if spec is None or spec.origin is None or spec.cached is None:
        return True
    if not sys.dont_write_bytecode and os.access(os.path.dirname(spec.origin), os.W_OK):
        return True
    try:  # an image may have changed the times of its files after they were compiled
        with open(spec.cached, "rb") as file:
            magic, flags, *source = struct.unpack("<4sIII", file.read(16))
    except (OSError, struct.error):
        return False
    stat = os.stat(spec.origin)
    return magic == MAGIC_NUMBER and (flags != 0 or source == [int(stat.st_mtime), stat.st_size])


def listed_gpus() -> int:
    """Number of NVIDIA GPUs that this process can probably use, without asking CUDA."""
    devices = sum(1 for _ in Path("/dev").glob("nvidia[0-9]*"))
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    return devices if listed is None else min(devices, len(_listed_gpus(listed)))


def visible_gpus() -> list[GpuId]:
    """The GPUs that this process can use, in the order of CUDA_VISIBLE_DEVICES. Names no GPU twice.

    Raises:
        PlacementError: CUDA_VISIBLE_DEVICES names a GPU twice, or a GPU that this host lacks, for example in a job with
            another node's list. A torch without CUDA does not know which GPUs there are, see `why_cpu`.
    """
    import torch  # imports libraries that read the variables of prepare_driver

    count = torch.cuda.device_count()
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if listed is None:
        return list(range(count))
    entries = _listed_gpus(listed)
    kinds = {"" if entry.isdigit() else entry[:4].upper() for entry in entries}
    # In another order, an index of nvidia-smi would be another GPU.
    has_order = os.environ.get("CUDA_DEVICE_ORDER") == _ORDER["CUDA_DEVICE_ORDER"]
    ids = gpu_ids(entries, read_gpus()[0] if has_order and kinds - {""} else [])
    if torch.version.cuda is None:
        return list(range(count))
    # CUDA shows one MIG instance to a process, and of a list with indices and UUIDs only those of the first kind.
    num_shown = len(entries) if kinds in ({""}, {"GPU-"}) else min(1, len(entries))
    if count < num_shown:
        raise PlacementError(
            f"this host has no such GPU (CUDA finds {count})",
            field="CUDA_VISIBLE_DEVICES",
            value=listed,
            remedy="unset it, name GPUs of this host, or set it to an empty string to run on the CPU",
        )
    return ids


def why_cpu(device: str) -> str:
    """One line for a run that uses the CPU although CUDA_VISIBLE_DEVICES names GPUs; else empty.

    `device`: "auto", "cpu" or "cuda".
    """
    import torch

    listed = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    if device != "auto" or not _listed_gpus(listed) or torch.cuda.device_count():
        return ""
    return (
        f"warning: CUDA_VISIBLE_DEVICES is {listed}, but torch {torch.__version__} is built without CUDA and finds no "
        "GPU, so the run uses the CPU; `plinth doctor` says what a GPU needs"
    )


def _listed_gpus(listed: str) -> list[str]:
    """The entries of CUDA_VISIBLE_DEVICES that CUDA reads."""
    entries = [text for entry in listed.split(",") if (text := entry.strip())]
    # CUDA ignores everything from the first entry on that is no GPU: -1, SLURM's NoDevFiles.
    return list(takewhile(lambda entry: entry.isdigit() or entry.upper().startswith(("GPU-", "MIG-")), entries))


def gpu_ids(entries: Sequence[str], gpus: Sequence[Gpu]) -> list[GpuId]:
    """The GPUs that `entries` of CUDA_VISIBLE_DEVICES name; UUIDs become indices, which every library understands.

    A MIG instance, and a UUID that `gpus` lacks, stays as it is.

    Args:
        gpus: the GPUs of this host, from nvidia-smi.

    Raises:
        PlacementError: two entries name the same GPU.
    """
    ids: list[GpuId] = []
    for entry in entries:
        match = None if entry.isdigit() else find_gpu(gpus, entry)
        gpu = int(entry) if entry.isdigit() else entry if match is None else match.index
        if gpu in ids:
            raise PlacementError(
                f"{entries[ids.index(gpu)]} and {entry} are the same GPU, and two ranks on one GPU cannot communicate",
                field="CUDA_VISIBLE_DEVICES",
                value=",".join(entries),
                allowed="each GPU once",
            )
        ids.append(gpu)
    return ids


def protect_ray() -> None:
    """Gives a Ray that this process starts a token of its own, unless the user has chosen.

    Ray from 2.60 then requires it of every connection. Only this user's processes can read the variable.
    """
    if not {"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} & os.environ.keys():
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)


def ray_has_token() -> bool:
    """True if the Ray that this process has started requires a token."""
    return os.environ.get("RAY_AUTH_MODE", "").lower() == "token"


def rank_env(gpus: Sequence[GpuId], num_threads: int, interface: str | None = None) -> dict[str, str]:
    """The environment of a trainer rank.

    Args:
        interface: the network interface on which the ranks reach each other; None: they are all on this host.
    """
    if interface is None and "lo" in (name for _, name in socket.if_nameindex()):
        interface = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    defaults = {**_QUIET, **_ORDER, **cache_variables(os.environ)}
    return {
        **{name: os.environ.get(name, value) for name, value in defaults.items()},
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
        **(_ALLOCATOR if gpus and not any(name in os.environ for name in _ALLOCATOR_VARIABLES) else {}),
    }


def python_path() -> str:
    """This process's import path, so that the ranks can import the same modules (of an app or a pex)."""
    stdlib = os.path.dirname(os.__file__)
    entries = [os.path.abspath(entry or os.getcwd()) for entry in sys.path]
    return os.pathsep.join(e for e in dict.fromkeys(entries) if os.path.exists(e) and e != stdlib)
