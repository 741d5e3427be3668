"""Reward functions in processes of their own."""

from __future__ import annotations

import asyncio
import importlib
import math
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rollout_vllm import RewardPool

# The workers import functions by name, so they come from the standard library or from this file's text as a module.
MODULE = """
import os, time
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
"""


@pytest.fixture(scope="module")
def functions(tmp_path_factory: pytest.TempPathFactory):  # type: ignore[no-untyped-def]
    folder = tmp_path_factory.mktemp("rewards")
    (folder / "plinth_test_reward_functions.py").write_text(MODULE)
    sys.path.insert(0, str(folder))
    yield importlib.import_module("plinth_test_reward_functions")
    sys.path.remove(str(folder))


@pytest.fixture(scope="module")
def pool(functions):  # type: ignore[no-untyped-def]
    with RewardPool(num_workers=2, timeout_s=1.0) as made:
        yield made


def test_scores(pool: RewardPool, functions) -> None:  # type: ignore[no-untyped-def]
    futures = [pool.submit(functions.length, "a" * i, 0.5) for i in range(50)]
    assert [f.result(60).score for f in futures] == [i * 0.5 for i in range(50)]


def test_each_trouble_is_its_samples_own(pool: RewardPool, functions) -> None:  # type: ignore[no-untyped-def]
    async def main() -> list[object]:
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
        ]
        outcomes = await asyncio.gather(*calls)
        assert time.monotonic() - begin < 60
        return list(outcomes)

    outcomes = asyncio.run(main())
    kinds = [o.kind for o in outcomes]  # type: ignore[attr-defined]
    assert kinds[:6] == ["exception", "ok", "timeout", "timeout", "ok", "crash"]
    assert kinds[6:] == ["exception", "exception", "exception", "exception", "ok"]
    assert [o.score for o in outcomes if o.kind == "ok"] == [3.0, 4.0, 5.0]  # type: ignore[attr-defined]
    assert all(o.score is None and o.message for o in outcomes if o.kind != "ok")  # type: ignore[attr-defined]
    assert outcomes[0].message == "ValueError: no answer"  # type: ignore[attr-defined]
    assert "exit code 3" in outcomes[5].message  # type: ignore[attr-defined]


def test_nothing_is_left_after_close(functions) -> None:  # type: ignore[no-untyped-def]
    with RewardPool(num_workers=2, timeout_s=5.0) as pool:
        pids = {pool.submit(functions.pid).result(60).score for _ in range(4)}
        waiting = [pool.submit(functions.hang, 0.2) for _ in range(20)]
    assert all(f.done() or f.cancelled() for f in waiting)
    assert os.getpid() not in pids
    for pid in pids:
        assert pid is not None
        assert not Path(f"/proc/{int(pid)}").exists()
    with pytest.raises(RuntimeError, match="closed"):
        pool.submit(math.sqrt, 4.0)


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
    """`module(name, text)`: that text as a module; the workers get to see a text that is written later."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(name: str, text: str) -> Any:
        (tmp_path / f"{name}.py").write_text(SLOW_MODULE.format(import_s=0))
        made = importlib.import_module(name)
        monkeypatch.delitem(sys.modules, name)
        monkeypatch.setitem(sys.modules, name, made)  # gone again after the test
        (tmp_path / f"{name}.py").write_text(text)
        return made

    return write


def test_the_import_of_the_users_module_is_not_the_calls_time(module: Callable[[str, str], Any]) -> None:
    functions = module("plinth_slow_import", SLOW_MODULE.format(import_s=1.5))
    with RewardPool(num_workers=1, timeout_s=0.75) as pool:
        first, hanging, second = (pool.submit(f, 1.0) for f in (functions.quick, functions.slow, functions.quick))
        assert first.result(60).kind == "ok"
        assert first.result().duration_s < 0.75
        assert hanging.result(60).kind == "timeout"
        assert second.result(60).kind == "ok", "a worker that was replaced imports the module again, outside the limit"


def test_an_import_that_takes_too_long_is_no_timeout_of_the_call(module: Callable[[str, str], Any]) -> None:
    functions = module("plinth_endless_import", SLOW_MODULE.format(import_s=60))
    with RewardPool(num_workers=1, timeout_s=30.0, start_timeout_s=2.0) as pool:
        begin = time.monotonic()
        waiting = [pool.submit(functions.quick, float(i)) for i in range(20)]
        other = pool.submit(math.sqrt, 4.0)
        outcomes = [future.result(60) for future in waiting]
        assert other.result(60).score == 2.0, "another function has nothing to do with it"
        assert time.monotonic() - begin < 20, "twenty calls waited once for the same import"
        assert {o.kind for o in outcomes} == {"start"}
        assert "not loaded within 2 s" in outcomes[0].message
        (Path(functions.__file__)).write_text(SLOW_MODULE.format(import_s=0))
        assert pool.submit(functions.quick, 3.0).result(60).score == 3.0, "later calls try again"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("raise RuntimeError('no licence')", "RuntimeError: no licence"),
        ("import nowhere_to_be_found", "ModuleNotFoundError"),
        ("x = 1", "AttributeError"),
        ("import os; os._exit(5)", "died before the call (exit code 5)"),
    ],
)
def test_a_module_that_does_not_import_says_why(module: Callable[[str, str], Any], text: str, message: str) -> None:
    functions = module("plinth_broken_import", text)
    with RewardPool(num_workers=1, timeout_s=20.0) as pool:
        outcome = pool.submit(functions.quick, 1.0).result(60)
        assert (outcome.kind, outcome.score) == ("start", None)
        assert message in outcome.message
        assert pool.submit(math.sqrt, 4.0).result(60).score == 2.0


@pytest.mark.parametrize("settings", [{"num_workers": 0}, {"timeout_s": 0.0}, {"start_timeout_s": 0.0}])
def test_settings_are_checked(settings: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(settings))):
        RewardPool(**settings)  # type: ignore[arg-type]
