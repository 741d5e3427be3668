"""Which Ray cluster `trainer.ray_address=auto` means, with pure lists and with two real Rays."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil
import pytest

from plinth_testing import raises, wait_until
from rl_runtime.errors import InputError
from rl_runtime.launch.auto_address import LocalRaylet, choose_cluster, find_auto_address, read_raylets

SHARED = LocalRaylet(address="10.0.0.1:6379", pid=7, user="ann")
PRIVATE = LocalRaylet(address="127.0.0.1:4000", pid=8, user="bob", driver="process 5 (plinth grpo)")


def test_a_private_ray_is_passed_over_whatever_the_order() -> None:
    assert choose_cluster([PRIVATE, SHARED]) == choose_cluster([SHARED, PRIVATE]) == SHARED
    assert choose_cluster([SHARED, replace(SHARED, pid=9)]).address == SHARED.address, "two nodes of one cluster"


def test_a_private_ray_alone_is_refused_with_its_owner() -> None:
    with raises(InputError, field="trainer.ray_address", value="auto") as none:
        choose_cluster([PRIVATE])
    assert PRIVATE.describe() in none.value.problem
    with raises(InputError, field="trainer.ray_address", problem="this host is no node of a Ray cluster"):
        choose_cluster([])


def test_two_clusters_are_refused_with_both_addresses() -> None:
    other = replace(SHARED, address="10.0.0.2:6379", user="eve")
    with raises(InputError, field="trainer.ray_address", value="auto") as several:
        choose_cluster([SHARED, PRIVATE, other])
    assert f"{SHARED.describe()}; {other.describe()}" in several.value.problem


def test_rays_own_variable_has_precedence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.3:6379")
    assert find_auto_address() == ("10.0.0.3:6379", "trainer.ray_address=auto: 10.0.0.3:6379, from RAY_ADDRESS")


PRIVATE_RUN = """
import sys
import ray
from rl_runtime.launch.local_ray import LocalRay
private = LocalRay(1)
private.start()
print(ray.get_runtime_context().gcs_address, flush=True)
sys.stdin.read()
private.close()
"""


@contextmanager
def private_ray() -> Iterator[tuple[int, str]]:
    """The Ray of another run: the process id of its driver, and its address."""
    environment = {**os.environ, "RAY_AUTH_TOKEN": "of the other run"}
    driver = subprocess.Popen(
        [sys.executable, "-c", PRIVATE_RUN],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert driver.stdout is not None
    try:
        yield driver.pid, driver.stdout.readline().strip()
    finally:
        driver.communicate(timeout=60)


@contextmanager
def started_cluster(environment: dict[str, str]) -> Iterator[Path]:
    """A cluster of `ray start` on this host; yields its folder, which its processes name."""
    with TemporaryDirectory(prefix="r", dir="/tmp", ignore_cleanup_errors=True) as folder:
        start = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--port=0", f"--temp-dir={folder}"]
        start += ["--include-dashboard=false", "--num-cpus=1", f"--object-store-memory={128 << 20}"]
        try:
            subprocess.run(start, env=environment, check=True, capture_output=True, timeout=120)
            yield Path(folder)
        finally:  # `ray stop` would end every Ray of this host
            for process in of_folder(folder):
                with suppress(psutil.Error):
                    process.kill()


def of_folder(folder: str | Path) -> list[psutil.Process]:
    processes = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if f"{folder}/" in " ".join(process.cmdline()):
                processes.append(process)
    return processes


JOIN = """
import sys
import psutil
mine = [psutil.Process(int(pid)) for pid in sys.argv[1:]]
import ray
from rl_runtime.errors import InputError
from rl_runtime.launch import auto_address
read = auto_address.read_raylets
auto_address.read_raylets = lambda _: read(mine)  # without those of other runs on this host
from rl_runtime.launch.cluster import join_cluster
try:
    join_cluster("auto")
    print("joined", ray.get_runtime_context().gcs_address)
except InputError as error:
    print("refused", error)
"""


def join(environment: dict[str, str], *raylets: LocalRaylet) -> str:
    """Output of a driver that sees these processes."""
    command = [sys.executable, "-c", JOIN, *(str(raylet.pid) for raylet in raylets)]
    ended = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=200, check=False
    )
    return ended.stdout


@pytest.mark.slow
@pytest.mark.thorough
def test_auto_joins_the_started_cluster_next_to_the_private_ray_of_a_run() -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment |= {"RAY_AUTH_TOKEN": "of the cluster", "RAY_AUTH_MODE": "token", "RAY_USAGE_STATS_ENABLED": "0"}
    with private_ray() as (driver, private_address), started_cluster(environment) as folder:
        private, started = psutil.Process(driver).children(recursive=True), of_folder(folder)
        [theirs], [ours] = list(read_raylets(private)), list(read_raylets(started))
        assert (theirs.address, ours.driver) == (private_address, "")
        assert theirs.driver.startswith(f"process {driver} ({sys.executable}")
        output = join(environment, theirs, ours)
        assert f"trainer.ray_address=auto: {ours.address} (started with ray start, user {ours.user}" in output, output
        assert f"joined {ours.address}" in output, output
        output = join(environment, theirs)
        assert "refused trainer.ray_address is auto, but this host is no node of a Ray cluster, only " in output
        assert f"{private_address} (the private Ray of process {driver} " in output


@pytest.mark.parametrize("is_private", [True, False])
def test_a_ray_is_private_if_its_parent_has_started_the_session(is_private: bool) -> None:
    """A process with the name and the options of Ray's."""
    creator = os.getpid() if is_private else 1
    options = ["--gcs-address=10.0.0.1:6379", f"--session-name=session_2026-11-24_04-03-51_733303_{creator}"]
    raylet = subprocess.Popen(["/opt/raylet", "-c", "sleep 600 && true", *options], executable="/bin/sh")
    other = subprocess.Popen(["sleep", "600"])
    try:
        # The kernel shows a program's arguments a moment after it has replaced the one before.
        wait_until(lambda: bool(psutil.Process(raylet.pid).cmdline()))
        [raylet_seen] = read_raylets([psutil.Process(raylet.pid), psutil.Process(other.pid)])
    finally:
        for process in (*psutil.Process(raylet.pid).children(), raylet, other):
            process.kill()
        raylet.wait()
        other.wait()
    assert (raylet_seen.address, raylet_seen.pid) == ("10.0.0.1:6379", raylet.pid)
    assert raylet_seen.driver.startswith(f"process {os.getpid()} (") if is_private else raylet_seen.driver == ""
    assert list(read_raylets([psutil.Process()])) == []
