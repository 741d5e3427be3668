"""Hosts made of network namespaces: who reaches whom, and that nothing is left of them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from plinth_testing import NetworkHost, network_hosts, start_process, wait_until
from plinth_testing.network_hosts import is_available

pytestmark = pytest.mark.skipif(not is_available(), reason="network namespaces need root and the kernel's permission")

DAEMON = "import os, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(600)"
KILLED = """
import os, signal
from plinth_testing import network_hosts
with network_hosts(2) as hosts:
    print(hosts[0].machine_interface, *(host.pid for host in hosts), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def interfaces() -> set[str]:
    return {path.name for path in Path("/sys/class/net").glob("plinth-*")}


def ends_with(code: str, *arguments: str, host: NetworkHost | None = None) -> int:
    command = [sys.executable, "-S", "-c", code, *arguments]
    command = host.command(*command) if host else command
    return subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=60).returncode


def test_networks_side_by_side_differ_and_nothing_is_left_of_them() -> None:
    before = interfaces()
    with network_hosts(1) as (one,), network_hosts(1) as (two,):
        assert one.machine_address != two.machine_address
        assert interfaces() - before == {one.machine_interface, two.machine_interface}
        assert ends_with(DAEMON, host=one) == 0
        (daemon,) = one.pids()
    assert interfaces() <= before
    wait_until(lambda: not psutil.pid_exists(daemon) or psutil.Process(daemon).status() == psutil.STATUS_ZOMBIE, 10)
    wait_until(lambda: not any(map(psutil.pid_exists, (one.pid, two.pid))), 10)


def test_a_killed_test_run_leaves_nothing(tmp_path: Path) -> None:
    run = start_process([sys.executable, "-c", KILLED], tmp_path / "log")
    assert run.wait(60) == -signal.SIGKILL
    interface, *pids = (tmp_path / "log").read_text().split()
    wait_until(lambda: interface not in interfaces(), 20)
    wait_until(lambda: not any(os.path.exists(f"/proc/{pid}/ns/net") for pid in pids), 10)
