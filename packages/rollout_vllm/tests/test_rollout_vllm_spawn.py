"""Processes that import vLLM before the settings of their servers are known."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from rollout_vllm_helpers import is_running

from plinth_testing import raises, wait_until
from rollout_vllm import Endpoint, RolloutConfig, ServerStartError
from rollout_vllm.servers._supervise import descendants
from rollout_vllm.servers.command import server_environment
from rollout_vllm.servers.process import ServerProcess
from rollout_vllm.servers.spawn import prepare_servers

SERVER = """
import os, sys, time
names = ("CUDA_VISIBLE_DEVICES", "SET_BY_A_LIBRARY")
print("server", os.getpid(), *sys.argv[1:], *map(os.environ.get, names), repr(sys.stdin.read()), flush=True)
time.sleep(600)
"""
CONFIG = RolloutConfig(fast_paths=False, stop_grace_s=1.0)


@pytest.fixture(autouse=True)
def vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package `vllm` whose server prints a line, in place of vLLM."""
    package = tmp_path / "site" / "vllm"
    for folder in (package, package / "utils", package / "entrypoints", package / "entrypoints" / "openai"):
        folder.mkdir(parents=True)
        (folder / "__init__.py").touch()
    (package / "utils" / "network_utils.py").write_text("def get_file_store_init_method(): ...")
    (package / "entrypoints" / "openai" / "api_server.py").write_text(SERVER)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path / "site"), *filter(None, sys.path)]))
    monkeypatch.setenv("VLLM_RPC_BASE_PATH", str(tmp_path))
    return package


def new_server(tmp_path: Path, **variables: str) -> ServerProcess:
    env = server_environment(os.environ, CONFIG, device="cuda", api_key="key", num_cores=2, gpu_ids=[3])
    return ServerProcess(
        0, Endpoint("http://127.0.0.1:9"), ["--port", "9"], env | variables, tmp_path / "log", stop_grace_s=1.0
    )


@contextmanager
def prepared(number: int = 1) -> Iterator[list[int]]:
    """`number` prepared processes; the ids of all processes."""
    before = set(descendants(os.getpid()))

    def started() -> list[int]:
        return [pid for pid in descendants(os.getpid()) if pid not in before]

    with prepare_servers(CONFIG, device="cuda", number=number):
        wait_until(lambda: len(started()) == 2 * number)  # each has a supervisor
        yield started()
    assert not any(is_running(pid) for pid in started())


def line_of(server: ServerProcess) -> list[str]:
    """The words of the line that the server printed."""
    wait_until(lambda: "\nserver " in server.log_text())
    return next(line.split() for line in server.log_text().splitlines() if line.startswith("server "))


def test_a_prepared_process_becomes_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with prepared(2) as pids:
        monkeypatch.setenv("SET_BY_A_LIBRARY", "here")
        server = new_server(tmp_path)
        server.start()
        _, pid, *rest = line_of(server)
        assert int(pid) in pids
        assert server.pid in pids
        assert rest == ["--port", "9", "3", "here", "''"]
        log = server.log_text()
        places = [log.index(text) for text in ("started at", "was imported in", "started ahead", "\nserver ")]
        assert places == sorted(places)
        server.stop()
        assert not is_running(int(pid))
        server.start()  # the second one
        assert int(line_of(server)[1]) in pids
        server.stop()
        server.start()  # a new one
        assert int(line_of(server)[1]) not in pids
        server.stop()
    assert not list(tmp_path.glob("plinth-vllm-*"))


def test_a_server_with_another_environment_takes_none(tmp_path: Path) -> None:
    with prepared() as pids:
        server = new_server(tmp_path, OMP_NUM_THREADS="7")
        server.start()
        assert int(line_of(server)[1]) not in pids
        server.stop()
        assert all(map(is_running, pids))
    assert not list(tmp_path.glob("plinth-vllm-*"))


@pytest.mark.parametrize("handed_over", [False, True])
def test_a_prepared_process_that_fails_costs_only_time(tmp_path: Path, vllm: Path, handed_over: bool) -> None:
    (vllm / "__init__.py").write_text("import pathlib, sys, time\nwhile not pathlib.Path(sys.path[0]) : pass\n")
    wait = f"import os, time\nwhile not os.path.exists({str(tmp_path / 'go')!r}): time.sleep(0.01)\n"
    (vllm / "__init__.py").write_text(wait + f"if os.path.exists({str(tmp_path / 'fail')!r}): raise SystemExit(3)")
    (tmp_path / "fail").touch()
    with prepared() as pids:
        server = new_server(tmp_path)
        if handed_over:
            server.start()
            assert server.pid in pids
        (tmp_path / "go").touch()
        wait_until(lambda: not any(map(is_running, pids)))
        (tmp_path / "fail").unlink()
        if not handed_over:
            server.start()
        with raises(ServerStartError, server_index=0):  # nobody listens
            server.wait_ready(time.monotonic() + 3)
        assert int(line_of(server)[1]) not in pids
        server.stop()


def test_prepared_processes_end_with_a_launcher_that_is_killed(tmp_path: Path) -> None:
    code = (
        "import time; from rollout_vllm import RolloutConfig; from rollout_vllm.servers.spawn import prepare_servers\n"
        "with prepare_servers(RolloutConfig(fast_paths=False), device='cuda', number=1): time.sleep(600)"
    )
    launcher = subprocess.Popen([sys.executable, "-c", code])
    try:
        wait_until(lambda: len(descendants(launcher.pid)) == 2)
        pids = descendants(launcher.pid)
    finally:
        launcher.send_signal(signal.SIGKILL)
        launcher.wait()
    wait_until(lambda: not any(map(is_running, pids)))
    wait_until(lambda: not list(tmp_path.glob("plinth-vllm-*")))
