"""A run's servers that wait for the next run: who may have them, and how a command reaches their process."""

from __future__ import annotations

import dataclasses
import os
import pickle
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from plinth_testing import raises, wait_until
from rl_runtime import JobConfig, TrainerConfig
from rl_runtime.app import kept
from rl_runtime.config import BUILTIN_MODEL
from rl_runtime.errors import InputError
from rl_runtime.launch import ahead
from rl_runtime.launch import session as sessions
from rl_runtime.launch.ahead import SessionKeys
from rl_runtime.launch.placement import Placement, Slot
from rl_runtime.launch.session import Session
from rollout_vllm import RolloutConfig
from run_kit import ConfigError, load_config


def command(**changes: Any) -> kept.Command:
    now = kept.Command.current("apps.grpo.main", ["trainer.keep_servers=60"])
    return dataclasses.replace(now, **changes)


def test_a_command_needs_the_app_the_folder_the_python_and_the_environment_of_the_kept_one() -> None:
    own = {"HOME": "/h", "OMP_NUM_THREADS": "2", "TERM": "xterm"}
    mine = command(environment=own)
    assert not mine.why_not(command(environment=own | {"TERM": "dumb", "SSH_TTY": "/dev/pts/1"}, arguments=("a=1",)))
    for changes in ({"app": "apps.ppo.main"}, {"folder": "/other"}, {"python": "/usr/bin/python"}):
        assert mine.why_not(command(environment=own, **changes))
    assert "OMP_NUM_THREADS" in mine.why_not(command(environment=own | {"OMP_NUM_THREADS": "4"}))
    assert "HOME" in mine.why_not(command(environment={"OMP_NUM_THREADS": "2"}))


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ([f"model.path={BUILTIN_MODEL}"], "model.path"),
        (["trainer.ray_address=auto"], "trainer.ray_address"),
        (["trainer.take_turns=servers"], "trainer.take_turns"),
        (["trainer.profile_steps=[2]"], "trainer.profile_steps"),
        (["rollout.urls=[http://127.0.0.1:8000]", "rollout.api_key=k"], "rollout.urls"),
        (["rollout.port=8000"], "rollout.port"),
        (["actor.lora.rank=8"], "actor.lora"),
    ],
)
def test_what_cannot_be_kept_is_refused(arguments: list[str], field: str) -> None:
    own = ["model.path=m", "data.train=[d]", *arguments]
    load_config(JobConfig, overrides=own)
    with pytest.raises(ConfigError) as refused:
        load_config(JobConfig, overrides=[*own, "trainer.keep_servers=5"])
    assert refused.value.field == field
    with raises(InputError, field="keep_servers", value=-1):
        TrainerConfig(keep_servers=-1)


@pytest.fixture
def own_tmp(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_others_cannot_reach_the_socket(own_tmp: Path) -> None:
    path = kept.socket_path({})
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert kept.socket_path({"CUDA_VISIBLE_DEVICES": "1"}) != path  # runs on other GPUs have others
    path.parent.chmod(0o755)
    with pytest.raises(PermissionError):
        kept.socket_path({})


def test_a_command_runs_by_itself_without_a_kept_process(own_tmp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert kept.run_in_kept(command(), 0) is None
    assert not capsys.readouterr().out
    assert kept.run_in_kept(command(), 5) is None
    assert "no servers are kept" in capsys.readouterr().out


APP = """
import os, sys, time
from pathlib import Path
from rl_runtime.app import kept
from rl_runtime.config import BUILTIN_MODEL
def cli(arguments):
    kept.end_rehearsal()
    assert kept.Command.current("x", []).environment["TERM"] == os.environ["TERM"] == "now"
    print("runs", *arguments, flush=True)
    Path(arguments[0]).touch()
    while arguments[1:] == ("waits",):
        time.sleep(0.02)
    sys.exit(7)
"""
STANDBY = """
import sys
from rl_runtime.app import kept
from rl_runtime.config import BUILTIN_MODEL
kept._prepare = lambda left, stack: setattr(kept, "_stage", "runs") or []
kept._why_not = lambda left, request, *_: left.command.why_not(kept._command_of(request))
kept.main()
"""
FRONT = """
import sys
from rl_runtime.app import kept
from rl_runtime.config import BUILTIN_MODEL
print(kept.run_in_kept(kept.Command.current("kept_app", sys.argv[1:]), 5))
"""


@contextmanager
def standby(folder: Path, minutes: float = 1.0) -> Iterator[tuple[subprocess.Popen[bytes], dict[str, str]]]:
    """The process of a standby, whose run is a function of this test, and the environment of its commands."""
    (folder / "kept_app.py").write_text(APP)
    env = os.environ | {"TMPDIR": str(folder), "PYTHONPATH": f"{folder}:{os.environ.get('PYTHONPATH', '')}"}
    process = subprocess.Popen([sys.executable, "-c", STANDBY], stdin=subprocess.PIPE, env=env)
    assert process.stdin is not None
    own = command(app="kept_app", environment=env)
    with process.stdin as stdin:
        nothing: Any = dict.fromkeys(("servers", "keys", "devices", "built"), ())
        pickle.dump(kept.Left(**nothing, command=own, minutes=minutes, origin="r"), stdin)
    try:
        yield process, env | {"TERM": "now"}
    finally:
        process.kill()
        process.wait()


def front(env: dict[str, str], *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", FRONT, *arguments], env=env, stdout=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_a_kept_process_runs_the_next_command_on_its_streams_and_ends(tmp_path: Path) -> None:
    with standby(tmp_path) as (process, env):
        wait_until(lambda: list(tmp_path.glob("plinth-*/kept-*")))
        output, _ = front(env, str(tmp_path / "began")).communicate(timeout=60)
        assert output.splitlines()[1:] == [f"runs {tmp_path / 'began'}", "7"]
        assert process.wait(10) == 0
        assert not list(tmp_path.glob("plinth-*/kept-*"))
        assert front(env, "again").communicate(timeout=60)[0].splitlines()[-1] == "None"


@pytest.mark.slow
@pytest.mark.parametrize("ended_by", [signal.SIGTERM, signal.SIGKILL])
def test_a_run_in_a_kept_process_ends_with_its_command(tmp_path: Path, ended_by: signal.Signals) -> None:
    with standby(tmp_path) as (process, env):
        wait_until(lambda: list(tmp_path.glob("plinth-*/kept-*")))
        started = front(env, str(tmp_path / "began"), "waits")
        wait_until((tmp_path / "began").exists)
        started.send_signal(ended_by)
        output, _ = started.communicate(timeout=20)
        assert process.wait(10) is not None
        if ended_by == signal.SIGTERM:
            assert output.splitlines()[-1] == str(128 + signal.SIGTERM)


@pytest.mark.slow
def test_a_kept_process_ends_for_a_command_that_it_cannot_run_and_when_its_time_is_over(tmp_path: Path) -> None:
    with standby(tmp_path) as (process, env):
        wait_until(lambda: list(tmp_path.glob("plinth-*/kept-*")))
        output, _ = front(env | {"OMP_NUM_THREADS": "77"}, "a").communicate(timeout=60)
        assert "OMP_NUM_THREADS" in output
        assert output.splitlines()[-1] == "None"
        assert process.wait(10) == 0
    with standby(tmp_path, minutes=0.01) as (process, _):
        assert process.wait(20) == 0
        assert not list(tmp_path.glob("plinth-*/kept-*"))


class Servers:
    stopped = False

    def stop(self) -> None:
        self.stopped = True


def keys_of(folder: Path, **rollout: Any) -> SessionKeys:
    placement = Placement(ranks=(Slot(),), servers=(Slot(),))
    return SessionKeys.of(placement, TrainerConfig(), RolloutConfig(**rollout), str(folder))


def test_servers_and_sessions_serve_runs_with_the_same_keys_and_model_alone(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    keys = keys_of(tmp_path)
    assert keys == keys_of(tmp_path)
    other = keys_of(tmp_path, max_model_len=64)
    assert keys.differing(other) == ["rollout.max_model_len"]
    servers: Any = Servers()
    ahead.keep_servers(keys, servers)
    same: Any = ahead.take_servers(keys)
    assert same is servers
    assert not servers.stopped
    ahead.keep_servers(keys, servers)
    assert ahead.take_servers(other) is None
    assert servers.stopped

    events: list[str] = []

    @contextmanager
    def begin(logs: Path) -> Iterator[Any]:
        events.append(f"began in {logs.parent}")
        yield "session"
        events.append("ended")

    ahead.begin_ahead(keys, begin, tmp_path)  # nothing would end it
    assert not events
    with ahead.sessions_ahead():
        ahead.begin_ahead(keys, begin, tmp_path)
        ahead.begin_ahead(keys, begin, tmp_path)  # it has begun
        taken, differing = ahead.take_ahead(keys)
        assert taken is not None
        assert not differing
        with taken as session:
            assert str(session) == "session"
            assert events == [f"began in {tmp_path}"]
        assert events.pop() == "ended"
        ahead.begin_ahead(keys, begin, tmp_path / "new" / "folder")
        assert ahead.take_ahead(other) == (None, ["rollout.max_model_len"])
        assert events.pop() == "ended"
        ahead.begin_ahead(keys, begin, tmp_path)
    assert events[-1] == "ended"
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]
    (tmp_path / "config.json").write_text('{"vocab_size": 7}')
    assert keys.differing(keys_of(tmp_path)) == ["model_files"]


def test_logs_of_servers_that_started_ahead_get_to_the_run_folder(tmp_path: Path) -> None:
    logs, run = tmp_path / "starting", tmp_path / "run" / "servers"
    logs.mkdir()
    (logs / "server_0.log").write_text("command\n")
    server = SimpleNamespace(log_path=logs / "server_0.log")
    servers: Any = SimpleNamespace(servers=(server,), wait_ready=lambda: None)
    nothing: Any = None
    placement = Placement(ranks=(Slot(),), servers=(Slot(),))
    session = Session(placement, TrainerConfig(), RolloutConfig(), devices=nothing, servers=servers)
    session.logs_ahead = logs
    session.link_logs(run)
    assert server.log_path == run / "server_0.log"
    assert logs.exists()  # a server that still imports opens its log by this name
    with (logs / "server_0.log").open("a") as log:
        session.wait_ready()
        assert not logs.exists()
        log.write("ready\n")
    assert server.log_path.read_text() == "command\nready\n"


@pytest.mark.parametrize(
    ("address", "order"),
    [
        (None, ["servers are told", "ranks", "Ray", "servers"]),
        ("10.0.0.1:6379", ["servers are told", "ranks", "servers", "Ray"]),  # they are actors of the cluster
    ],
)
def test_servers_end_while_ranks_and_ray_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, address: str | None, order: list[str]
) -> None:
    ended: list[str] = []

    @contextmanager
    def ray(*_: object) -> Iterator[Any]:
        yield SimpleNamespace(reservation=None)
        ended.append("Ray")

    @contextmanager
    def servers(*_: object) -> Iterator[Any]:
        yield SimpleNamespace(servers=(), ask_to_stop=lambda: ended.append("servers are told"))
        ended.append("servers")

    monkeypatch.setattr(sessions, "_ray", ray)
    monkeypatch.setattr(sessions, "_servers", servers)
    monkeypatch.setattr(Session, "begin_ranks", lambda self: self._stack.callback(ended.append, "ranks"))
    (tmp_path / "config.json").write_text("{}")
    keys = dataclasses.replace(keys_of(tmp_path), trainer=TrainerConfig(ray_address=address))
    with sessions.begin_session(keys, log_dir=tmp_path):
        assert not ended
    assert ended == order
