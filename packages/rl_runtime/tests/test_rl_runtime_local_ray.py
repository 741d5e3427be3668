"""The watchdog of a local Ray. Tests of the apps start Ray itself, and look at its ports and processes."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from plinth_testing import wait_until

DRIVER = """
import os, signal, subprocess, sys
before = subprocess.Popen(["sleep", "1000"], stdout=subprocess.DEVNULL)
from rl_runtime.launch.local_ray import LocalRay
ray = LocalRay(1)
own = subprocess.Popen(["sh", "-c", "sleep 1000 >/dev/null & echo $!; wait"], stdout=subprocess.PIPE, text=True)
print(own.pid, own.stdout.readline().strip(), before.pid, flush=True)
ray.watch()
later = subprocess.Popen(["sleep", "1000"], stdout=subprocess.DEVNULL)
ray.watch()
print(later.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL) if sys.argv[1] == "killed" else ray.close()
"""


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize(("end", "code"), [("killed", -signal.SIGKILL), ("closed", 0)])
def test_what_ray_has_started_ends_with_the_driver(tmp_path: Path, end: str, code: int) -> None:
    (tmp_path / "driver.py").write_text(DRIVER)
    driver = subprocess.run(
        [sys.executable, str(tmp_path / "driver.py"), end], stdout=subprocess.PIPE, text=True, check=False, timeout=120
    )
    assert driver.returncode == code
    child, grandchild, before, later = map(int, driver.stdout.split())
    try:
        wait_until(lambda: not is_running(child) and not is_running(grandchild), 30)
        assert is_running(before)
        assert is_running(later), "a process that Ray has not started"
    finally:
        os.kill(before, signal.SIGKILL)
        os.kill(later, signal.SIGKILL)
