"""State dicts without pickle, background saves, and captured random generators."""

import json
import random
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from ckpt import (
    AsyncSaver,
    Capture,
    CheckpointExistsError,
    CheckpointManager,
    CheckpointNotFoundError,
    CheckpointSpaceError,
    CheckpointStateError,
    CheckpointUsageError,
    capture_rng,
    load_state_dict,
    restore_rng,
    save_state_dict,
)
from ckpt.digest import FileEntry
from ckpt.savers.capture import HostTree
from ckpt.savers.state_dicts import HostSnapshot
from plinth_testing import raises

PROPERTY = settings(deadline=None, derandomize=True, max_examples=60)

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8, torch.bool]
tensors = st.builds(
    lambda shape, dtype: (torch.rand(shape) * 9).to(dtype),
    st.lists(st.integers(0, 4), max_size=3),
    st.sampled_from(DTYPES),
)
leaves = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary() | tensors
keys = st.text(max_size=3) | st.integers() | st.sampled_from(["a", "a.b", "__metadata__"])
trees = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=3) | st.lists(inner, max_size=3).map(tuple) | st.dictionaries(keys, inner, max_size=3)
    ),
    max_leaves=10,
)


def same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


@PROPERTY
@given(trees)
def test_any_tree_round_trips(tree: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tree.safetensors"
        entry = save_state_dict(path, tree)
        assert same(load_state_dict(path), tree)
        assert (entry.num_bytes, entry.checksum) == (path.stat().st_size, blake3(path.read_bytes()).hexdigest())


def test_an_optimizer_and_tied_weights(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4, bias=False), torch.nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    tree = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    save_state_dict(tmp_path / "x.safetensors", tree)
    loaded = load_state_dict(tmp_path / "x.safetensors")
    assert loaded["model"]["0.weight"] is loaded["model"]["1.weight"]
    optimizer.load_state_dict(loaded["optimizer"])
    assert loaded["optimizer"]["state"][0]["exp_avg"].shape == (4, 4)
    with safe_open(tmp_path / "x.safetensors", "pt") as file:
        assert {"model.0.weight", "optimizer.state.0.exp_avg"} < set(file.keys())
        assert "model.1.weight" not in file.keys()  # noqa: SIM118 - it is no dict


@pytest.mark.parametrize(
    ("tree", "field"),
    [
        ({"a": [1, {"b": {1, 2}}]}, "a.1.b"),
        ({"a": {(1, 2): 3}}, "a"),
        ({"a": torch.ones(2, dtype=torch.complex64)}, "a"),
        ({"a": torch.eye(2).to_sparse()}, "a"),
        (object(), None),
    ],
)
def test_what_cannot_be_stored_is_named(tmp_path: Path, tree: Any, field: str | None) -> None:
    with raises(CheckpointStateError, field=field):
        save_state_dict(tmp_path / "x.safetensors", tree)
    assert not (tmp_path / "x.safetensors").exists()


def test_an_entry_must_fit_its_file(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path)
    folder = manager.prepare(1)
    entry = save_state_dict(folder / "x.safetensors", {"w": torch.ones(3)})
    for entries in ({"y.safetensors": entry}, {"x.safetensors": replace(entry, num_bytes=1)}):
        with raises(CheckpointUsageError, field="entries"):
            manager.publish(1, state={}, entries=entries)
        folder = manager.prepare(1)
        entry = save_state_dict(folder / "x.safetensors", {"w": torch.ones(3)})
    manager.publish(1, state={}, entries={"x.safetensors": entry})
    assert manager.verify(1) == ()


def test_files_of_others(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(1)}, tmp_path / "pickle.safetensors")
    with raises(CheckpointStateError, field="path"):
        load_state_dict(tmp_path / "pickle.safetensors")
    with raises(CheckpointNotFoundError, field="path"):
        load_state_dict(tmp_path / "none.safetensors")


def test_a_background_save_holds_the_state_at_the_call(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, keep_last=2)
    weights = torch.zeros(300_000)
    with AsyncSaver(manager) as saver:
        assert saver.wait() is None
        for step in range(1, 6):
            weights.fill_(step)
            state = {"step": step}
            assert saver.save(step, {"model": {"w": weights}}, state=state, metrics={"score": step}) > 0
            weights.fill_(-1.0)
            state["step"] = -1
        checkpoint = saver.wait()
        assert checkpoint is not None
        assert (checkpoint.step, checkpoint.state) == (5, {"step": 5})
    assert manager.steps() == [4, 5]
    for step in (4, 5):
        loaded = load_state_dict(manager.load(step).path / "model.safetensors")
        assert torch.equal(loaded["w"], torch.full((300_000,), float(step)))
        assert manager.manifest(step).metrics == {"score": step}


class Slow(Capture):
    """A capture that copies only after `may_copy` is set."""

    def __init__(self, weights: torch.Tensor) -> None:
        self.may_copy = threading.Event()
        self._snapshot, self._weights = HostSnapshot(), weights

    @property
    def num_bytes(self) -> int:
        return self._snapshot.num_bytes

    def take(self) -> None:
        self._snapshot.take({"w": self._weights})

    def copy(self) -> None:
        assert self.may_copy.wait(60)
        self._snapshot.copy()

    def write(self, folder: Path, name: str) -> Mapping[str, FileEntry]:
        return {name: self._snapshot.write(folder / name)}


def test_a_background_copy_holds_the_state_until_wait_copied(tmp_path: Path) -> None:
    weights = torch.zeros(300_000)
    slow = Slow(weights)
    with AsyncSaver(CheckpointManager(tmp_path, keep_last=5)) as saver:
        assert saver.wait_copied() < 1, "there is nothing to wait for"
        for step in (1, 2, 3):
            weights.fill_(step)
            saver.save(step, {"slow": slow, "model": {"w": weights}}, copy_in_background=step != 3)
            if step == 1:
                threading.Timer(0.3, slow.may_copy.set).start()
                assert saver.wait_copied() > 0.2, "the call came back before the tensor was copied"
            saver.wait_copied()
            weights.fill_(-1.0)
    for step in (1, 2, 3):
        folder = CheckpointManager(tmp_path).load(step).path
        for name in ("slow", "model.safetensors"):
            assert torch.equal(load_state_dict(folder / name)["w"], torch.full((300_000,), float(step)))


def test_a_save_without_a_thread_blocks_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = {"model": {"w": torch.ones(3)}}
    with AsyncSaver(CheckpointManager(tmp_path)) as saver:
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", lambda _: (_ for _ in ()).throw(RuntimeError("no more threads")))
            with pytest.raises(RuntimeError, match="no more threads"):
                saver.save(1, weights, copy_in_background=True)
        assert saver.wait_copied() < 1
        saver.save(1, weights)
        saved = saver.wait()
        assert saved is not None
        assert saved.step == 1


def test_a_failed_background_copy_blocks_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saver = AsyncSaver(CheckpointManager(tmp_path))
    with monkeypatch.context() as patched:
        patched.setattr(HostTree, "copy", lambda self: (_ for _ in ()).throw(MemoryError("no host memory")))
        saver.save(1, {"model": {"w": torch.ones(3)}}, copy_in_background=True)
        saver.wait_copied()
        with pytest.raises(MemoryError, match="no host memory"):
            saver.wait()
        with pytest.raises(MemoryError):
            saver.save(1, {"model": {"w": torch.ones(3)}})
    saver.save(1, {"model": {"w": torch.ones(3)}}, copy_in_background=True)
    saver.close()
    assert CheckpointManager(tmp_path).steps() == [1]


def test_background_errors_are_raised_by_the_next_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import shutil

    manager = CheckpointManager(tmp_path)
    saver = AsyncSaver(manager)
    saver.save(1, {"model": {"w": torch.ones(3)}})
    saver.wait()
    saver.save(1, {"model": {"w": torch.ones(3)}})
    with raises(CheckpointExistsError, field="step", value=1) as caught:
        saver.save(2, {"model": {"w": torch.ones(3)}})
    assert any("background save of step 1" in note for note in caught.value.__notes__)
    assert saver.wait() is not None, "an error is raised once"
    usage = shutil.disk_usage(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "disk_usage", lambda path: usage._replace(free=100))
        saver.save(3, {"model": {"w": torch.ones(3)}})
        with pytest.raises(CheckpointSpaceError):
            saver.wait()
    (tmp_path / "step_00000004").write_bytes(b"in the way of the rename")
    saver.save(4, {"model": {"w": torch.ones(3)}}, overwrite=True)
    with pytest.raises(OSError):
        saver.close()
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".partial")]
    assert manager.steps() == [1]
    # Wrong arguments raise in the call itself.
    for name in ("", "a/b", ".hidden"):
        with raises(CheckpointUsageError, field="state_dicts", value=name):
            saver.save(5, {name: {}})
    with pytest.raises(CheckpointStateError):
        saver.save(5, {"model": {}}, state={"x": object()})
    with pytest.raises(RuntimeError, match="training failed"), saver:
        raise RuntimeError("training failed")


def test_a_process_finishes_its_save_before_it_exits(tmp_path: Path) -> None:
    program = (
        "import sys, torch, pathlib, ckpt\n"
        "saver = ckpt.AsyncSaver(ckpt.CheckpointManager(pathlib.Path(sys.argv[1])))\n"
        "saver.save(1, {'model': torch.ones(1_000_000)})\n"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=True, timeout=120)
    weights = load_state_dict(CheckpointManager(tmp_path).load(1).path / "model.safetensors")
    assert torch.equal(weights, torch.ones(10**6))


def _draw() -> list[Any]:
    drawn: list[Any] = [random.random(), random.gauss(0, 1), np.random.rand(3).tolist(), np.random.randn()]
    return [*drawn, torch.rand(3).tolist(), torch.randn(17).tolist()]


@settings(deadline=None, derandomize=True, max_examples=20)
@given(st.integers(0, 2**32 - 1), st.integers(0, 5))
def test_restored_generators_draw_the_same_numbers(seed: int, num_drawn: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    for _ in range(num_drawn):
        _draw()
    state = json.loads(json.dumps(capture_rng()))
    expected = _draw()
    _draw()
    restore_rng(state)
    assert _draw() == expected


def test_states_of_another_format_or_device_are_refused() -> None:
    state, before = capture_rng(), random.getstate()
    random.random()
    drawn = random.getstate()
    with raises(CheckpointStateError, field="state.format_version", value=9):
        restore_rng({**state, "format_version": 9})
    if not torch.cuda.is_available():
        with pytest.raises(CheckpointStateError):
            restore_rng({**state, "cuda": ""})
    assert random.getstate() == drawn != before


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_cuda(tmp_path: Path) -> None:
    torch.randn(3, device="cuda")
    state = json.loads(json.dumps(capture_rng()))
    expected = torch.randn(100, device="cuda")
    restore_rng(state)
    assert torch.equal(torch.randn(100, device="cuda"), expected)
    with AsyncSaver(CheckpointManager(tmp_path)) as saver:
        for step in (1, 2):
            saver.save(step, {"model": {"w": expected}})
            expected = expected.add_(1)
    loaded = load_state_dict(tmp_path / "step_00000002" / "model.safetensors", device="cuda")
    assert torch.equal(loaded["w"] + 1, expected)
