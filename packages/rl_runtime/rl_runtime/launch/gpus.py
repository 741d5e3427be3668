"""The GPUs of this host and their memory, without a CUDA context in this process."""

import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU."""

    name: str
    total_bytes: int
    used_bytes: int
    """Bytes that other processes hold now."""

    @property
    def free_bytes(self) -> int:
        """Bytes that this run can use."""
        return self.total_bytes - self.used_bytes


def read_gpus(gpu_ids: Sequence[int]) -> tuple[Gpu, ...]:
    """The GPUs with these indices, from nvidia-smi; else from torch, which does not know what others hold."""
    query = ["nvidia-smi", "--query-gpu=name,memory.total,memory.used", "--format=csv,noheader,nounits"]
    if shutil.which(query[0]):
        answer = subprocess.run(query, capture_output=True, text=True, check=False, timeout=60)
        found = parse_gpus(answer.stdout)
        if all(index < len(found) for index in gpu_ids):
            return tuple(found[index] for index in gpu_ids)
    import torch

    properties = [torch.cuda.get_device_properties(index) for index in range(len(gpu_ids))]
    return tuple(Gpu(name=p.name, total_bytes=p.total_memory, used_bytes=0) for p in properties)


def parse_gpus(text: str) -> tuple[Gpu, ...]:
    """GPUs of nvidia-smi's lines `name, total MiB, used MiB`; lines of another form are left out."""
    gpus = []
    for line in text.splitlines():
        name, *numbers = (part.strip() for part in line.rsplit(",", 2))
        if len(numbers) == 2 and all(number.isdigit() for number in numbers):
            total, used = (int(number) * 2**20 for number in numbers)
            gpus.append(Gpu(name=name, total_bytes=total, used_bytes=used))
    return tuple(gpus)
