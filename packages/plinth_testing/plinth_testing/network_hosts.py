"""Several hosts on one machine: network namespaces with addresses of their own, joined by a bridge.

A host has its own interfaces, ports and abstract Unix sockets, as another machine has; files, processes and memory are
the machine's. A test in the machine's own namespace reaches every host, and every host reaches it. The namespaces have
no names: each belongs to a process that dies with the test run, and the kernel then removes its interfaces, even if the
test run is killed.
"""

from __future__ import annotations

import contextlib
import functools
import os
import random
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from .processes import start_process, stop_process, wait_until

_NUM_TRIES = 50


@dataclass(frozen=True, kw_only=True)
class NetworkHost:
    """One host: its address, and the process that keeps its network namespace."""

    address: str
    """IPv4 address, such as ``10.231.7.2``."""
    machine_address: str
    """IPv4 address of the machine's own namespace on the same network."""
    machine_interface: str
    """Interface of that address in the machine's own namespace; a host's own is `eth0`."""
    pid: int

    def command(self, *command: str) -> list[str]:
        """The command line that runs `command` on this host, for `start_process` or `subprocess`."""
        return ["nsenter", f"--net=/proc/{self.pid}/ns/net", "--", *command]

    def pids(self) -> list[int]:
        """Processes that run on this host now."""
        pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
        return [pid for pid in pids if pid != self.pid and _namespace(pid) == _namespace(self.pid)]


@contextlib.contextmanager
def network_hosts(num_hosts: int = 2) -> Iterator[list[NetworkHost]]:
    """`num_hosts` hosts on a network of their own; needs root. At the end it kills all processes on the hosts.

    A host has the loopback device and `eth0`. It has no route to the outside: connections there fail within seconds.

    Raises:
        OSError: the programs `ip`, `nsenter` and `unshare` are missing.
        subprocess.CalledProcessError: the kernel or the container denies it; see `is_available`.
    """
    with contextlib.ExitStack() as stack:
        hub, *holders = [stack.enter_context(_namespace_holder()) for _ in range(num_hosts + 1)]
        _ip(hub, "link add name bridge type bridge", "link set bridge up")
        machine, network = _join_machine(hub)
        stack.callback(_ip, os.getpid(), f"link delete {machine}")
        hosts = [
            NetworkHost(
                address=f"{network}.{number}", machine_address=f"{network}.1", machine_interface=machine, pid=pid
            )
            for number, pid in enumerate(holders, start=2)
        ]
        for number, host in enumerate(hosts):
            port = f"port{number}"
            _ip(host.pid, f"link add name eth0 type veth peer name {port} netns {hub}", "link set lo up")
            # A default route, so that programs which ask for "my address on the way out" get it.
            _ip(host.pid, f"address add {host.address}/24 dev eth0", "link set eth0 up", "route add default dev eth0")
            _ip(hub, f"link set {port} master bridge", f"link set {port} up")
            stack.callback(_kill_processes, host)
        yield hosts


@functools.cache
def is_available() -> bool:
    """True if `network_hosts` works here: the programs exist, this is root, and the kernel allows it."""
    try:
        with network_hosts(1) as (host,):
            subprocess.run(host.command("true"), check=True, capture_output=True, timeout=30)
    except (OSError, AssertionError, subprocess.SubprocessError):
        return False
    return True


@contextlib.contextmanager
def _namespace_holder() -> Iterator[int]:
    """The id of a process that keeps a new network namespace until the end of the block."""
    command = ["unshare", "--net", "--", "sleep", "infinity"]
    with open(os.devnull, "r+b") as null:
        process = start_process(command, null)
    try:
        wait_until(lambda: process.poll() is not None or _is_elsewhere(process.pid), 30, interval_s=0.002)
        if process.poll() is not None:
            raise subprocess.CalledProcessError(process.returncode, command)
        yield process.pid
    finally:
        stop_process(process)


def _join_machine(hub: int) -> tuple[str, str]:
    """Connects the machine's own namespace to the bridge: name of its interface, first three numbers of the network.

    The name contains the network and the kernel gives a name only once, so test runs side by side never share one.
    """
    for _ in range(_NUM_TRIES):
        high, low = random.randint(224, 254), random.randint(0, 255)
        name, network = f"plinth-{high}-{low}", f"10.{high}.{low}"
        try:
            _ip(os.getpid(), f"link add name {name} type veth peer name machine netns {hub}")
        except subprocess.CalledProcessError:
            if Path(f"/sys/class/net/{name}").exists():
                continue  # another test run's
            raise
        _ip(os.getpid(), f"address add {network}.1/24 dev {name}", f"link set {name} up")
        _ip(hub, "link set machine master bridge", "link set machine up")
        return name, network
    raise OSError(f"none of {_NUM_TRIES} networks in 10.224.0.0/11 is free")


def _ip(pid: int, *commands: str) -> None:
    """Runs commands of the program `ip` in the network namespace of a process."""
    program = ["nsenter", f"--net=/proc/{pid}/ns/net", "--", "ip", "-batch", "-"]
    subprocess.run(program, input="\n".join(commands), text=True, check=True, capture_output=True, timeout=30)


def _namespace(pid: int) -> str:
    """Name of the process's network namespace; empty if it has ended."""
    try:
        return os.readlink(f"/proc/{pid}/ns/net")
    except OSError:
        return ""


def _is_elsewhere(pid: int) -> bool:
    return _namespace(pid) not in ("", _namespace(os.getpid()))


def _kill_processes(host: NetworkHost) -> None:
    """Kills what still runs on a host, such as daemons that left the process group of the command."""

    def kill_all() -> list[int]:
        pids = host.pids()
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return pids

    if _is_elsewhere(host.pid):  # its namespace still exists
        wait_until(lambda: not kill_all(), 30)
