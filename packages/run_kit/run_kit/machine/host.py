"""Memory, shared memory and disks of this host, or of the container that this process is in."""

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from .check import GIB, MIB, Check, at_least


def check_host(*, num_gpus: int, environment: Mapping[str, str]) -> Iterator[Check]:
    """All checks of this file for this process."""
    yield check_memory(*_memory())
    yield check_shared_memory(shutil.disk_usage("/dev/shm").free, num_gpus=num_gpus)
    for use, folder in run_folders(environment, Path.home(), Path.cwd()).items():
        yield check_folder(use, folder)


def check_memory(total: int, available: int) -> Check:
    """Host memory; the built-in demo needs 3.4 GiB."""
    finding = f"{available / GIB:.1f} of {total / GIB:.1f} GiB available"
    remedy = "end other programs, or raise the container's memory limit"
    return at_least("memory", finding, available, warn=6 * GIB, refuse=2 * GIB, remedy=remedy)


def check_shared_memory(free: int, *, num_gpus: int) -> Check:
    """/dev/shm, for NCCL between GPUs and Ray's object store. Docker gives 64 MiB."""
    remedy = "start the container with --shm-size=8g or --ipc=host, or `mount -o remount,size=8g /dev/shm`"
    refuse = 64 * MIB * num_gpus if num_gpus > 1 else 0
    return at_least("/dev/shm", f"{_size(free)} free", free, warn=GIB, refuse=refuse, remedy=remedy)


def run_folders(environment: Mapping[str, str], home: Path, here: Path) -> dict[str, Path]:
    """Use -> the folder where a run, or a library that it uses, writes."""
    cache = Path(environment.get("XDG_CACHE_HOME") or home / ".cache")
    return {
        "outputs": here,
        "temporary files": Path(environment.get("TMPDIR") or tempfile.gettempdir()),
        "Ray's sockets": ray_folder(environment),
        "Hugging Face": Path(environment.get("HF_HOME") or cache / "huggingface"),
        "compiled code": Path(environment.get("PLINTH_CACHE_DIR") or cache / "plinth"),
    }


def ray_folder(environment: Mapping[str, str]) -> Path:
    """The folder of Ray's files: as Ray chooses it, but /tmp/ray where the paths of its sockets would be too long.

    Linux allows 107 bytes, of which Ray adds up to 64 for the session and the socket.
    """
    folder = Path(environment.get("RAY_TMPDIR") or environment.get("TMPDIR") or "/tmp").absolute() / "ray"
    return folder if len(os.fsencode(folder)) <= 107 - 64 else Path("/tmp/ray")


def check_folder(use: str, folder: Path) -> Check:
    """The right to write a folder, which need not exist, and the free space of its file system."""
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    remedy = "free space, or choose another folder (trainer.output_dir, HF_HOME, PLINTH_CACHE_DIR, TMPDIR)"
    if not os.access(existing, os.W_OK | os.X_OK):
        return Check(use, f"no right to write {existing}", "problem", remedy)
    free = shutil.disk_usage(existing).free
    return at_least(use, f"{_size(free)} free: {folder}", free, warn=5 * GIB, refuse=GIB, remedy=remedy)


def _memory() -> tuple[int, int]:
    """Total and available bytes; those of the cgroup if it has less."""
    import psutil

    host = psutil.virtual_memory()
    with suppress(OSError, ValueError):  # no cgroup, or one whose limit is "max"
        limit, used = (int(Path(f"/sys/fs/cgroup/memory.{name}").read_text()) for name in ("max", "current"))
        if limit < host.total:
            return limit, min(host.available, limit - used)
    return host.total, host.available


def _size(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.1f} GiB" if num_bytes >= GIB else f"{num_bytes / MIB:.0f} MiB"
