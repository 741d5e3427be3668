"""A local Ray: its watchdog, and the host that it needs. Tests of the apps look at its ports and processes."""

import os
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from plinth_testing import raises, wait_until
from rl_runtime.errors import InputError
from rl_runtime.launch.local_ray import check_local_ray

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


@pytest.mark.slow
@pytest.mark.thorough  # without the two sizes, every run of an app does it
def test_a_ray_that_started_ahead_serves_the_session_that_takes_it(tmp_path: Path) -> None:
    code = """
import ray
from rl_runtime.launch.local_ray import ray_ahead, take_ray
with ray_ahead(2):
    assert ray.is_initialized()
    local = take_ray(1)
local.start()
print(ray.get(ray.remote(lambda: 5).remote()), ray.cluster_resources()["CPU"])
local.close()
with ray_ahead(1):
    larger = take_ray(2)
    print(ray.is_initialized(), larger.num_cpus)
larger.close()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=180, check=False)
    assert (done.returncode, done.stdout.split()) == (0, ["5", "2.0", "False", "2"]), done.stderr


def test_a_full_temporary_folder_and_a_limit_of_file_sizes_are_refused_before_ray_starts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    check_local_ray()
    with monkeypatch.context() as change:
        change.setattr(resource, "getrlimit", lambda _: (2**20, -1))
        with raises(InputError, field="ulimit -f", value="1,048,576 bytes", remedy="ulimit -f unlimited"):
            check_local_ray()
    usage = shutil.disk_usage(tmp_path)._replace(free=2**20)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with raises(InputError, field="TMPDIR", allowed="a folder with 64 MiB"):
        check_local_ray()


@pytest.mark.slow
@pytest.mark.thorough
def test_ray_starts_with_a_temporary_folder_whose_path_is_long(tmp_path: Path) -> None:
    folder = tmp_path / ("x" * 90)
    folder.mkdir()
    code = """
import ray
from rl_runtime.launch.local_ray import LocalRay
local = LocalRay(1)
local.start()
print(ray.get(ray.remote(lambda: 5).remote()))
local.close()
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "TMPDIR": str(folder)},
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert (done.returncode, done.stdout.split()) == (0, ["5"]), done.stderr
