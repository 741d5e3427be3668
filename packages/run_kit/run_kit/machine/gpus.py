"""NVIDIA GPUs, as nvidia-smi lists them."""

import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

_QUERY = "index,uuid,compute_cap,memory.total,memory.used,memory.free,driver_version,name"


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """A GPU. None stands for what nvidia-smi does not report."""

    index: int
    uuid: str
    name: str
    capability: tuple[int, int] | None
    total_mib: int | None
    used_mib: int | None
    """Memory that processes hold."""
    free_mib: int | None
    """Memory that processes can still allocate: as the driver reports it, else all that is not used."""
    driver: str


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
    rows = [[part.strip() for part in line.split(",", 7)] for line in text.splitlines()]
    return [_gpu(*row) for row in rows if len(row) == 8 and row[0].isdecimal()]


def _gpu(index: str, uuid: str, capability: str, total: str, used: str, free: str, driver: str, name: str) -> Gpu:
    total_mib, used_mib, free_mib = (int(text) if text.isdecimal() else None for text in (total, used, free))
    # Total minus used can be too much: drivers reserve memory for themselves and do not count it as used.
    if free_mib is None and total_mib is not None and used_mib is not None:
        free_mib = total_mib - used_mib
    major, _, minor = capability.partition(".")
    return Gpu(
        index=int(index),
        uuid=uuid,
        name=name,
        capability=(int(major), int(minor)) if major.isdecimal() and minor.isdecimal() else None,
        total_mib=total_mib,
        used_mib=used_mib,
        free_mib=free_mib,
        driver=driver,
    )
