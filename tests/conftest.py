"""Apps run as a user runs them."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil
import pytest

from plinth_testing.network_hosts import NetworkHost, is_available, network_hosts
from tests.run_folders import only

REPO = Path(__file__).resolve().parents[1]


class App:
    """An app started from its command line; an environment variable marks its processes, to find survivors."""

    def __init__(
        self, output_dir: Path, *overrides: str, app: str = "grpo", cluster: "RayCluster | None" = None
    ) -> None:
        """`cluster`: the app runs on the first host of it, with all of it.

        Figures of the run take matplotlib a sixth of the app's CPU time, and the report is run_kit's: a test that looks
        at them turns them on.
        """
        self.mark = f"PLINTH_TEST_MARK={uuid.uuid4().hex}"
        name, value = self.mark.split("=")
        self.output_dir = output_dir
        command = [sys.executable, "-m", f"apps.{app}.main", f"trainer.output_dir={output_dir}"]
        command += [*(("tracking.curves=false", "tracking.report=false") if app != "serve" else ()), *overrides]
        if cluster is not None:
            command = cluster.hosts[0].command(*command, f"trainer.ray_address={cluster.address}")
        self.process = subprocess.Popen(
            command,
            cwd=REPO,
            env={**os.environ, **(cluster.environment if cluster is not None else {}), name: value},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            # A shell starts what it puts in the background deaf to Ctrl-C, and children inherit that.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        self.output = ""

    def wait_for(self, text: str) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.output += line
            if text in line:
                return
        pytest.fail(f"the app ended before printing {text!r}:\n{self.output}")

    def read_in_background(self) -> threading.Thread:
        """Keeps reading the output, so that the app never waits for a reader."""

        def read() -> None:
            assert self.process.stdout is not None
            for line in self.process.stdout:
                self.output += line

        thread = threading.Thread(target=read, daemon=True)
        thread.start()
        return thread

    def press_ctrl_c(self) -> None:
        """SIGINT to the app and to whatever it started in its process group, as a terminal sends it."""
        os.killpg(self.process.pid, signal.SIGINT)

    def finish(self) -> int:
        rest, _ = self.process.communicate(timeout=400)
        self.output += rest
        return self.process.returncode

    def succeeded(self) -> Path:
        """The run's folder, the only one there, once the app has ended well and no process of it is left."""
        assert self.finish() == 0, self.output
        assert not self.survivors()
        return only(self.output_dir.iterdir())

    def kill(self) -> None:
        """Kills the app and whatever it started in its process group, which ends the others."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.finish()
        assert not self.survivors()

    def survivors(self, grace_s: float = 30) -> list[str]:
        """Processes of this run that are still alive after `grace_s`."""
        deadline = time.monotonic() + grace_s
        while alive := [command[:200] for _, command in self._ours()]:
            if time.monotonic() > deadline:
                return alive
            time.sleep(0.5)
        return []

    def _ours(self) -> Iterator[tuple[psutil.Process, str]]:
        """The living processes of this run, with their command lines."""
        for process in psutil.process_iter():
            with suppress(OSError, psutil.Error):  # it ends meanwhile
                environ = Path(f"/proc/{process.pid}/environ").read_bytes()
                if self.mark.encode() in environ and process.status() != psutil.STATUS_ZOMBIE:
                    yield process, " ".join(process.cmdline())

    def children(self, name: str) -> list[psutil.Process]:
        return [process for process, command in self._ours() if name in command]

    def listeners(self) -> dict[str, str]:
        """Address -> process, for every TCP port on which a process of this run accepts connections."""
        app = psutil.Process(self.process.pid)
        return {
            f"{connection.laddr.ip}:{connection.laddr.port}": f"{process.name()} {' '.join(process.cmdline())[-80:]}"
            for process in (app, *app.children(recursive=True))
            for connection in process.net_connections("tcp")
            if connection.status == psutil.CONN_LISTEN
        }

    def stop(self) -> None:
        """Ends an app that a failed test left running."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            self.finish()


class RayCluster:
    """A Ray cluster with each node on a host of its own: a network namespace with its own address."""

    def __init__(
        self, hosts: Sequence[NetworkHost], folder: Path, *, num_cpus: int, local_folder: Path | None = None
    ) -> None:
        """`local_folder`: all hosts but the first have an empty folder of their own there."""
        self.hosts, self.address = hosts, f"{hosts[0].address}:6379"
        token = {"RAY_AUTH_TOKEN": uuid.uuid4().hex, "RAY_AUTH_MODE": "token", "RAY_USAGE_STATS_ENABLED": "0"}
        self.environment = token
        for index, host in enumerate(hosts):
            role = (
                ["--head", "--port=6379", "--include-dashboard=false"] if index == 0 else [f"--address={self.address}"]
            )
            # Ray lowers the priority of its workers.
            role += ["--system-config", json.dumps({"worker_niceness": 0})] if index == 0 else []
            command = [sys.executable, "-m", "ray.scripts.scripts", "start", *role, f"--num-cpus={num_cpus}"]
            command += [f"--node-ip-address={host.address}", f"--temp-dir={folder / str(index)}"]
            command += [f"--object-store-memory={128 << 20}"]
            if local_folder is not None and index > 0:
                mount = 'mount -t tmpfs none "$1" && shift && exec "$@"'
                command = ["unshare", "--mount", "sh", "-c", mount, "sh", str(local_folder), *command]
            environment = {**os.environ, **token}
            subprocess.run(host.command(*command), env=environment, check=True, capture_output=True, timeout=120)

    def kill_host(self, index: int) -> None:
        """Kills everything on a host, as a loss of power does."""
        for pid in self.hosts[index].pids():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@pytest.fixture
def start_cluster() -> Iterator[Callable[..., RayCluster]]:
    """`start_cluster(num_hosts, num_cpus=4)`: Ray on hosts of its own, gone at the end of the test."""
    if not is_available():
        pytest.skip("network namespaces need root, and a kernel that allows them")
    with ExitStack() as stack:

        def start(num_hosts: int, *, num_cpus: int = 4, local_folder: Path | None = None) -> RayCluster:
            folder = Path(stack.enter_context(TemporaryDirectory(prefix="r", dir="/tmp", ignore_cleanup_errors=True)))
            hosts = stack.enter_context(network_hosts(num_hosts))
            return RayCluster(hosts, folder, num_cpus=num_cpus, local_folder=local_folder)

        yield start


@pytest.fixture
def start_app() -> Iterator[Callable[..., App]]:
    """`start_app(output_dir, *overrides, app="grpo", cluster=None)` starts an app in its own process."""
    yield from _start_apps()


@pytest.fixture(scope="module")
def start_shared_app() -> Iterator[Callable[..., App]]:
    """`start_app` for an app that the tests of a module share."""
    yield from _start_apps()


def _start_apps() -> Iterator[Callable[..., App]]:
    started: list[App] = []

    def start(output_dir: Path, *overrides: str, app: str = "grpo", cluster: RayCluster | None = None) -> App:
        started.append(App(output_dir, *overrides, app=app, cluster=cluster))
        return started[-1]

    yield start
    for app in started:
        app.stop()
