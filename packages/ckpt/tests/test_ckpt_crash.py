"""A save killed at any instant leaves whole checkpoints, and the next save works."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ckpt_fakes import publish

from ckpt import CheckpointManager


class Killed(BaseException):
    """Simulates the death of the process."""


def _save(manager: CheckpointManager, step: int, **options: Any) -> None:
    publish(manager, step, {"rank0/weights.bin": bytes([step]) * 100}, **options)


def _check_root(root: Path, *, at_least: int | None) -> None:
    """All visible checkpoints verify, `latest` names one of them, and no published checkpoint is lost."""
    manager = CheckpointManager(root)
    for step in manager.steps():
        checkpoint = manager.load(step)
        assert checkpoint.state == {"step": step}
        assert (checkpoint.path / "rank0" / "weights.bin").read_bytes() == bytes([step]) * 100
    pointer = root / "latest"
    if pointer.exists():
        assert (root / pointer.read_text().strip()).is_dir()
    if at_least is not None:
        newest = manager.newest_good()
        assert newest is not None
        assert newest.step >= at_least


# The system calls by which a save changes the disk. A kill between two of them is a kill at one of these.
_CALLS = [(os, "fsync"), (os, "replace"), (os, "rename"), (os, "mkdir"), (os, "rmdir"), (os, "unlink")]


def _kill_at(monkeypatch: pytest.MonkeyPatch, instant: int, after_call: bool) -> None:
    """Raise Killed before or after the given call, counted over all of _CALLS; later calls have no effect."""
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


@pytest.mark.parametrize(
    ("case", "after_call"),
    # A kill after a call differs from one before the next in what is written between them alone.
    [("with_pruning", False), ("with_pruning", True), ("after_a_killed_save", False), ("overwrite", True)],
)
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
        # Overwriting deletes the old checkpoint first; the one before it is safe.
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
