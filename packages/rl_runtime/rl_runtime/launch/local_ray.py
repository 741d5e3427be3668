"""A Ray of the run's own on this host: reachable by this user only, and gone with the driver."""

import logging
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import ray

from run_kit.machine.host import ray_folder

from ..errors import InputError
from ..ranks.environment import protect_ray, ray_has_token

NUM_ATTEMPTS = 3
_MIB = 2**20
_OBJECT_STORE_BYTES = 256 * _MIB
_MIN_FREE_BYTES = 64 * _MIB
"""Free space of the folders for temporary files: of Ray, and of the sandboxes of rewards."""
_log = logging.getLogger(__name__)
_WATCHDOG = """
import os, signal, sys
started = lambda pid: open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[19]
known = {}
for line in sys.stdin:
    for pid in line.split():
        try:
            known[pid] = started(pid)
        except OSError:
            pass
for pid, at in known.items():
    try:
        if started(pid) == at:
            os.kill(int(pid), signal.SIGKILL)
    except OSError:
        pass
"""
"""Reads process ids from stdin; kills those that still run when stdin ends, because the driver closed it or died."""


def check_local_ray() -> None:
    """Checks that Ray can start on this host.

    Raises:
        InputError: no room or no right to write where it keeps its files, or a limit on their size (`ulimit -f`).
    """
    for folder in (ray_folder(os.environ), Path(tempfile.gettempdir())):
        existing = next(path for path in (folder, *folder.parents) if path.exists())
        free = shutil.disk_usage(existing).free
        if free < _MIN_FREE_BYTES or not os.access(existing, os.W_OK | os.X_OK):
            raise InputError(
                f"the folder for temporary files has {free // _MIB} MiB free, or cannot be written",
                field="TMPDIR",
                value=str(folder),
                allowed=f"a folder with {_MIN_FREE_BYTES // _MIB} MiB",
                remedy="free space there, or set TMPDIR (for Ray alone RAY_TMPDIR) to a short path on another disk",
            )
    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    needed = 2 * _OBJECT_STORE_BYTES  # and a bucket of weights
    if limit != resource.RLIM_INFINITY and limit < needed:
        raise InputError(
            "Ray's object store and the buckets of weights are larger files",
            field="ulimit -f",
            value=f"{limit:,} bytes",
            allowed=f"at least {needed:,} bytes, and a checkpoint's largest file",
            remedy="ulimit -f unlimited",
        )


class LocalRay:
    """Ray with `num_cpus` CPUs, and a watchdog that ends its processes should this process be killed."""

    def __init__(self, num_cpus: int) -> None:
        self.num_cpus = num_cpus
        self._is_started = False
        self._before = set(psutil.Process().children())
        self._roots: list[psutil.Process] | None = None
        command = [sys.executable, "-I", "-S", "-c", _WATCHDOG]
        # In a session of its own, so that Ctrl-C and a signal to the driver's process group do not reach it.
        self._watchdog = subprocess.Popen(command, stdin=subprocess.PIPE, text=True, start_new_session=True)

    def close(self) -> None:
        """Ends Ray."""
        self.watch()
        ray.shutdown()
        with suppress(OSError, subprocess.TimeoutExpired):
            self._watchdog.communicate(timeout=10)

    def watch(self) -> None:
        """Adds the processes that Ray has now to those that end with this process, even if it is killed.

        Ray's agents notice a killed driver in up to a minute.
        """
        if self._roots is None:  # this process's children later include the servers, which have a supervisor
            children = set(psutil.Process().children()) - self._before
            self._roots = [process for process in children if process.pid != self._watchdog.pid]
        pids: list[int] = []
        for root in self._roots:
            with suppress(psutil.Error):
                pids += [root.pid, *(process.pid for process in root.children(recursive=True))]
        assert self._watchdog.stdin is not None
        with suppress(OSError):
            print(*pids, file=self._watchdog.stdin, flush=True)

    def start(self, num_attempts: int = NUM_ATTEMPTS) -> None:
        """Starts Ray, unless it has started; warns if other users can reach it."""
        for attempt in range(1, 1 if self._is_started else num_attempts + 1):
            try:
                with keeping_sigterm(), _on_loopback():
                    protect_ray()
                    ray.init(
                        address="local",
                        num_cpus=self.num_cpus,
                        include_dashboard=False,
                        log_to_driver=True,
                        logging_level=logging.ERROR,
                        object_store_memory=_OBJECT_STORE_BYTES,
                        _temp_dir=str(ray_folder(os.environ)),
                        # Ray lowers the priority of its workers; the ranks need the normal one. And it starts workers
                        # ahead, which no rank uses, since ranks have environments of their own.
                        _system_config={"worker_niceness": 0, "prestart_worker_first_driver": False},
                    )
                self.watch()
                _say_what_is_open()
                self._is_started = True
                return
            except Exception:  # Ray raises a bare Exception if its processes do not start in 30 s, on a busy machine
                self.watch()
                ray.shutdown()
                self._roots = None
                if attempt == num_attempts:
                    raise


_ahead: list[LocalRay] = []


@contextmanager
def ray_ahead(num_cpus: int) -> Iterator[None]:
    """Starts a Ray for a session inside the block, which nobody has planned yet; ends it unless one takes it.

    Ray's processes take seconds to start, in which this one only waits.
    """
    try:
        with suppress(Exception):  # the session meets it again, and says what it means
            check_local_ray()
            _ahead.append(LocalRay(num_cpus))
            _ahead[-1].start(num_attempts=1)
        yield
    finally:
        while _ahead:
            _ahead.pop().close()


def take_ray(num_cpus: int) -> LocalRay:
    """The Ray that started ahead, if it has as many CPUs; else one that has not started. The caller closes it."""
    while _ahead:
        local = _ahead.pop()
        if local.num_cpus >= num_cpus:
            return local
        local.close()
    return LocalRay(num_cpus)


@contextmanager
def keeping_sigterm() -> Iterator[None]:
    """Keeps the handler of SIGTERM: `ray.init` installs one that skips the app's cleanup at a second signal."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)


@contextmanager
def _on_loopback() -> Iterator[None]:
    """Ray listens on 127.0.0.1 only, as it does on laptops.

    The variable RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0 does the same, but Ray reads it when it is imported. `ray.init`
    replaces a loopback `_node_ip_address` by one that other hosts reach.
    """
    from ray._private import ray_constants

    before = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before


def _say_what_is_open() -> None:
    """Warns where this version of Ray, or a variable of the user, leaves its ports open."""
    address = ray.util.get_node_ip_address()
    if not address.startswith("127."):
        _log.warning("Ray %s listens on %s, not only on this host", ray.__version__, address)
    warn_without_token("every user of this host", "use ray>=2.60 and do not set RAY_AUTH_MODE")


def warn_without_token(who: str, remedy: str) -> None:
    """Warns if the Ray that this process is connected to lets everybody run code."""
    if not ray_has_token():
        _log.warning("Ray %s asks for no token, so %s can run code in this run; %s", ray.__version__, who, remedy)
