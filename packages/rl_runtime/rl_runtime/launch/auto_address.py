"""Finds the Ray cluster that `trainer.ray_address=auto` means, among all Rays with a process on this host.

Ray itself takes the first one that it finds in the list of processes, also the private Ray of another run, which lends
that run's CPUs and ends with it.
"""

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from ..errors import InputError

_SESSION = re.compile(r"session_[\d-]+_[\d-]+_\d+_(\d+)")
"""Name of a Ray session; it ends with the id of the process that has started the cluster."""
_ADDRESS = re.compile(r"--gcs-address=(\S+)")


@dataclass(frozen=True, kw_only=True)
class LocalRaylet:
    """A Ray process that makes this host a node of a cluster."""

    address: str
    """host:port of the cluster's head."""
    pid: int
    user: str
    driver: str = ""
    """The program that has started the cluster for itself alone (`ray.init`) and ends it; empty: `ray start` has."""

    def describe(self) -> str:
        """Address and owner."""
        owner = f"the private Ray of {self.driver}" if self.driver else "started with ray start"
        return f"{self.address} ({owner}, user {self.user}, raylet {self.pid})"


def find_auto_address() -> tuple[str, str]:
    """The address that `auto` stands for, and a line about it for the user.

    RAY_ADDRESS has precedence, as in Ray: `ray job submit` sets it.

    Raises:
        InputError: this host is no node of a cluster, or of several.
    """
    if given := os.environ.get("RAY_ADDRESS"):
        return given, f"trainer.ray_address=auto: {given}, from RAY_ADDRESS"
    raylet = choose_cluster(list(read_raylets(psutil.process_iter())))
    return raylet.address, f"trainer.ray_address=auto: {raylet.describe()}"


def choose_cluster(raylets: Sequence[LocalRaylet]) -> LocalRaylet:
    """The raylet of the only cluster that is nobody's private Ray.

    Raises:
        InputError: there is none, or there are several.
    """
    shared = {raylet.address: raylet for raylet in raylets if not raylet.driver}
    if len(shared) == 1:
        return next(iter(shared.values()))
    if shared:
        several = "; ".join(raylet.describe() for raylet in shared.values())
        raise InputError(
            f"this host is a node of {len(shared)} Ray clusters: {several}",
            field="trainer.ray_address",
            value="auto",
            allowed="host:port of one of them",
        )
    private = "; ".join(raylet.describe() for raylet in raylets)
    passed = f", only of Rays that end with their programs: {private}" if private else ""
    raise InputError(
        f"this host is no node of a Ray cluster{passed}",
        field="trainer.ray_address",
        value="auto",
        remedy="start one with ray start --head on this host and ray start --address=<this host>:6379 on the others, "
        "or give host:port",
    )


def read_raylets(processes: Iterable[psutil.Process]) -> Iterator[LocalRaylet]:
    """The raylets among these processes; those that end meanwhile, or that this user cannot read, are left out."""
    for process in processes:
        try:
            command = process.cmdline()
            if not command or Path(command[0]).name != "raylet":
                continue
            text = " ".join(command)
            if address := _ADDRESS.search(text):
                driver = _driver(process.parent(), text)
                yield LocalRaylet(address=address[1], pid=process.pid, user=process.username(), driver=driver)
        except psutil.Error:
            continue


def _driver(parent: psutil.Process | None, command: str) -> str:
    """The parent of a raylet, if it has started the cluster in its own process.

    `ray start` exits once the cluster is up. With `--block` it stays, and is no program that uses the cluster.
    """
    session = _SESSION.search(command)
    if parent is None or session is None or parent.pid != int(session[1]):
        return ""
    words = parent.cmdline()
    if "start" in words and any(Path(word).name in ("ray", "ray.scripts.scripts", "scripts.py") for word in words):
        return ""
    return f"process {parent.pid} ({' '.join(words)[:80]})"
