"""Cores, memory, shared memory, disks, limits and ports of this host, or of the container that this process is in."""

import os
import resource
import shutil
import socket
import tempfile
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from .check import GIB, MIB, Check, at_least

UNLIMITED = float("inf")


def read_cores() -> float:
    """Cores that this process may use: its affinity, or the cgroup's quota if that is less."""
    cores = float(len(os.sched_getaffinity(0)))
    quota, _, period = _read("/sys/fs/cgroup/cpu.max").partition(" ")
    return min(cores, int(quota) / int(period)) if quota.isdecimal() and period.isdecimal() else cores


def check_cores(cores: float, threads: str | None) -> list[Check]:
    """Cores, and OMP_NUM_THREADS (`threads`) against them."""
    rows = [at_least("cores", f"{cores:g}", cores, warn=2, refuse=0, remedy="ranks and servers need 2 or more cores")]
    if threads is not None and threads.isdecimal() and int(threads) > cores:
        remedy = f"unset OMP_NUM_THREADS, or set it to at most {max(1, int(cores))}"
        rows.append(
            Check(subject="OMP_NUM_THREADS", found=f"{threads} for each process", state="warning", remedy=remedy)
        )
    return rows


def read_memory() -> tuple[int, int]:
    """Total and available bytes; those of the cgroup if it has less."""
    import psutil

    host = psutil.virtual_memory()
    limit, used = _read("/sys/fs/cgroup/memory.max"), _read("/sys/fs/cgroup/memory.current")
    if limit.isdecimal() and used.isdecimal() and int(limit) < host.total:
        return int(limit), min(host.available, int(limit) - int(used))
    return host.total, host.available


def check_memory(total: int, available: int) -> Check:
    """Host memory; the built-in demo needs 3.4 GiB."""
    found = f"{available / GIB:.1f} of {total / GIB:.1f} GiB available"
    remedy = "end other programs, or raise the container's memory limit"
    return at_least("memory", found, available, warn=6 * GIB, refuse=2 * GIB, remedy=remedy)


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
        "temporary": Path(environment.get("TMPDIR") or tempfile.gettempdir()),
        "Hugging Face": Path(environment.get("HF_HOME") or cache / "huggingface"),
        "compiled code": Path(environment.get("PLINTH_CACHE_DIR") or cache / "plinth"),
    }


def check_disks(folders: Mapping[str, Path]) -> list[Check]:
    """One line per file system, and one for each folder that cannot be written."""
    uses: dict[int, list[str]] = {}
    free: dict[int, int] = {}
    rows = []
    for use, folder in folders.items():
        existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
        if not os.access(existing, os.W_OK | os.X_OK):
            remedy = "make it writable, or choose another folder (HF_HOME, PLINTH_CACHE_DIR, TMPDIR)"
            rows.append(
                Check(subject=f"{use} folder", found=f"no right to write {existing}", state="problem", remedy=remedy)
            )
            continue
        device = existing.stat().st_dev
        free[device] = shutil.disk_usage(existing).free
        uses.setdefault(device, []).append(f"{use} {folder}")
    return [*rows, *(check_disk(", ".join(uses[device]), free[device]) for device in uses)]


def check_disk(use: str, free: int) -> Check:
    """Free space of one file system."""
    remedy = "free space, or move the folder: trainer.output_dir, HF_HOME, PLINTH_CACHE_DIR, TMPDIR"
    return at_least("disk", f"{_size(free)} free: {use}", free, warn=5 * GIB, refuse=GIB, remedy=remedy)


def read_limits() -> dict[str, float]:
    """Soft limits of this process: open files, processes (also those of the cgroup that are left), locked bytes."""
    kinds = {"files": resource.RLIMIT_NOFILE, "processes": resource.RLIMIT_NPROC, "locked": resource.RLIMIT_MEMLOCK}
    soft = {name: resource.getrlimit(kind)[0] for name, kind in kinds.items()}
    found = {name: UNLIMITED if value == resource.RLIM_INFINITY else value for name, value in soft.items()}
    most, now = _read("/sys/fs/cgroup/pids.max"), _read("/sys/fs/cgroup/pids.current")
    if most.isdecimal() and now.isdecimal():
        found["processes"] = min(found["processes"], int(most) - int(now))
    return found


def check_limits(limits: Mapping[str, float], *, infiniband: bool) -> list[Check]:
    """Open files for one connection per request, processes and threads, and locked memory for InfiniBand."""
    files, processes = limits["files"], limits["processes"]
    rows = [
        at_least("open files", _count(files), files, warn=1024, refuse=256, remedy="ulimit -n 65536"),
        at_least("processes", _count(processes), processes, warn=4096, refuse=256,
                 remedy="ulimit -u unlimited, or raise the container's --pids-limit"),
    ]  # fmt: skip
    if infiniband:
        remedy = "ulimit -l unlimited, or docker run --ulimit memlock=-1"
        found = "unlimited" if limits["locked"] == UNLIMITED else _size(limits["locked"])
        rows.append(at_least("locked memory", found, limits["locked"], warn=UNLIMITED, refuse=0, remedy=remedy))
    return rows


def read_ports() -> tuple[int, int]:
    """How many local ports the kernel can give out, and how many of them are in use."""
    first, last = map(int, _read("/proc/sys/net/ipv4/ip_local_port_range").split() or ("32768", "60999"))
    tables = "\n".join(_read(f"/proc/net/{name}") for name in ("tcp", "tcp6"))
    return last - first + 1, sum(first <= port <= last for port in ports_in_use(tables))


def ports_in_use(table: str) -> set[int]:
    """Local ports in the text of /proc/net/tcp."""
    rows = (line.split() for line in table.splitlines())
    local = (row[1].rpartition(":")[2] for row in rows if len(row) > 3 and row[0].endswith(":"))
    return {int(port, 16) for port in local}


def check_ports(total: int, used: int) -> Check:
    """Free local ports: servers, ranks and every open request take one."""
    remedy = "end programs with many connections, or widen net.ipv4.ip_local_port_range"
    return at_least("ports", f"{total - used} of {total} free", total - used, warn=2000, refuse=100, remedy=remedy)


def check_name() -> Check:
    """The host's name, by which gloo and Ray find this host."""
    name = socket.gethostname()
    try:
        socket.getaddrinfo(name, None)
    except OSError as error:
        remedy = "add it to /etc/hosts, or set GLOO_SOCKET_IFNAME=lo"
        return Check(subject="host name", found=f"has no address: {name}: {error}", state="warning", remedy=remedy)
    return Check(subject="host name", found="has an address")


def check_host(*, num_gpus: int, environment: Mapping[str, str]) -> Iterable[Check]:
    """All of the above for this process."""
    yield from check_cores(read_cores(), environment.get("OMP_NUM_THREADS"))
    yield check_memory(*read_memory())
    yield check_shared_memory(shutil.disk_usage("/dev/shm").free, num_gpus=num_gpus)
    yield from check_disks(run_folders(environment, Path.home(), Path.cwd()))
    yield from check_limits(read_limits(), infiniband=any(Path("/sys/class/infiniband").glob("*")))
    yield check_ports(*read_ports())
    yield check_name()


def _read(path: str) -> str:
    with suppress(OSError):
        return Path(path).read_text(encoding="utf-8", errors="replace").strip()
    return ""


def _count(value: float) -> str:
    return "unlimited" if value == UNLIMITED else f"{value:.0f}"


def _size(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.1f} GiB" if num_bytes >= GIB else f"{num_bytes / MIB:.0f} MiB"
