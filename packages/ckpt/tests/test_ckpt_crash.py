"""Killed at any instant: what is published is whole, and the next save works."""

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckpt import CheckpointManager


class Killed(BaseException):
    """Stands for the instant the process dies: nothing after it runs but this test."""


def _save(manager: CheckpointManager, step: int, **options: Any) -> None:
    folder = manager.prepare(step, **options)
    (folder / "rank0").mkdir()
    (folder / "rank0" / "weights.bin").write_bytes(bytes([step]) * 100)
    manager.publish(step, state={"step": step})


def _check_root(root: Path, *, at_least: int | None) -> None:
    """Every checkpoint in sight verifies, `latest` names one of them, and nothing that was published is lost."""
    manager = CheckpointManager(root)
    for step in manager.steps():
        checkpoint = manager.load(step)
        assert checkpoint.state == {"step": step}
        assert (checkpoint.path / "rank0" / "weights.bin").read_bytes() == bytes([step]) * 100
    pointer = root / "latest"
    if pointer.exists():
        assert (root / pointer.read_text().strip()).is_dir()
    if at_least is not None:
        newest = manager.latest()
        assert newest is not None
        assert newest.step >= at_least


# The system calls by which a save changes the disk. A kill between two of them is a kill at one of these.
_CALLS = [(os, "fsync"), (os, "replace"), (os, "rename"), (os, "mkdir"), (os, "rmdir"), (os, "unlink")]


def _kill_at(monkeypatch: pytest.MonkeyPatch, instant: int, after_call: bool) -> None:
    """Die before or after the given call, counted over all of _CALLS; from then on no call has any effect."""
    state = {"count": 0, "dead": False}

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            if state["dead"]:
                raise Killed
            state["count"] += 1
            if state["count"] < instant:
                return original(*arguments, **options)
            state["dead"] = True
            if after_call:
                original(*arguments, **options)
            raise Killed

        return call

    for module, name in _CALLS:
        monkeypatch.setattr(module, name, wrap(getattr(module, name)))


@pytest.mark.parametrize("after_call", [False, True])
@pytest.mark.parametrize("case", ["next", "with_pruning", "after_a_killed_save", "overwrite"])
def test_killed_at_every_call(tmp_path: Path, case: str, after_call: bool) -> None:
    keep_last = 1 if case == "with_pruning" else None
    overwrite = case == "overwrite"
    step = 2 if overwrite else 3
    for instant in range(1, 200):
        root = tmp_path / str(instant)
        for before in (1, 2):
            _save(CheckpointManager(root), before)
        if case == "after_a_killed_save":
            (CheckpointManager(root).prepare(3) / "half").write_bytes(b"x")
        with pytest.MonkeyPatch.context() as monkeypatch:
            _kill_at(monkeypatch, instant, after_call)
            try:
                _save(CheckpointManager(root, keep_last=keep_last), step, overwrite=overwrite)
                died = False
            except Killed:
                died = True
        # Overwriting takes the old one away first; the save before it is what is safe.
        _check_root(root, at_least=1 if overwrite else 2)
        _save(CheckpointManager(root, keep_last=keep_last), 4)
        _check_root(root, at_least=4)
        hidden = [path.name for path in root.iterdir() if path.name.startswith(".") and path.is_dir()]
        assert hidden == [], "the next save cleans up"
        shutil.rmtree(root)
        if not died:
            assert instant > 10
            return
    pytest.fail("the save never finished")


_SAVER = """
import sys
from pathlib import Path
from ckpt import CheckpointManager
manager = CheckpointManager(Path(sys.argv[1]), keep_last=3)
newest = manager.latest()
step = 0 if newest is None else manager.load(newest.step).step
print("ready", flush=True)
while True:
    step += 1
    folder = manager.prepare(step)
    for rank in range(3):
        (folder / f"rank{rank}.bin").write_bytes(bytes([step % 256]) * 300_000)
    manager.publish(step, state={"step": step})
    print(step, flush=True)
"""


def test_killed_for_real(tmp_path: Path) -> None:
    """SIGKILL a saving process at random instants; each next process goes on from what the last one published."""
    random_ = random.Random(7)
    reported = 0
    for _ in range(12):
        command = [sys.executable, "-c", _SAVER, str(tmp_path)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            for _ in range(random_.randrange(3)):
                reported = int(process.stdout.readline())
            time.sleep(random_.uniform(0.0, 0.03))
            process.send_signal(signal.SIGKILL)
            reported = max([reported, *map(int, process.stdout.read().split())])
        manager = CheckpointManager(tmp_path)
        for step in manager.steps():
            manager.load(step)
        newest = manager.latest()
        assert (newest.step if newest else 0) >= reported, "what publish reported is there"
        if (tmp_path / "latest").exists():
            assert (tmp_path / (tmp_path / "latest").read_text().strip()).is_dir()
    assert reported > 3
