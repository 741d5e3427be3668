"""RewardPool: reward functions in worker processes."""

from __future__ import annotations

import asyncio
import importlib
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rollout_vllm_helpers import is_running

from plinth_testing import raises, wait_until
from rollout_vllm import AsyncRewardPool, RewardOutcome, RewardPool, RolloutConfigError
from rollout_vllm.episodes.processes import MAX_PRINTED_BYTES

# Workers import functions by name, so these functions are written to a module file.
MODULE = """
import asyncio, os, subprocess, time
def length(text, scale):
    return len(text) * scale
def fail(text):
    raise ValueError("no\\nanswer")
def hang(seconds):
    time.sleep(seconds)
    return 1.0
def spin():
    while True:
        pass
class Silent(Exception):
    def __str__(self):
        raise KeyError("no message")
def fail_silently():
    raise Silent
def number(value):
    return value
def die():
    os._exit(3)
def leave():
    raise SystemExit(1)
def nan():
    return float("nan")
def word():
    return "good"
def pid():
    return float(os.getpid())
def fork(then):
    if os.fork() == 0 and then == "leave":
        os._exit(0)
    return float(os.getpid())
def shout():
    for _ in range(40):
        print("x" * 100_000, flush=True)
    os.write(2, b"to stderr")
    return 1.0
def whisper():
    print("one line")
    return 1.0
def batch(texts, case):
    values = [float(len(text)) for text in texts]
    if case == "raise":
        raise ValueError("no")
    if case == "hang":
        time.sleep(1000)
    if case == "exit":
        os._exit(3)
    wrong = {"short": values[1:], "word": "abc", "none": None, "nan": [float("nan"), 2.0], "text": ["1", 2.0]}
    wrong |= {"dict": dict.fromkeys((1.0, 2.0), 0.5), "set": {1.0, 2.0}, "keys": {1.0: 0, 2.0: 0}.keys()}
    wrong |= {"huge": [1e39, 2.0], "tuple": (1.0, 2.0), "error": [KeyError("x"), 2.0]}
    return wrong.get(case, values)
async def wait(then, seconds=0.05):
    await asyncio.sleep(seconds)
    if then == "raise":
        raise ValueError("no\\nanswer")
    if then == "hang":
        await asyncio.sleep(1000)
    if then == "stubborn":
        while True:
            try:
                await asyncio.sleep(1000)
            except asyncio.CancelledError:
                pass
    if then == "block":
        time.sleep(1000)
    if then == "exit":
        os._exit(3)
    if then == "leave":
        raise SystemExit(0)
    if then == "fork":
        os.fork()
    if then == "shout":
        print("y" * 3_000_000)
    return {"nan": float("nan"), "word": "good", "nothing": None}.get(then, 1.0)
async def wait_batch(texts):
    await asyncio.sleep(0.05)
    return [float(len(text)) for text in texts]
def start_processes(then):
    # A child, and a daemon that has left the session and the process tree.
    child = subprocess.Popen(["sleep", "1000"]).pid
    daemon = subprocess.check_output("setsid sleep 1000 >/dev/null & echo $!", shell=True)
    with open(os.environ["STARTED"], "a") as file:
        print(child, int(daemon), file=file)
    if then == "hang":
        time.sleep(1000)
    if then == "exit":
        os._exit(3)
    return 1.0
"""


@pytest.fixture(scope="module")
def functions(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("rewards")
    (folder / "plinth_test_reward_functions.py").write_text(MODULE)
    sys.path.insert(0, str(folder))
    yield importlib.import_module("plinth_test_reward_functions")
    sys.path.remove(str(folder))


@pytest.fixture(scope="module")
def pool(functions: Any) -> Iterator[RewardPool]:
    with RewardPool(num_workers=2, timeout_s=1.0) as made:
        yield made


def test_scores(pool: RewardPool, functions: Any) -> None:
    futures = [pool.submit(functions.length, "a" * i, 0.5) for i in range(50)]
    assert [f.result(60).score for f in futures] == [i * 0.5 for i in range(50)]


def test_failures_affect_only_their_own_sample(pool: RewardPool, functions: Any) -> None:
    async def main() -> list[RewardOutcome]:
        begin = time.monotonic()
        calls = [
            pool.score(functions.fail, "x"),
            pool.score(functions.length, "abc", 1),
            pool.score(functions.hang, 60),
            pool.score(functions.spin),
            pool.score(functions.length, "abcd", 1),
            pool.score(functions.die),
            pool.score(functions.leave),
            pool.score(functions.nan),
            pool.score(functions.word),
            pool.score(lambda: 1.0),
            pool.score(functions.length, "abcde", 1),
            pool.score(functions.fail_silently),
            pool.score(functions.number, 1e308),
            pool.score(functions.number, -1e30),
        ]
        outcomes = await asyncio.gather(*calls)
        assert time.monotonic() - begin < 60
        return list(outcomes)

    outcomes = asyncio.run(main())
    kinds = [o.kind for o in outcomes]
    assert kinds[:6] == ["exception", "ok", "timeout", "timeout", "ok", "crash"]
    assert kinds[6:] == ["exception", "exception", "exception", "exception", "ok", "exception", "exception", "ok"]
    assert [o.score for o in outcomes if o.kind == "ok"] == [3.0, 4.0, 5.0, -1e30]
    assert all(o.score is None and o.message for o in outcomes if o.kind != "ok")
    assert outcomes[0].message == "ValueError: no answer"
    assert "exit code 3" in outcomes[5].message
    assert outcomes[8].message == "the reward is str 'good', not a number"
    assert outcomes[11].message == "Silent: its __str__ raised KeyError"
    assert outcomes[5].duration_s < 1.0 <= outcomes[2].duration_s, "a crash takes as long as it took, not the limit"


def test_a_function_that_forks_answers_once(pool: RewardPool, functions: Any) -> None:
    """The child returns from the function too."""
    outcomes = [pool.submit(functions.fork, then).result(60) for then in ("return", "leave", "return")]
    assert [o.kind for o in outcomes] == ["ok"] * 3
    assert [pool.submit(functions.length, "a" * i, 1).result(60).score for i in range(6)] == list(range(6))


BATCHES = {
    "fine": ("ok", "ok", ""),
    "nan": ("exception", "ok", "the reward is nan, not a finite number"),
    "text": ("exception", "ok", "the reward is str '1', not a number"),
    "raise": ("exception", "exception", "ValueError: no"),
    "short": ("exception", "exception", "has 1 values for 2 responses"),
    "word": ("exception", "exception", "is str 'abc', not a list of 2 numbers"),
    "none": ("exception", "exception", "is NoneType None, not a list of 2 numbers"),
    "dict": ("exception", "exception", "is dict {1.0: 0.5, 2.0: 0.5}, not a list of 2 numbers"),
    "set": ("exception", "exception", "is set {1.0, 2.0}, not a list of 2 numbers"),
    "keys": ("exception", "exception", "not a list of 2 numbers"),
    "huge": ("exception", "ok", "the reward is 1e+39; allowed: -1e+30 to 1e+30"),
    "tuple": ("ok", "ok", ""),
    "error": ("exception", "ok", "KeyError: 'x'"),
    "hang": ("timeout", "timeout", "no reward within 1 s"),
    "exit": ("crash", "crash", "exit code 3"),
}


def test_a_batched_call_gives_an_outcome_for_each_response(pool: RewardPool, functions: Any) -> None:
    futures = {case: pool.submit_batch(functions.batch, ["a", "bb"], case, num_scores=2) for case in BATCHES}
    for case, (first, second, message) in BATCHES.items():
        outcomes = futures[case].result(60)
        assert [o.kind for o in outcomes] == [first, second], case
        assert message in outcomes[0].message
        assert outcomes[1].score == (2.0 if second == "ok" else None)


@pytest.mark.parametrize("pool_type", [RewardPool, AsyncRewardPool])
def test_a_worker_that_cannot_be_started_is_an_outcome_and_is_tried_again(
    functions: Any, monkeypatch: pytest.MonkeyPatch, pool_type: type[RewardPool]
) -> None:
    """With few descriptors, at a pid limit or without memory; the thread of the pool goes on."""
    errors = [
        OSError(24, "Too many open files"),
        BlockingIOError(11, "fork"),
        MemoryError(),
        RuntimeError("no threads"),
    ]
    call = functions.wait if pool_type is AsyncRewardPool else functions.number

    def start(*_: Any) -> None:
        raise errors.pop(0)

    with pool_type(timeout_s=20.0) as pool, monkeypatch.context() as patch:
        patch.setattr("multiprocessing.process.BaseProcess.start", start)
        messages = [
            "OSError: [Errno 24] Too many open files",
            "BlockingIOError: [Errno 11] fork",
            "MemoryError: ",
            None,
        ]
        for message in messages[:3]:
            outcome = pool.submit(call, 1.0).result(20)
            assert (outcome.kind, outcome.score) == ("start", None)
            assert outcome.message == f"the worker process cannot be started: {message}"
        outcomes = pool.submit_batch(call, 1.0, num_scores=2).result(20)
        assert [outcome.kind for outcome in outcomes] == ["start", "start"]
        patch.undo()
        assert pool.submit(call, 1.0).result(60).score == 1.0


def test_a_pool_without_threads_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    start, started = threading.Thread.start, list[threading.Thread]()

    def second_fails(thread: threading.Thread) -> None:
        if started:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", second_fails)
    with pytest.raises(RuntimeError):
        RewardPool(num_workers=3)
    assert not started[0].is_alive()


def test_what_the_last_call_prints_is_kept(functions: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    with RewardPool(timeout_s=20.0, printed_dir=str(tmp_path)) as pool:
        assert pool.submit(functions.whisper).result(60).score == 1.0
    assert (tmp_path / "reward_0.log").read_text() == "one line\n"


def test_printed_output_is_bounded_and_not_in_the_terminal(
    functions: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with RewardPool(timeout_s=20.0, printed_dir=str(tmp_path)) as pool, RewardPool(timeout_s=20.0) as silent:
        assert [pool.submit(functions.shout).result(60).score for _ in range(3)] == [1.0] * 3
        assert silent.submit(functions.shout).result(60).score == 1.0
    with AsyncRewardPool(timeout_s=20.0, printed_dir=str(tmp_path)) as pool:
        assert pool.submit(functions.wait, "shout").result(60).score == 1.0
    for name in ("reward_0.log", "reward_async.log"):
        printed = (tmp_path / name).read_bytes()
        assert MAX_PRINTED_BYTES <= len(printed) < MAX_PRINTED_BYTES + 100
        assert printed.endswith(b"[later output is dropped]\n")
    assert capfd.readouterr() == ("", "")


ASYNC = {
    "fine": ("ok", ""),
    "raise": ("exception", "ValueError: no answer"),
    "hang": ("timeout", "no reward within 0.75 s"),
    "stubborn": ("timeout", "no reward within 0.75 s"),
    "leave": ("exception", "SystemExit: 0"),
    "fork": ("ok", ""),
    "nan": ("exception", "not a finite number"),
    "word": ("exception", "str 'good', not a number"),
    "nothing": ("exception", "NoneType None, not a number"),
    "block": ("timeout", "it blocks the event loop"),
    "exit": ("crash", "exit code 3"),
}


def test_failures_of_coroutine_functions_affect_only_their_own_sample(functions: Any) -> None:
    with AsyncRewardPool(timeout_s=0.75) as pool:
        calls = {case: pool.submit(functions.wait, case) for case in ASYNC}
        more = [pool.submit(functions.wait, "fine") for _ in range(20)]
        batch = pool.submit_batch(functions.wait_batch, ["a", "bb"], num_scores=2)
        for case, (kind, message) in ASYNC.items():
            outcome = calls[case].result(120)
            assert (outcome.kind, outcome.score) == (kind, 1.0 if kind == "ok" else None), (case, outcome)
            assert message in outcome.message
        assert [future.result(120).score for future in more] == [1.0] * 20
        assert [outcome.score for outcome in batch.result(120)] == [1.0, 2.0]


def test_coroutine_functions_run_at_the_same_time(functions: Any) -> None:
    with AsyncRewardPool(timeout_s=20.0, max_in_flight=50) as pool:
        assert pool.submit(functions.wait, "fine").result(60).score == 1.0
        begin = time.monotonic()
        calls = [pool.submit(functions.wait, "fine", seconds=0.5) for _ in range(100)]
        assert {call.result(60).score for call in calls} == {1.0}
        assert time.monotonic() - begin < 10, "one after the other they would take 50 seconds"


def test_a_coroutine_function_that_cannot_be_loaded_is_reported_once(module: Callable[[str, str], Any]) -> None:
    functions = module("plinth_broken_async", "raise RuntimeError('no license')")
    with AsyncRewardPool(timeout_s=5.0, start_timeout_s=20.0) as pool:
        outcomes = [pool.submit(functions.quick, 1.0) for _ in range(3)]
        assert {future.result(60).kind for future in outcomes} == {"start"}
        assert "RuntimeError: no license" in outcomes[0].result().message


def test_close_ends_the_workers(functions: Any) -> None:
    with RewardPool(num_workers=2, timeout_s=5.0) as pool:
        pids = {pool.submit(functions.pid).result(60).score for _ in range(4)}
        waiting = [pool.submit(functions.hang, 0.2) for _ in range(20)]
    assert all(f.done() or f.cancelled() for f in waiting)
    assert os.getpid() not in pids
    for pid in pids:
        assert pid is not None
        assert not Path(f"/proc/{int(pid)}").exists()
    with pytest.raises(RuntimeError):
        pool.submit(math.sqrt, 4.0)


KILLED_LAUNCHER = """
import os, signal, sys
from plinth_test_reward_functions import start_processes
from rollout_vllm import RewardPool

if __name__ == "__main__":
    pool = RewardPool(timeout_s=60)
    assert pool.submit(start_processes, "return").result(60).score == 1
    os.kill(os.getpid(), signal.SIGKILL)
"""


def launched(program: str, functions: Any, folder: Path) -> int:
    """Exit status of a program that imports the functions, in a session of its own."""
    (folder / "launcher.py").write_text(program)
    path = os.pathsep.join(map(str, [Path(functions.__file__).parent, *sys.path]))
    command = [sys.executable, str(folder / "launcher.py")]
    environment = {**os.environ, "PYTHONPATH": path}
    return subprocess.run(command, env=environment, timeout=60, check=False, start_new_session=True).returncode


def test_processes_that_a_function_started_end_with_its_worker(
    functions: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a normal end, a timeout, a crash of the worker, and when the launcher is killed."""
    monkeypatch.setenv("STARTED", str(tmp_path / "started"))
    with RewardPool(num_workers=1, timeout_s=1.0) as pool:
        kinds = [pool.submit(functions.start_processes, then).result(60).kind for then in ("exit", "hang", "return")]
    assert kinds == ["crash", "timeout", "ok"]
    assert launched(KILLED_LAUNCHER, functions, tmp_path) == -signal.SIGKILL
    started = (tmp_path / "started").read_text().split()
    assert len(started) == 8
    wait_until(lambda: not any(map(is_running, started)), 10)


SIGNALED_GROUP = """
import os, signal, time
from plinth_test_reward_functions import pid
from rollout_vllm import RewardPool

if __name__ == "__main__":
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
    for number in signals:
        signal.signal(number, lambda *_: None)
    with RewardPool(num_workers=1, timeout_s=60) as pool:
        before = pool.submit(pid).result(60).score
        for number in signals:
            os.killpg(0, number)
        time.sleep(0.5)  # a worker that such a signal ends is gone by then
        assert pool.submit(pid).result(60).score == before, "the same worker"
"""


def test_a_signal_to_the_process_group_of_the_run_ends_no_worker(functions: Any, tmp_path: Path) -> None:
    """A run that SIGTERM (timeout, scancel) or Ctrl-C stops still scores the samples of its last step."""
    assert launched(SIGNALED_GROUP, functions, tmp_path) == 0


SLOW_MODULE = """
import os, time
time.sleep({import_s})
def quick(value):
    return value
def slow(value):
    time.sleep(30)
    return value
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], Any]:
    """`module(name, text)` returns an importable module; workers import `text` instead."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(name: str, text: str) -> Any:
        (tmp_path / f"{name}.py").write_text(SLOW_MODULE.format(import_s=0))
        made = importlib.import_module(name)
        monkeypatch.delitem(sys.modules, name)
        monkeypatch.setitem(sys.modules, name, made)  # removed after the test
        (tmp_path / f"{name}.py").write_text(text)
        return made

    return write


def test_module_import_does_not_count_towards_the_call(module: Callable[[str, str], Any]) -> None:
    functions = module("plinth_slow_import", SLOW_MODULE.format(import_s=1.5))
    with RewardPool(num_workers=1, timeout_s=0.75) as pool:
        first, hanging, second = (pool.submit(f, 1.0) for f in (functions.quick, functions.slow, functions.quick))
        assert first.result(60).kind == "ok"
        assert first.result().duration_s < 0.75
        assert hanging.result(60).kind == "timeout"
        assert second.result(60).kind == "ok", "a replacement worker imports the module again, which must not count"


def test_slow_module_import_fails_all_queued_calls_once(module: Callable[[str, str], Any]) -> None:
    functions = module("plinth_endless_import", SLOW_MODULE.format(import_s=60))
    with RewardPool(num_workers=1, timeout_s=30.0, start_timeout_s=2.0) as pool:
        begin = time.monotonic()
        waiting = [pool.submit(functions.quick, float(i)) for i in range(20)]
        other = pool.submit(math.sqrt, 4.0)
        outcomes = [future.result(60) for future in waiting]
        assert other.result(60).score == 2.0, "other functions are not affected"
        assert time.monotonic() - begin < 20, "the twenty calls must wait only once for the import"
        assert {o.kind for o in outcomes} == {"start"}
        assert "not loaded within 2 s" in outcomes[0].message
        (Path(functions.__file__)).write_text(SLOW_MODULE.format(import_s=0))
        assert pool.submit(functions.quick, 3.0).result(60).score == 3.0, "later calls must try again"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("raise RuntimeError('no license')", "RuntimeError: no license"),
        ("import nowhere_to_be_found", "ModuleNotFoundError"),
        ("x = 1", "AttributeError"),
        ("import os; os._exit(5)", "died before the call (exit code 5)"),
    ],
)
def test_module_that_cannot_be_imported_is_reported(module: Callable[[str, str], Any], text: str, message: str) -> None:
    functions = module("plinth_broken_import", text)
    with RewardPool(num_workers=1, timeout_s=20.0) as pool:
        outcome = pool.submit(functions.quick, 1.0).result(60)
        assert (outcome.kind, outcome.score) == ("start", None)
        assert message in outcome.message
        assert pool.submit(math.sqrt, 4.0).result(60).score == 2.0


@pytest.mark.parametrize(
    ("kind", "field"),
    [*((RewardPool, f) for f in ("num_workers", "timeout_s", "start_timeout_s")), (AsyncRewardPool, "max_in_flight")],
)
def test_arguments_are_validated(kind: Any, field: str) -> None:
    with raises(RolloutConfigError, field=field, value=0):
        kind(**{field: 0})
