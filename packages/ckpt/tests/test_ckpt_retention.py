"""Retention, full disks, and the writer's lock."""

import json
import math
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt import CheckpointLockedError, CheckpointManager, CheckpointSpaceError, CheckpointUsageError, Retention
from ckpt.lock import LOCK_NAME
from ckpt.retention import steps_to_delete
from plinth_testing import raises

PROPERTY = settings(deadline=None, derandomize=True, max_examples=200)

counts = st.none() | st.integers(1, 5)
tables = st.dictionaries(st.integers(0, 40), st.none() | st.sampled_from([0.0, 0.5, 1.0, math.nan]), max_size=15)


@PROPERTY
@given(tables, counts, counts, counts, st.sampled_from(["max", "min"]), st.none() | st.integers(0, 40))
def test_a_step_is_kept_exactly_when_a_rule_keeps_it(
    table: dict[int, float | None],
    keep_last: int | None,
    keep_every: int | None,
    keep_best: int | None,
    mode: str,
    keep: int | None,
) -> None:
    metric = None if keep_best is None else "score"
    rule = Retention(keep_last=keep_last, keep_every=keep_every, keep_best=keep_best, metric=metric, mode=mode)  # type: ignore[arg-type]
    metrics = {step: {} if value is None else {"score": value} for step, value in table.items()}
    deleted = steps_to_delete(table, metrics.__getitem__, rule, keep=keep)
    assert deleted == sorted(set(deleted) & set(table))
    valued = [(value, step) for step, value in table.items() if value is not None and not math.isnan(value)]
    for step, value in table.items():
        num_newer = sum(other > step for other in table)
        if mode == "max":
            num_better = sum((other, at) > (value, step) for other, at in valued) if (value, step) in valued else 99
        else:
            num_better = sum((-other, at) > (-value, step) for other, at in valued) if (value, step) in valued else 99
        kept = (
            (keep_last is None and keep_every is None and keep_best is None)
            or num_newer < (keep_last or 1)
            or (keep_every is not None and step % keep_every == 0)
            or (keep_best is not None and num_better < keep_best)
            or step == keep
        )
        assert (step not in deleted) == kept


@pytest.mark.parametrize(
    ("options", "field", "value"),
    [
        ({"keep_every": 0}, "keep_every", 0),
        ({"keep_best": 1}, "metric", None),
        ({"metric": "score"}, "metric", "score"),
        ({"keep_best": 1, "metric": "score", "mode": "best"}, "mode", "best"),
    ],
)
def test_rules_out_of_range(options: dict[str, object], field: str, value: object) -> None:
    with raises(CheckpointUsageError, field=field, value=value):
        Retention(**options)  # type: ignore[arg-type]


def test_the_manager_keeps_what_the_rules_say(tmp_path: Path) -> None:
    rule = Retention(keep_last=2, keep_every=4, keep_best=1, metric="score")
    manager = CheckpointManager(tmp_path, retention=rule)
    scores = {1: 0.1, 2: 0.9, 3: 0.2, 4: 0.3, 5: 0.4, 6: math.nan, 7: 0.5}
    for step, score in scores.items():
        (manager.prepare(step) / "weights").write_bytes(b"x")
        manager.publish(step, state={}, metrics={"score": score})
    assert manager.steps() == [2, 4, 6, 7]
    assert manager.manifest(2).metrics == {"score": 0.9}
    manager.load(2)
    manager.load(6)
    # Without its manifest, step 2 no longer counts as best.
    (tmp_path / "step_00000002" / "manifest.json").unlink()
    assert manager.prune() == [2]
    with raises(CheckpointUsageError, field="keep_last", value=1):
        CheckpointManager(tmp_path, keep_last=1, retention=rule)


def test_room_is_checked_before_anything_is_written(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path)
    (tmp_path / ".partial_step_00000001").mkdir()
    free = shutil.disk_usage(tmp_path).free
    with pytest.raises(CheckpointSpaceError):
        manager.prepare(1, expected_bytes=free)
    assert [path.name for path in tmp_path.iterdir()] == [".lock"], "leftovers make room first"


def test_the_newest_checkpoint_is_the_estimate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manager = CheckpointManager(tmp_path)
    (manager.prepare(1) / "weights").write_bytes(bytes(100_000))
    manager.publish(1, state={})
    num_bytes = manager.manifest(1).num_bytes
    needed = num_bytes + num_bytes // 20 + 2**20
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=needed - 1))
    with pytest.raises(CheckpointSpaceError):
        manager.prepare(2)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=needed))
    assert manager.prepare(2).is_dir()


_FULL_DISK = """
import pathlib, resource, subprocess, sys
from ckpt import CheckpointManager, CheckpointSpaceError
root = pathlib.Path(sys.argv[1])
if sys.argv[2] == "tmpfs":
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=600k", "tmpfs", str(root)], check=True)
manager = CheckpointManager(root)
(manager.prepare(1, expected_bytes=None) / "weights").write_bytes(bytes(100_000))
manager.publish(1, state={})
folder = manager.prepare(2, expected_bytes=None if sys.argv[2] == "limit" else -(1 << 20))
(folder / "weights").write_bytes(bytes(100_000))
state = {"big": "x" * 500_000}
if sys.argv[2] == "limit":
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))
try:
    manager.publish(2, state=state)
except CheckpointSpaceError as error:
    assert "whole" in str(error) and "bytes are free" in str(error) and str(root) in str(error), error
else:
    raise SystemExit("published on a full disk")
assert manager.load(1).step == 1
assert sorted(path.name for path in root.iterdir()) == [".lock", "latest", "step_00000001"], list(root.iterdir())
(manager.prepare(3, expected_bytes=0 if sys.argv[2] == "limit" else -(1 << 20)) / "weights").write_bytes(b"small")
manager.publish(3, state={})
assert manager.newest_good().step == 3
"""


@pytest.mark.parametrize("kind", ["limit", "tmpfs"])
def test_a_full_disk_leaves_the_earlier_checkpoints(tmp_path: Path, kind: str) -> None:
    run_on_a_full_disk(_FULL_DISK, tmp_path, kind)


def run_on_a_full_disk(program: str, root: Path, kind: str) -> None:
    command = [sys.executable, "-c", program, str(root), kind]
    if kind == "tmpfs":
        command = ["unshare", "-Urm", *command]
        if shutil.which("unshare") is None or subprocess.run(["unshare", "-Urm", "true"], check=False).returncode:
            pytest.skip("this system does not let a test mount a small disk")
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr


_FULL_DISK_IN_THE_BACKGROUND = """
import pathlib, resource, sys, torch
from ckpt import AsyncSaver, CheckpointManager, CheckpointSpaceError, DeepSpeedState, save_state_dict
root = pathlib.Path(sys.argv[1])

class Engine:  # the part of DeepSpeed's engine that DeepSpeedState uses
    checkpoint_engine = None
    weights = torch.ones(10_000)
    def zero_nvme_offload_optimizer(self):
        return False
    def save_checkpoint(self, folder, tag):
        self.checkpoint_engine.makedirs(f"{folder}/{tag}")
        self.checkpoint_engine.save({"module": {"w": self.weights}}, f"{folder}/{tag}/mp_rank_00_model_states.pt")

manager = CheckpointManager(root)
# The room is checked before; here it vanishes afterwards.
manager._check_space = lambda expected_bytes: None
engine = Engine()
actor = DeepSpeedState(engine, lambda folder: engine.save_checkpoint(folder, "actor"))
saver = AsyncSaver(manager)
saver.save(1, {"actor": actor, "model": {"w": torch.ones(10_000)}})
saver.wait()
resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))
engine.weights = many = torch.ones(200_000)
for step, states in ((2, {"actor": actor}), (3, {"model": {"w": many}})):
    saver.save(step, states)
    try:
        saver.wait()
    except CheckpointSpaceError:
        pass
    else:
        raise SystemExit(f"published on a full disk: {states}")
    assert sorted(path.name for path in root.iterdir()) == [".lock", "latest", "step_00000001"], list(root.iterdir())
try:
    save_state_dict(root / "alone.safetensors", {"w": many})
except CheckpointSpaceError as error:
    assert "alone.safetensors" in str(error), error
assert not (root / "alone.safetensors").exists()
saver.save(4, {"model": {"w": torch.ones(10_000)}})
saver.close()
assert manager.newest_good().step == 4
"""


def test_a_disk_that_fills_up_in_the_background_fails_that_save_alone(tmp_path: Path) -> None:
    run_on_a_full_disk(_FULL_DISK_IN_THE_BACKGROUND, tmp_path, "limit")


_WRITER = """
import pathlib, sys, time
from ckpt import CheckpointManager
manager = CheckpointManager(pathlib.Path(sys.argv[1]))
manager.prepare(7)
print("writing", flush=True)
time.sleep(120)
"""


def refused(root: Path) -> str:
    """The error of another process that would write."""
    command = [sys.executable, "-c", _WRITER, str(root)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False).stderr


def test_a_second_writer_is_refused_and_a_dead_one_is_not_in_the_way(tmp_path: Path) -> None:
    ours = CheckpointManager(tmp_path)
    (ours.prepare(1) / "weights").write_bytes(b"x")
    ours.publish(1, state={})
    ours.close()
    command = [sys.executable, "-c", _WRITER, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "writing\n"
            for attempt in (lambda: ours.prepare(2), lambda: ours.discard_after(0)):
                with raises(CheckpointLockedError, field="root", value=str(tmp_path)) as caught:
                    attempt()
                assert f"process {process.pid} on" in str(caught.value)
            assert ours.load(1).step == 1, "reading needs no lock"
            assert (tmp_path / ".partial_step_00000007").is_dir(), "the other's save under way is untouched"
        finally:
            process.send_signal(signal.SIGKILL)
    assert ours.prepare(2).is_dir()
    assert not (tmp_path / ".partial_step_00000007").exists()
    assert f"process {os.getpid()} on" in refused(tmp_path)


def test_the_lock_file_is_private_and_holds_no_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/apps/grpo/main.py", "rollout.api_key=secret"])
    (tmp_path / LOCK_NAME).write_text("rollout.api_key=older")
    (tmp_path / LOCK_NAME).chmod(0o644)
    manager = CheckpointManager(tmp_path)
    manager.prepare(1)
    holder = json.loads((tmp_path / LOCK_NAME).read_text())
    assert holder.keys() == {"pid", "host", "since", "command"}
    assert holder["command"] == "main.py"
    assert (tmp_path / LOCK_NAME).stat().st_mode & 0o777 == 0o600
    manager.close()


def test_managers_of_one_process_share_the_lock(tmp_path: Path) -> None:
    first, second = CheckpointManager(tmp_path), CheckpointManager(tmp_path)
    first.prepare(1)
    second.prepare(2)
    second.close()
    assert "CheckpointLockedError" in refused(tmp_path), "closing one does not unlock the other"
    first.prepare(3)
    CheckpointManager(tmp_path).prepare(4)
    del first
    command = [sys.executable, "-c", _WRITER, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "writing\n", "collected managers hold no lock"
        process.kill()


def test_a_recreated_folder_is_locked_again(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path / "checkpoints")
    manager.prepare(1)
    shutil.rmtree(manager.root)
    manager.prepare(1)
    assert f"process {os.getpid()} on" in refused(manager.root)


def test_a_forked_child_does_not_hold_the_lock(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path)
    manager.prepare(1)
    child = os.fork()
    if child == 0:  # the parent's lock is not the child's: the child is refused like any other process
        try:
            manager.prepare(2)
        except CheckpointLockedError:
            os._exit(7)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
