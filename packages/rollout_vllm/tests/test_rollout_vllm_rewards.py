"""Reward functions in processes of their own."""

from __future__ import annotations

import asyncio
import math
import os
import time
from pathlib import Path

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
    import importlib
    import sys

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


@pytest.mark.parametrize("settings", [{"num_workers": 0}, {"timeout_s": 0.0}])
def test_settings_are_checked(settings: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(settings))):
        RewardPool(**settings)  # type: ignore[arg-type]
