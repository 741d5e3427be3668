"""Apps run as a user runs them."""

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

REPO = Path(__file__).resolve().parents[1]


class App:
    """An app started from its command line; an environment variable marks its processes, to find survivors."""

    def __init__(self, output_dir: Path, *overrides: str, app: str = "grpo") -> None:
        self.mark = f"PLINTH_TEST_MARK={uuid.uuid4().hex}"
        name, value = self.mark.split("=")
        self.output_dir = output_dir
        self.process = subprocess.Popen(
            [sys.executable, "-m", f"apps.{app}.main", f"trainer.output_dir={output_dir}", *overrides],
            cwd=REPO,
            env={**os.environ, name: value},
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

    def press_ctrl_c(self) -> None:
        """SIGINT to the app and to whatever it started in its process group, as a terminal sends it."""
        os.killpg(self.process.pid, signal.SIGINT)

    def finish(self) -> int:
        rest, _ = self.process.communicate(timeout=400)
        self.output += rest
        return self.process.returncode

    def survivors(self, grace_s: float = 30) -> list[str]:
        """Processes of this run that are still alive after `grace_s`."""
        deadline = time.monotonic() + grace_s
        while found := [" ".join(p.cmdline())[:200] for p in psutil.process_iter() if self._is_ours(p)]:
            if time.monotonic() > deadline:
                return found
            time.sleep(0.5)
        return []

    def _is_ours(self, process: psutil.Process) -> bool:
        try:
            environ = Path(f"/proc/{process.pid}/environ").read_bytes()
            return self.mark.encode() in environ and process.status() != psutil.STATUS_ZOMBIE
        except (OSError, psutil.Error):
            return False

    def children(self, name: str) -> list[psutil.Process]:
        return [p for p in psutil.process_iter() if self._is_ours(p) and name in " ".join(p.cmdline())]

    def listeners(self) -> dict[str, str]:
        """Address -> process, for every TCP port on which a process of this run accepts connections."""
        app = psutil.Process(self.process.pid)
        return {
            f"{found.laddr.ip}:{found.laddr.port}": f"{process.name()} {' '.join(process.cmdline())[-80:]}"
            for process in (app, *app.children(recursive=True))
            for found in process.net_connections("tcp")
            if found.status == psutil.CONN_LISTEN
        }

    def stop(self) -> None:
        """Ends an app that a failed test left running."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            self.finish()


@pytest.fixture
def start_app() -> Iterator[Callable[..., App]]:
    """`start_app(output_dir, *overrides, app="grpo")` starts an app in its own process."""
    started: list[App] = []

    def start(output_dir: Path, *overrides: str, app: str = "grpo") -> App:
        started.append(App(output_dir, *overrides, app=app))
        return started[-1]

    yield start
    for app in started:
        app.stop()
