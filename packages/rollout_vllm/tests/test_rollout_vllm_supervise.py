"""The supervisor with plain processes: no process survives, whatever ends it."""

from __future__ import annotations

import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from rollout_vllm_helpers import is_running

import rollout_vllm
from plinth_testing import raises, wait_until
from rollout_vllm import Endpoint, ServerGroup, ServerStartError
from rollout_vllm.servers import process, spawn
from rollout_vllm.servers.process import ServerProcess

SUPERVISE = str(Path(rollout_vllm.__file__).with_name("servers") / "_supervise.py")

# A command with a child, a child in its own session, and an orphan whose parent has exited.
TREE = """
import os, signal, subprocess, sys, time
from pathlib import Path
folder = Path(sys.argv[1])
if "stubborn" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
sleep = "import time, signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
pids = [os.getpid()]
pids.append(subprocess.Popen([sys.executable, "-c", sleep]).pid)
pids.append(subprocess.Popen([sys.executable, "-c", sleep], start_new_session=True).pid)
middle = f"import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', {sleep!r}], start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).pid)"
pids.append(int(subprocess.run([sys.executable, "-c", middle], capture_output=True, check=True).stdout))
(folder / "tmp").write_text(" ".join(map(str, pids)))
(folder / "tmp").rename(folder / "pids")
if "exit" in sys.argv:
    sys.exit(7)
time.sleep(600)
"""  # noqa: E501


def with_sockets(folder: Path) -> dict[str, str]:
    """The environment of a supervisor that removes FOLDER/sockets at the end."""
    (folder / "sockets").mkdir()
    with socket.socket(socket.AF_UNIX) as left_behind:
        left_behind.bind(str(folder / "sockets" / "left"))
    return os.environ | {"PLINTH_SERVER_SOCKETS": str(folder / "sockets")}


def start(folder: Path, *flags: str) -> tuple[subprocess.Popen[bytes], list[int]]:
    command = [sys.executable, SUPERVISE, str(os.getpid()), "0.3", sys.executable, "-c", TREE, str(folder), *flags]
    supervisor = subprocess.Popen(command, start_new_session=True, env=with_sockets(folder))
    wait_until((folder / "pids").exists)
    return supervisor, [int(p) for p in (folder / "pids").read_text().split()]


@pytest.mark.parametrize(
    ("flag", "end", "code"),
    [
        ("", lambda supervisor, _: supervisor.terminate(), 128 + signal.SIGTERM),
        ("stubborn", lambda supervisor, _: supervisor.terminate(), 128 + signal.SIGKILL),
        ("exit", lambda *_: None, 7),
        ("", lambda _, pids: os.kill(pids[0], signal.SIGKILL), 128 + signal.SIGKILL),
    ],
    ids=["SIGTERM", "SIGTERM, ignored", "exit of the command", "killed command"],
)
def test_every_end_of_the_command_ends_the_tree(tmp_path: Path, flag: str, end: Callable[..., None], code: int) -> None:
    supervisor, pids = start(tmp_path, flag)
    end(supervisor, pids)
    assert supervisor.wait(20) == code
    assert not any(is_running(p) for p in pids)
    assert not (tmp_path / "sockets").exists()


def test_killed_launcher_ends_the_tree(tmp_path: Path) -> None:
    launcher_code = (
        "import os, subprocess, sys, time;"
        "subprocess.Popen([sys.executable, sys.argv[1], str(os.getpid()), '0.3', sys.executable, '-c', *sys.argv[2:]],"
        " start_new_session=True); time.sleep(600)"
    )
    command = [sys.executable, "-c", launcher_code, SUPERVISE, TREE, str(tmp_path)]
    launcher = subprocess.Popen(command, env=with_sockets(tmp_path))
    try:
        wait_until((tmp_path / "pids").exists)
        pids = [int(p) for p in (tmp_path / "pids").read_text().split()]
    finally:
        launcher.kill()
        launcher.wait()
    wait_until(lambda: not any(is_running(p) for p in pids))
    wait_until(lambda: not (tmp_path / "sockets").exists())


def test_launcher_that_has_already_exited_is_detected(tmp_path: Path) -> None:
    command = [sys.executable, SUPERVISE, "1", "0.3", sys.executable, "-c", "import time; time.sleep(600)"]
    begin = time.monotonic()
    assert subprocess.run(command, timeout=20).returncode != 0
    assert time.monotonic() - begin < 10


def test_killed_supervisor_ends_the_command(tmp_path: Path) -> None:
    supervisor, pids = start(tmp_path)
    supervisor.kill()
    supervisor.wait()
    wait_until(lambda: not is_running(pids[0]))
    os.killpg(supervisor.pid, signal.SIGKILL)  # as ServerProcess.stop does
    wait_until(lambda: not is_running(pids[1]))
    for pid in pids[2:]:  # in their own sessions, outside the process group
        os.kill(pid, signal.SIGKILL)


# The entry script as vLLM uses it: an engine core that is forked or spawned, and forks a worker.
SERVE = """
import importlib.util, multiprocessing, os, sys, time
from pathlib import Path

def worker(folder):
    (folder / "worker").write_text(str(os.getpid()))
    time.sleep(600)

def engine(folder):
    child = multiprocessing.get_context("fork").Process(target=worker, args=(folder,))
    child.start()
    (folder / "engine").write_text(str(os.getpid()))
    time.sleep(600)

name = __name__ if __name__ == "__mp_main__" else "serve"
spec = importlib.util.spec_from_file_location(name, sys.argv[1])
serve = importlib.util.module_from_spec(spec)
spec.loader.exec_module(serve)
if __name__ == "__main__":
    serve.end_forks_with_parent()
    child = multiprocessing.get_context(sys.argv[3]).Process(target=engine, args=(Path(sys.argv[2]),))
    child.start()
    time.sleep(600)
"""


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_killed_front_end_ends_the_engine_core_and_its_worker(tmp_path: Path, method: str) -> None:
    """Without a supervisor, which may have been killed too."""
    script, names = tmp_path / "server.py", ("engine", "worker")
    script.write_text(SERVE)
    serve = str(Path(SUPERVISE).with_name("_serve.py"))
    stub = tmp_path / "vllm" / "utils"  # the spawned process looks for a function of vLLM, which takes long to import
    stub.mkdir(parents=True)
    for package in (stub.parent, stub):
        (package / "__init__.py").touch()
    (stub / "network_utils.py").write_text("def get_file_store_init_method(): ...")
    path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    env = os.environ | {"PLINTH_ROLLOUT_FAST_PATHS": "0", "PYTHONPATH": path}
    command = [sys.executable, str(script), serve, str(tmp_path), method]
    front_end = subprocess.Popen(command, env=env, start_new_session=True)
    try:
        wait_until(lambda: all((tmp_path / name).exists() and (tmp_path / name).read_text() for name in names))
        pids = [int((tmp_path / name).read_text()) for name in names]
        assert all(map(is_running, pids))
    finally:
        front_end.kill()
        front_end.wait()
    wait_until(lambda: not any(map(is_running, pids)), 20)


def test_each_server_has_a_folder_of_sockets_that_goes_with_it(tmp_path: Path) -> None:
    env = os.environ | {"VLLM_RPC_BASE_PATH": str(tmp_path)}
    endpoint = Endpoint("http://127.0.0.1:9")
    server = ServerProcess(0, endpoint, ["--help"], env, tmp_path / "server.log")
    for _ in range(2):
        server.start()
        (folder,) = tmp_path.glob("plinth-vllm-*")
        assert f"VLLM_RPC_BASE_PATH={folder}\n" in (tmp_path / "server.log").read_text()
        assert folder.stat().st_mode & 0o777 == 0o700
        assert server.pid is not None
        os.kill(server.pid, signal.SIGKILL)  # the supervisor, which would have removed it
        server.stop()
        assert not folder.exists()
    long = "/".join([str(tmp_path), "x" * 80])
    os.makedirs(long)
    tempfile.tempdir = long
    try:
        folder = Path(spawn.socket_folder(None))
    finally:
        tempfile.tempdir = None
    assert len(str(folder)) <= 70
    folder.rmdir()


# A server of two GPUs (vLLM 0.26) in one process: its engine core fails, a worker hangs and reports the cause when it
# is ended, and the front end waits for it.
FAILED_ENGINE_CORE = r"""
import os, signal, sys, time

def end(*_):
    print("(Worker_TP0 pid=8087) torch.AcceleratorError: CUDA error: an illegal memory access was encountered")

signal.signal(signal.SIGTERM, end)
worker = "(Worker_TP1 pid=8088) ERROR 11-25 12:36:21 [multiproc_executor.py:1007]"
core = "(EngineCore pid=7844) ERROR 11-25 12:36:21 [core.py:1330]"
cause = "CUDA error: CUBLAS_STATUS_INTERNAL_ERROR when calling `cublasCreate(handle)`"
print(worker, "WorkerProc hit an exception.")
print(worker, "RuntimeError:", cause)
print(core, "EngineCore failed to start.")
print(core, "Traceback (most recent call last):")
print(core, f"RuntimeError: Worker failed with error '{cause}', please check the stack trace above for the root cause")
open(sys.argv[1], "w").write(str(os.getpid()))
while True:
    time.sleep(1)
"""


def test_a_server_that_hangs_after_its_engine_core_failed_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "_serve.py").write_text(FAILED_ENGINE_CORE)
    (tmp_path / "_supervise.py").symlink_to(SUPERVISE)
    monkeypatch.setattr(spawn, "HERE", tmp_path)
    monkeypatch.setattr(process, "_EXIT_GRACE_S", 2.0)
    endpoint, pid, env = Endpoint("http://127.0.0.1:9"), tmp_path / "pid", os.environ | {"PYTHONUNBUFFERED": "1"}
    server = ServerProcess(0, endpoint, [str(pid)], env, tmp_path / "server.log", stop_grace_s=0.5)
    group = ServerGroup([endpoint], [server], startup_timeout_s=30)
    server.start()
    begin = time.monotonic()
    cause = "illegal memory access on a GPU: RuntimeError: CUDA error: CUBLAS_STATUS_INTERNAL_ERROR"
    with raises(ServerStartError, server_index=0) as caught:
        group.wait_ready()
    assert caught.value.reason.startswith(cause)
    assert 2 <= time.monotonic() - begin < 30
    assert not is_running(int(pid.read_text()))


LEAVES_ITS_SERVER = """
import os, pickle, sys, time
from pathlib import Path
from rollout_vllm import Endpoint, ServerGroup
from rollout_vllm.servers import spawn
from rollout_vllm.servers.process import ServerProcess
folder = spawn.HERE = Path(sys.argv[1])
endpoint, env = Endpoint("http://127.0.0.1:9", "key"), dict(os.environ)
server = ServerProcess(0, endpoint, [str(folder)], env, folder / "log", stop_grace_s=0.3)
server.start()
while not (folder / "pid").exists():
    time.sleep(0.02)
group = ServerGroup([endpoint], [server], 30)
group.leave_to(int(sys.argv[2]))
(folder / "server").write_bytes(pickle.dumps(server))
group.stop()
"""
SERVES = """
import os, sys, time
from pathlib import Path
folder = Path(sys.argv[1])
(folder / "new").write_text(str(os.getpid()))
(folder / "new").rename(folder / "pid")
time.sleep(600)
"""


@pytest.mark.parametrize("is_mine", [True, False])
def test_a_server_that_is_left_to_another_process_ends_with_that_one(tmp_path: Path, is_mine: bool) -> None:
    (tmp_path / "_serve.py").write_text(SERVES)
    (tmp_path / "_supervise.py").symlink_to(SUPERVISE)
    other = subprocess.Popen(["sleep", "600"])
    try:
        owner = os.getpid() if is_mine else other.pid
        env = os.environ | {"VLLM_RPC_BASE_PATH": str(tmp_path)}
        subprocess.run([sys.executable, "-c", LEAVES_ITS_SERVER, str(tmp_path), str(owner)], check=True, env=env)
        pid = int((tmp_path / "pid").read_text())
        time.sleep(0.6)  # more than two looks of the supervisor
        assert is_running(pid)
        server = pickle.loads((tmp_path / "server").read_bytes())
        assert server.alive
        assert server.endpoint.api_key == "key"
        assert not any("key" in file.read_text() for file in tmp_path.rglob("owner"))
        if is_mine:
            server.stop()
            assert not is_running(pid)
            assert server.reason() == "it was stopped"
    finally:
        other.kill()
        other.wait()
    wait_until(lambda: not is_running(pid) and not server.alive)
    wait_until(lambda: not list(tmp_path.glob("plinth-vllm-*")))
