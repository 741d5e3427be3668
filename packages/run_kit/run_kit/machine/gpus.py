"""NVIDIA GPUs and the processes on them, from nvidia-smi; and whether torch can use them."""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from .check import Check, State

MIN_DRIVERS = {12: "525.60.13", 13: "580.65.06"}
"""The oldest Linux driver by CUDA major version (NVIDIA's table of minor version compatibility)."""

_GPU_QUERY = "index,uuid,compute_cap,memory.total,memory.used,memory.free,driver_version,name"
_HOLDER_QUERY = "gpu_uuid,pid,used_memory,process_name"
_PROBE = """
import json, torch
found = {"version": torch.__version__, "cuda": torch.version.cuda}
if found["cuda"]:
    found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    try:
        torch.cuda.init()
        found["num_gpus"] = torch.cuda.device_count()
        found["architectures"] = torch.cuda.get_arch_list()
    except Exception as error:
        found["error"] = str(error).strip().splitlines()[0]
print("\\n" + json.dumps(found))
"""


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """A GPU as nvidia-smi lists it. None stands for what it does not report."""

    index: int
    uuid: str
    name: str
    capability: tuple[int, int] | None
    total_mib: int | None
    used_mib: int | None
    """What processes hold."""
    driver: str
    reported_free_mib: int | None = None

    @property
    def free_mib(self) -> int | None:
        """What processes can still allocate: as the driver reports it, else all that is not used; None: unknown."""
        # Total minus used can be too much: drivers reserve memory for themselves and do not count it as used.
        if self.reported_free_mib is not None:
            return self.reported_free_mib
        return None if self.total_mib is None or self.used_mib is None else self.total_mib - self.used_mib


@dataclass(frozen=True, kw_only=True)
class Holder:
    """A process that computes on a GPU."""

    uuid: str
    """Of the GPU."""
    pid: str
    name: str


@dataclass(frozen=True, kw_only=True)
class Torch:
    """What torch says about CUDA."""

    version: str = ""
    """Empty if torch cannot be imported; `error` then says why."""
    cuda: str | None = None
    """CUDA version of the build; None for a CPU build."""
    nccl: str = ""
    architectures: Sequence[str] = field(default_factory=tuple)
    """Of its kernels, such as sm_90; compute_90 is intermediate code, which newer GPUs compile. Empty without a GPU."""
    num_gpus: int = 0
    error: str = ""


def read_gpus() -> tuple[list[Gpu], list[Holder], str]:
    """GPUs, processes on them, and the error of nvidia-smi, empty if it worked or is not installed."""
    if shutil.which("nvidia-smi") is None:
        return [], [], ""
    code, listed = _nvidia_smi("gpu", _GPU_QUERY)
    if code != 0:
        return [], [], next(iter(listed.strip().splitlines()), f"exit code {code}")
    return parse_gpus(listed), parse_holders(_nvidia_smi("compute-apps", _HOLDER_QUERY)[1]), ""


def find_gpu(gpus: Sequence[Gpu], uuid: str) -> Gpu | None:
    """The GPU whose UUID is, or begins with, `uuid`; None if there is none or there are several."""
    found = [gpu for gpu in gpus if gpu.uuid.lower().startswith(uuid.lower())]
    return found[0] if len(found) == 1 else None


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


def parse_gpus(text: str) -> list[Gpu]:
    """GPUs of nvidia-smi's lines with the fields of the query above; other lines are left out."""
    rows = [[part.strip() for part in line.split(",", 7)] for line in text.splitlines()]
    return [
        Gpu(
            index=int(row[0]),
            uuid=row[1],
            name=row[7],
            capability=_capability(row[2]),
            total_mib=_number(row[3]),
            used_mib=_number(row[4]),
            reported_free_mib=_number(row[5]),
            driver=row[6],
        )
        for row in rows
        if len(row) == 8 and row[0].isdecimal()
    ]


def parse_holders(text: str) -> list[Holder]:
    """Processes of nvidia-smi's lines `GPU's UUID, pid, MiB, name`; other lines are left out."""
    rows = [[part.strip() for part in line.split(",", 3)] for line in text.splitlines()]
    return [Holder(uuid=row[0], pid=row[1], name=row[3]) for row in rows if len(row) == 4]


def check_gpus(gpus: Sequence[Gpu], holders: Iterable[Holder], error: str, torch: Torch) -> list[Check]:
    """The GPUs, and whether this torch can use them."""
    holders = list(holders)
    rows = [check_gpu(gpu, [each for each in holders if each.uuid == gpu.uuid], torch) for gpu in gpus]
    if error:
        remedy = "repair the driver (a reboot after its update, `docker run --gpus all`), or train on the CPU"
        rows.append(Check(subject="GPU", found=f"nvidia-smi fails: {error}", state="warning", remedy=remedy))
    elif not gpus and not torch.num_gpus:
        rows.append(Check(subject="GPU", found="none: runs use the CPU"))
    return [*rows, check_torch(torch, gpus), *([Check(subject="NCCL", found=torch.nccl)] if torch.nccl else [])]


def check_gpu(gpu: Gpu, holders: Sequence[Holder], torch: Torch) -> Check:
    """One GPU: kernels for it in torch, bfloat16, and memory that others hold."""
    subject = f"GPU {gpu.index}"
    capability = gpu.capability and ".".join(map(str, gpu.capability))
    found = f"{gpu.name}, {_gib(gpu.total_mib)}, compute capability {capability or 'unknown'}"
    if gpu.capability and torch.architectures and not has_kernels(gpu.capability, torch.architectures):
        found += f"; torch has kernels for {' '.join(torch.architectures)}"
        remedy = "install a torch that supports this GPU, or hide it with CUDA_VISIBLE_DEVICES"
        return Check(subject=subject, found=found, state="problem", remedy=remedy)
    if gpu.total_mib and gpu.used_mib and gpu.used_mib > 0.05 * gpu.total_mib:
        names = ", ".join(f"{each.pid} ({each.name})" for each in holders) or "processes that are not visible here"
        found += f"; {_gib(gpu.used_mib)} in use by {names}"
        remedy = "end them, or choose other GPUs with CUDA_VISIBLE_DEVICES"
        return Check(subject=subject, found=found, state="warning", remedy=remedy)
    if gpu.capability and gpu.capability < (8, 0):
        remedy = "nothing to do: runs choose float16 and SDPA; a dtype of bfloat16 is refused"
        return Check(subject=subject, found=f"{found}: no bfloat16", state="warning", remedy=remedy)
    return Check(subject=subject, found=found)


def check_torch(torch: Torch, gpus: Sequence[Gpu]) -> Check:
    """torch's build against the GPUs and their driver."""
    state, problem, remedy = _judge(torch, gpus)
    build = f"{torch.version}, " + (f"CUDA {torch.cuda}" if torch.cuda else "CPU build")
    found = ": ".join(part for part in (build if torch.version else "", problem) if part)
    return Check(subject="torch", found=found, state=state, remedy=remedy)


def _judge(torch: Torch, gpus: Sequence[Gpu]) -> tuple[State, str, str]:
    if not torch.version:
        return "problem", f"cannot be imported: {torch.error}", "run `scripts/setup.sh --force`"
    if torch.cuda is None:
        if not gpus:
            return "ok", "", ""
        return "warning", "the GPUs are not used", "`PLINTH_STACK=cuda make setup` installs the CUDA stack"
    if torch.num_gpus:
        return "ok", f"finds {torch.num_gpus} GPUs" + "".join(f", driver {gpu.driver}" for gpu in gpus[:1]), ""
    if not gpus:
        return "problem", "no GPU is visible", "give this machine or container a GPU, or `PLINTH_STACK=cpu make setup`"
    needed = MIN_DRIVERS.get(int(torch.cuda.split(".")[0]), "0")
    if _parts(gpus[0].driver) < _parts(needed):
        return "problem", f"driver {gpus[0].driver} is too old", f"install driver {needed} or newer"
    remedy = "see `nvidia-smi -q` and, on a host with NVSwitch, `systemctl status nvidia-fabricmanager`"
    return "problem", f"finds no GPU: {torch.error or 'CUDA_VISIBLE_DEVICES hides them'}", remedy


def has_kernels(capability: tuple[int, int], architectures: Iterable[str]) -> bool:
    """Whether machine code of the same major and no newer minor version, or any older intermediate code, is there."""
    for architecture in architectures:
        kind, _, digits = architecture.partition("_")
        plain = digits.rstrip("af")
        if not plain.isdecimal():
            continue
        built = (int(plain[:-1] or 0), int(plain[-1]))
        if digits.endswith("a"):  # runs on exactly this one
            fits = built == capability
        elif kind == "sm" or digits.endswith("f"):
            fits = built[0] == capability[0] and built <= capability
        else:
            fits = built <= capability
        if fits:
            return True
    return False


def _nvidia_smi(kind: str, query: str) -> tuple[int, str]:
    command = ["nvidia-smi", f"--query-{kind}={query}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except subprocess.TimeoutExpired:
        return 124, "no answer within 60 s"
    return done.returncode, done.stdout or done.stderr


def _capability(text: str) -> tuple[int, int] | None:
    major, _, minor = text.partition(".")
    return (int(major), int(minor)) if major.isdecimal() and minor.isdecimal() else None


def _number(text: str) -> int | None:
    return int(text) if text.isdecimal() else None


def _gib(mib: int | None) -> str:
    return "unknown memory" if mib is None else f"{mib / 1024:.1f} GiB"


def _parts(version: str) -> list[int]:
    return [int(part) for part in version.split(".") if part.isdecimal()]
