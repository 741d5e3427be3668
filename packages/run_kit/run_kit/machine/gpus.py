"""NVIDIA GPUs, as nvidia-smi lists them."""

import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

_QUERY = "index,uuid,compute_cap,memory.total,memory.used,memory.free,driver_version,name"


@dataclass(frozen=True)
class Gpu:
    """A GPU, with fields in the order of the query. None stands for what nvidia-smi does not report."""

    index: int
    uuid: str
    capability: tuple[int, int] | None
    total_mib: int | None
    used_mib: int | None
    """Memory that processes hold."""
    free_mib: int | None
    """Memory that processes can still allocate: as the driver reports it, else all that is not used."""
    driver: str
    name: str


def read_gpus() -> tuple[list[Gpu], str]:
    """The GPUs, and the error of nvidia-smi, empty if it worked or is not installed."""
    if shutil.which("nvidia-smi") is None:
        return [], ""
    command = ["nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except subprocess.TimeoutExpired:
        return [], "no answer within 60 s"
    if done.returncode != 0:
        return [], next(iter((done.stdout or done.stderr).strip().splitlines()), f"exit code {done.returncode}")
    return parse_gpus(done.stdout), ""


def find_gpu(gpus: Sequence[Gpu], uuid: str) -> Gpu | None:
    """The GPU whose UUID is, or begins with, `uuid`; None if there is none or there are several."""
    matching = [gpu for gpu in gpus if gpu.uuid.lower().startswith(uuid.lower())]
    return matching[0] if len(matching) == 1 else None


def parse_gpus(text: str) -> list[Gpu]:
    """GPUs of nvidia-smi's lines with the fields of the query above; other lines are left out."""
    gpus = []
    for line in text.splitlines():
        row = [part.strip() for part in line.split(",", 7)]
        if len(row) < 8 or not row[0].isdecimal():
            continue
        version = row[2].split(".")
        capability = (int(version[0]), int(version[1])) if len(version) == 2 else None  # not "[N/A]"
        total, used, free = (int(part) if part.isdecimal() else None for part in row[3:6])
        # Total minus used can be too much: drivers reserve memory for themselves and do not count it as used.
        if free is None and total is not None and used is not None:
            free = total - used
        gpus.append(Gpu(int(row[0]), row[1], capability, total, used, free, *row[6:]))
    return gpus
