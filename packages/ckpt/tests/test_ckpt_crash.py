"""A save killed at any instant leaves whole checkpoints, and the next save works."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckpt import CheckpointManager


class Killed(BaseException):
    """Simulates the death of the process."""


def _save(manager: CheckpointManager, step: int, **options: Any) -> None:
    folder = manager.prepare(step, **options)
    (folder / "rank0").mkdir()
    (folder / "rank0" / "weights.bin").write_bytes(bytes([step]) * 100)
    manager.publish(step, state={"step": step})


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


@pytest.mark.parametrize("after_call", [False, True])
@pytest.mark.parametrize("case", ["with_pruning", "after_a_killed_save", "overwrite"])
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


_RANKS_KILLER = """
import os, random, signal, sys, time
from pathlib import Path
from ckpt import AsyncSaver, Capture, CheckpointManager, SaverRanks, describe_files

root, num_kills = Path(sys.argv[1]), int(sys.argv[2])

class Part(Capture):
    num_bytes = 30_000
    def __init__(self, rank):
        self.rank, self.step = rank, 0
    def take(self):
        self.content = bytes([self.step % 256]) * self.num_bytes
    def write(self, folder, name):
        file = f"{name}.{self.rank}"
        (folder / file).write_bytes(self.content)
        return describe_files({file: folder / file})

def train(rank, run, pipe):
    manager = CheckpointManager(root, keep_last=3)
    part = Part(rank)
    part.step = max(manager.steps(), default=0)
    saver = AsyncSaver(manager, ranks=SaverRanks(num_ranks=2, rank=rank, run_id=f"run{run}"), timeout_s=300)
    while True:
        part.step += 1
        saver.save(part.step, {"part": part}, state={"step": part.step})
        published = saver.wait().step
        if rank == 0:
            os.write(pipe, b"%d\\n" % published)

dice = random.Random(3)
published, save_s, inside = 0, 0.05, 0
for kill in range(num_kills):
    reader, writer = os.pipe()
    children = []
    for rank in range(2):
        child = os.fork()
        if child == 0:
            try:
                train(rank, kill, writer)
            finally:
                os._exit(1)
        children.append(child)
    os.close(writer)
    said = b""
    if kill % 2:  # wait for a whole save and measure it
        started = time.perf_counter()
        said = os.read(reader, 4096)
        save_s = time.perf_counter() - started
    time.sleep(dice.uniform(0.0, 1.5 * save_s))
    dice.shuffle(children)
    for child in children:  # the other rank runs on for a moment
        os.kill(child, signal.SIGKILL)
        time.sleep(dice.uniform(0.0, 0.01))
    for child in children:
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, status
    while more := os.read(reader, 4096):
        said += more
    os.close(reader)
    published = max([published, *map(int, said.split())])
    inside += any(path.name.startswith(".partial") for path in root.iterdir())
    newest = CheckpointManager(root).newest_good()
    step = 0 if newest is None else newest.step
    assert step in (published, published + 1), (step, published)
    assert step == max(CheckpointManager(root).steps(), default=0), "and the newest is whole"
    published = step
    if newest is not None:
        assert newest.state == {"step": step}
        for rank in range(2):
            assert (newest.path / f"part.{rank}").read_bytes() == bytes([step % 256]) * 30_000
    if (root / "latest").exists():
        assert (root / (root / "latest").read_text().strip()).is_dir()
    assert len(list(root.glob(".async_*"))) <= 2, "files of dead runs are deleted"
print(step, inside)
"""


@pytest.mark.parametrize("num_kills", [6, pytest.param(100, marks=pytest.mark.thorough)])
def test_ranks_killed_while_they_save_in_the_background(tmp_path: Path, num_kills: int) -> None:
    """SIGKILL two ranks one after the other at random instants: checkpoints stay whole, and the next run resumes."""
    command = [sys.executable, "-c", _RANKS_KILLER, str(tmp_path), str(num_kills)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert result.returncode == 0, result.stderr
    newest, num_inside_a_save = map(int, result.stdout.split())
    if num_kills == 100:
        assert newest > 15
        assert num_inside_a_save > 20
