"""Hostile programs in the sandbox of code rewards: limits hold, nothing is left running, nothing escapes."""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from plinth_testing import raises, wait_until
from rl_data import DataConfigError, make_reward
from rl_data.rewards import sandbox
from rl_data.rewards.sandbox import Limits, isolation, run_program

# No program here forks in a loop without a bound: should a limit not hold, the machine must survive the test.


@dataclass(frozen=True)
class Fields:
    ground_truth: str = ""
    extra: Mapping[str, Any] = field(default_factory=dict)


def out(program: str, stdin: str = "", **limits: Any) -> str:
    finished = run_program(program, stdin, Limits(**limits))
    assert (finished.exit_code, finished.reason) == (0, ""), finished
    return finished.stdout.decode()


def processes_with(mark: str) -> list[int]:
    """The processes whose command line or environment contains `mark`."""
    pids = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            text = (folder / "cmdline").read_bytes() + (folder / "environ").read_bytes()
            state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if mark.encode() in text and state != "Z":
            pids.append(int(folder.name))
    return pids


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Temporary folders lie in one of this test; their path is in the environment of each program."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    yield
    assert processes_with(str(tmp_path)) == []
    assert list(tmp_path.glob("plinth-sandbox-*")) == []


@pytest.fixture(scope="module")
def closed() -> dict[str, bool]:
    return isolation()


def test_a_program_gets_its_input_and_little_else() -> None:
    assert out("print(input()[::-1]); print(input())", "abc\n\u00e9\n") == "cba\n\u00e9\n"
    program = "import os, sys; print(sorted(os.listdir('.')), sorted(os.environ), sys.flags.isolated)"
    listing, _, rest = out(program).partition("] ")
    assert listing == "['program', 'stdin'"
    assert "HOME" in rest
    assert not [
        name
        for name in os.environ
        if f"'{name}'" in rest and name not in ("HOME", "LANG", "PATH", "TMPDIR") and "NUM_THREADS" not in name
    ]


def test_a_program_that_never_ends_is_ended() -> None:
    begin = time.monotonic()
    for program in (
        "while True: pass",
        "import time; time.sleep(1000)",
        "import os; os.close(1); os.close(2)\nwhile True: pass",
        "import signal\nfor s in range(1, 65):\n  try: signal.signal(s, signal.SIG_IGN)\n  except Exception: pass\n"
        "while True: pass",
    ):
        assert run_program(program, limits=Limits(timeout_s=0.7)).reason == "timeout"
    assert time.monotonic() - begin < 20


def test_memory_and_output_and_files_are_limited() -> None:
    try_memory = "try: x = 'x' * (2 << 30)\nexcept MemoryError: print('no memory')"
    assert out(try_memory) == "no memory\n"
    flood = run_program("while True: print('x' * 10000)", limits=Limits(output_bytes=100_000))
    assert (flood.reason, len(flood.stdout)) == ("output", 100_000)
    fill = "try:\n  f = open('big', 'wb')\n  for _ in range(40): f.write(b'x' * (1 << 20)); f.flush()\n" + (
        "except OSError as error: print('disk full')"
    )
    assert out(fill, disk_bytes=8 << 20) == "disk full\n"


def test_new_processes_are_refused_and_threads_are_not() -> None:
    fork = "import os\nfor _ in range(3):\n  try: os.fork()\n  except PermissionError: print('refused')\n"
    assert out(fork) == "refused\n" * 3
    for call in (
        "os.posix_spawn('/bin/true', ['true'], {})",
        "subprocess.run(['true'])",
        "assert os.system('true') == 0",
    ):
        finished = run_program(f"import os, subprocess\n{call}")
        assert finished.exit_code not in (0, None), call
    threads = "import threading\nt = threading.Thread(target=print, args=('thread',)); t.start(); t.join()"
    assert out(threads) == "thread\n"


CLOSED = "os.close(0); os.close(1); os.close(2)"
ORPHANS = """
import os, time
for _ in range(3):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            {orphan}
            time.sleep(1000)
        os._exit(0)
print("main", flush=True)
{then}
"""


@pytest.mark.parametrize(
    ("orphan", "then", "reason", "namespaces"),
    [
        ("pass", "", "", True),
        ("pass", "time.sleep(1000)", "timeout", False),
        ("pass", "os._exit(3)", "", False),
        (CLOSED, "", "", False),
        (CLOSED, "time.sleep(1000)", "timeout", True),
        (CLOSED, "os._exit(3)", "", True),
    ],
)
def test_daemons_end_with_the_program(
    orphan: str, then: str, reason: str, namespaces: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Six processes that have left the session and the process tree; also where the kernel denies namespaces."""
    if not namespaces:
        deny_namespaces(monkeypatch, tmp_path)
    finished = run_program(ORPHANS.format(orphan=orphan, then=then), limits=Limits(timeout_s=2, num_processes=4096))
    assert (finished.stdout, finished.reason) == (b"main\n", reason)
    # The fixture looks for processes that are left.


def deny_namespaces(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    text = (sandbox._NAMESPACES / "namespaces.py").read_text()
    assert text.count('_call("unshare"') == 1
    denying = text.replace('_call("unshare"', 'raise OSError("denied")\n        _call("unshare"')
    (folder / "namespaces.py").write_text(denying)
    monkeypatch.setattr(sandbox, "_NAMESPACES", folder)


def test_without_namespaces_the_log_says_what_is_open(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    deny_namespaces(monkeypatch, tmp_path)
    assert isolation() == {"network": False, "files": False, "processes": False}
    assert make_reward("code").prepare().startswith("code reward: warning: ")
    assert "network, files outside their folder, processes" in make_reward("code").prepare()
    with raises(DataConfigError, field="isolation"):
        make_reward("code", {"isolation": "required"}).prepare()
    assert out("print(1)") == "1\n"


def test_the_network_is_closed(closed: dict[str, bool], tmp_path: Path) -> None:
    if not closed["network"]:
        pytest.skip("the kernel denies network namespaces")
    program = "import socket\nfor host in ('127.0.0.1', '203.0.113.1'):\n  s = socket.socket()\n  s.settimeout(1)\n"
    program += "  try: s.connect((host, {port})); print('connected')\n  except OSError as error: print('closed')\n"
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        assert out(program.format(port=server.getsockname()[1])) == "closed\nclosed\n"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "unix"))
        server.listen()
        program = f"import socket\ntry: socket.socket(socket.AF_UNIX).connect({str(tmp_path / 'unix')!r})\n"
        assert out(f"{program}except OSError: print('closed')") == "closed\n"


def test_files_outside_cannot_be_written(closed: dict[str, bool], tmp_path: Path) -> None:
    if not closed["files"]:
        pytest.skip("the kernel denies mounts")
    victim = tmp_path / "victim"
    victim.write_text("precious")
    victim.chmod(0o666)
    tries = [f"open({str(victim)!r}, 'w')", f"os.remove({str(victim)!r})", f"os.chmod({str(victim)!r}, 0)"]
    tries += ["open('/tmp/plinth-evil', 'w')", f"os.mkdir({str(tmp_path / 'evil')!r})"]
    program = "import os\n" + "".join(f"try: {one}; print('done')\nexcept OSError: print('no')\n" for one in tries)
    assert out(program) == "no\n" * len(tries)
    assert out("open('mine', 'w').write('x'); print(open('mine').read())") == "x\n"
    assert victim.read_text() == "precious"


def test_processes_outside_cannot_be_signaled(closed: dict[str, bool]) -> None:
    if not closed["processes"]:
        pytest.skip("the kernel denies PID namespaces")
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        program = f"import os\nfor pid in (1, os.getppid(), {bystander.pid}):\n  try: os.kill(pid, 9)\n"
        program += "  except OSError: pass\nprint('alive')"
        assert out(program) == "alive\n"
        assert bystander.poll() is None
        secret = f"try: open('/proc/{bystander.pid}/environ').read(); print('read')\nexcept OSError: print('no')"
        assert out(secret) == "no\n"
    finally:
        bystander.kill()
        bystander.wait()


def test_a_killed_caller_leaves_no_program(tmp_path: Path) -> None:
    code = f"""
import tempfile, threading, time, os, signal
tempfile.tempdir = {str(tmp_path)!r}
from rl_data.rewards.sandbox import Limits, run_program
threading.Timer(1.5, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
run_program("import time; time.sleep(1000)", limits=Limits(timeout_s=60))
"""
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == -9
    wait_until(lambda: not processes_with(str(tmp_path)), 10)
    for folder in tmp_path.glob("plinth-sandbox-*"):
        os.rmdir(folder)  # empty: what the program wrote was in memory


FENCED = "Here it is:\n```python\n{}\n```\n"


@pytest.mark.parametrize(
    ("program", "truth", "expected"),
    [
        ("def f(x): return x + 1", ["assert f(1) == 2", "assert f(1) == 3"], 0.5),
        ("def f(x): return x + 1", "assert f(1) == 2\nassert f(2) == 3", 1.0),
        ("print(int(input()) * 2)", {"inputs": ["1", "2"], "outputs": ["2\n\n", "4  "]}, 1.0),
        ("print(int(input()) * 2)", [{"input": "1", "output": "2"}, {"input": "x", "output": ""}], 0.5),
        ("import sys; sys.exit(0)", ["assert False"], 0.0),
        ("import os; os._exit(0)", ["assert False"], 0.0),
        ("raise SystemExit", ["assert False"], 0.0),
        ("def f(:", ["assert True"], 0.0),
        ("print('x' * 10 ** 8)", ["assert True"], 0.0),
        ("import numpy\ndef f(): return numpy.ones(3).sum()", ["assert f() == 3"], 1.0),
        ("if __name__ == '__main__': input()", ["assert True"], 1.0),
        ("print('\ud800')", [{"input": "\ud800", "output": "\ud800"}], 0.0),
        ("\0", ["assert True"], 0.0),
    ],
)
def test_the_score_is_the_share_of_tests_passed(program: str, truth: Any, expected: float) -> None:
    text = truth if isinstance(truth, str) else json.dumps(truth)
    assert make_reward("code")(FENCED.format(program), Fields(text)) == expected
    assert make_reward("code", {"column": "tests"})(FENCED.format(program), Fields("", {"tests": truth})) == expected


def test_tests_share_the_time_limit() -> None:
    begin = time.monotonic()
    reward = make_reward("code", {"timeout_s": 1.5, "test_timeout_s": 1.0})
    assert reward(FENCED.format("while True: pass"), Fields(json.dumps(["assert 1"] * 50))) == 0
    assert time.monotonic() - begin < 10
    assert reward.max_duration_s == 1.5
    assert reward("no block", Fields("assert 1")) == 0
