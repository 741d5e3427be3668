import errno
import json
import math
import re
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from ckpt_fakes import publish
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt import (
    CheckpointDamagedError,
    CheckpointExistsError,
    CheckpointManager,
    CheckpointNotFoundError,
    CheckpointStateError,
    CheckpointUsageError,
    UnsupportedFormatError,
    manifest,
    verify_folder,
)
from ckpt.manifest import FORMAT_VERSION, MANIFEST_NAME
from ckpt.tools import deepspeed_export
from ckpt.tools.command_line import main
from plinth_testing import raises
from plinth_testing.strategies import json_values

PROPERTY = settings(deadline=None, derandomize=True, max_examples=20)

names = st.text(alphabet="ab.-_é", min_size=1, max_size=6).filter(lambda name: name.strip("."))
paths = st.lists(names, min_size=1, max_size=3).map(
    lambda parts: "d/" + "/".join(f"{part}_{len(parts)}" for part in parts)
)
trees = st.dictionaries(paths, st.binary(min_size=1, max_size=200), min_size=1, max_size=5)


def newest_step(manager: CheckpointManager) -> int | None:
    newest = manager.newest_good()
    return newest and newest.step


def visible(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir() if path.name != ".lock")


def test_save_and_load(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path / "run" / "checkpoints")
    assert manager.newest_good() is None
    assert manager.steps() == []
    state = {"epoch": 1, "lr": 0.1 + 0.2, "sampler": {"held": [1, 2]}, "best": None}
    folder = manager.prepare(20)
    (folder / "rank0.bin").write_bytes(b"0")
    published = manager.publish(20, state=state)
    assert published.path.name == "step_00000020"
    for actual in (published, manager.load(20), manager.newest_good()):
        assert actual is not None
        assert (actual.step, actual.state, actual.path) == (20, state, published.path)
    assert (manager.root / "latest").read_text() == "step_00000020\n"
    assert set(manager.manifest(20).files) == {"rank0.bin", "state.json"}
    assert manager.manifest(20).packages["torch"] == version("torch")
    publish(manager, 30)
    assert manager.steps() == [20, 30]
    assert newest_step(manager) == 30
    assert visible(manager.root) == ["latest", "step_00000020", "step_00000030"]
    assert "sampler" not in repr(manager.load(20)), "random generators in the state print as 20,000 characters"


@PROPERTY
@given(trees, json_values())
def test_any_files_and_state_round_trip(tree: dict[str, bytes], value: Any) -> None:
    with tempfile.TemporaryDirectory() as root:
        manager = CheckpointManager(Path(root))
        publish(manager, 1, tree)
        manager.prepare(2)
        manager.publish(2, state={"value": value})
        assert manager.load(2).state == {"value": value}
        checkpoint = manager.load(1)
        assert {name: (checkpoint.path / name).read_bytes() for name in tree} == tree


@PROPERTY
@given(trees, st.data())
def test_any_damage_is_found_with_the_files_name(tree: dict[str, bytes], data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as root:
        manager = CheckpointManager(Path(root))
        publish(manager, 1)
        folder = publish(manager, 2, tree).path
        victim = data.draw(st.sampled_from([*tree, "state.json"]))
        content = bytearray((folder / victim).read_bytes())
        kind = data.draw(st.sampled_from(["missing", "torn", "longer", "altered"]))
        if kind == "missing":
            (folder / victim).unlink()
        elif kind == "torn":
            (folder / victim).write_bytes(content[: data.draw(st.integers(0, len(content) - 1))])
        elif kind == "longer":
            (folder / victim).write_bytes(content + b"\0")
        else:
            content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
            (folder / victim).write_bytes(content)
        with raises(CheckpointDamagedError, step=2, files=(victim,), newest_good=1):
            manager.load(2)
        assert [problem.kind for problem in manager.verify(2)] == ["torn" if kind == "longer" else kind]
        assert newest_step(manager) == 1


def test_any_flipped_bit_of_the_manifest_is_found(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path)
    manifest = publish(manager, 1).path / MANIFEST_NAME
    original = manifest.read_bytes()
    # The last byte is the final line break, which has no meaning. Every third byte: all fields, in a third of the time.
    for position in range(0, len(original) - 1, 3):
        content = bytearray(original)
        content[position] ^= 1 << position % 8
        manifest.write_bytes(content)
        # A flipped bit in the format version can make it another format.
        with pytest.raises((CheckpointDamagedError, UnsupportedFormatError)):
            manager.load(1)
    manifest.write_bytes(original)
    manager.load(1)


def test_no_good_checkpoint_is_left(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path)
    folder = publish(manager, 1).path
    (folder / MANIFEST_NAME).unlink()
    with raises(CheckpointDamagedError, files=(MANIFEST_NAME,), newest_good=None):
        manager.load(1)
    assert manager.newest_good() is None


def test_errors_of_files_are_one_line_of_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def fill_up(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(deepspeed_export, "export_deepspeed", fill_up)
        assert main(["export", str(tmp_path), str(tmp_path / "out"), "--model-files-from", "x"]) == 2
    assert re.match(rf"error: {tmp_path}/out: No space left .*; [\d,]+ bytes are free", capsys.readouterr().err)


def test_a_step_folder_with_another_steps_name_is_damaged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    manager = CheckpointManager(tmp_path)
    publish(manager, 1)
    publish(manager, 20).path.rename(tmp_path / "step_00000030")
    for read in (lambda: manager.load(30), lambda: manager.manifest(30)):
        with raises(CheckpointDamagedError, step=30, files=(MANIFEST_NAME,)):
            read()
    skipped: dict[int, str] = {}
    actual = manager.newest_good(on_skip=skipped.__setitem__)
    assert actual is not None
    assert actual.step == 1
    assert skipped.keys() == {30}
    assert "is of step 20" in skipped[30]
    assert main(["verify", str(tmp_path)]) == 1
    assert "rename it back" in capsys.readouterr().out


def test_a_checkpoint_that_is_deleted_while_it_is_read_is_gone_and_the_newer_one_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, original = CheckpointManager(tmp_path, keep_last=1), manifest.hash_files
    publish(writer, 1)

    def delete_first(files: Any) -> Any:
        monkeypatch.undo()
        publish(writer, writer.steps()[-1] + 1)  # deletes the one before
        return original(files)

    monkeypatch.setattr(manifest, "hash_files", delete_first)
    skipped: dict[int, str] = {}
    newest = CheckpointManager(tmp_path).newest_good(on_skip=skipped.__setitem__)
    assert newest is not None
    assert (newest.step, skipped) == (2, {})
    monkeypatch.setattr(manifest, "hash_files", delete_first)
    with raises(CheckpointNotFoundError, field="step", value=2, allowed="3"):
        CheckpointManager(tmp_path).load(2)


@pytest.mark.parametrize("name", [MANIFEST_NAME, "state.json"])
def test_a_deeply_nested_file_is_damaged(tmp_path: Path, name: str) -> None:
    manager = CheckpointManager(tmp_path)
    folder = publish(manager, 1).path
    (folder / name).write_text("[" * 100_000)
    if name == "state.json":  # with a manifest that fits
        (folder / MANIFEST_NAME).unlink()
        (folder / MANIFEST_NAME).write_text(manifest.CheckpointManifest.describe(folder, step=1).to_json())
    with raises(CheckpointDamagedError, step=1, files=(name,)):
        manager.load(1)
    assert manager.newest_good() is None


@pytest.mark.parametrize("version", [FORMAT_VERSION - 1, FORMAT_VERSION + 1])
def test_another_format_is_refused(tmp_path: Path, version: int) -> None:
    manager = CheckpointManager(tmp_path)
    publish(manager, 1)
    folder = publish(manager, 2).path
    body = json.loads((folder / MANIFEST_NAME).read_text())
    (folder / MANIFEST_NAME).write_text(json.dumps({**body, "format_version": version}))
    with pytest.raises(UnsupportedFormatError):
        manager.load(2)
    assert newest_step(manager) == 1


def test_manifest_cannot_name_files_outside(tmp_path: Path) -> None:
    from ckpt.digest import FileEntry
    from ckpt.manifest import CheckpointManifest

    entry = FileEntry(num_bytes=0, checksum="")
    for name in ("../x", "/etc/passwd", "a/../../x"):
        text = CheckpointManifest(step=1, files={name: entry}).to_json()
        (tmp_path / MANIFEST_NAME).write_text(text)
        (problem,) = verify_folder(tmp_path)
        assert "outside" in problem.detail


def test_keep_last(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, keep_last=2)
    for step in (1, 2, 3, 4):
        publish(manager, step)
    assert manager.steps() == [3, 4]
    assert manager.newest_good() == manager.load(4)
    assert manager.prune() == []
    assert CheckpointManager(tmp_path, keep_last=1).prune() == [3]
    assert manager.steps() == [4]
    assert CheckpointManager(tmp_path).prune() == []
    with raises(CheckpointUsageError, field="keep_last", value=0):
        CheckpointManager(tmp_path, keep_last=0)


def test_resuming_from_an_older_step(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, keep_last=2)
    for step in (10, 30, 40):
        publish(manager, step)
    publish(manager, 20)
    assert 20 in manager.steps(), "the one just published is not pruned"
    assert manager.discard_after(20) == [30, 40]
    assert manager.steps() == [20]
    assert (tmp_path / "latest").read_text() == "step_00000020\n"
    assert manager.discard_after(0) == [20]
    assert not (tmp_path / "latest").exists()


def test_a_step_that_is_already_published(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path)
    publish(manager, 1, {"a": b"old"})
    with raises(CheckpointExistsError, field="step", value=1):
        manager.prepare(1)
    with raises(CheckpointNotFoundError, field="step", value=3, allowed="1"):
        manager.load(3)
    folder = publish(manager, 1, {"a": b"new"}, overwrite=True).path
    assert (folder / "a").read_bytes() == b"new"
    assert manager.load(1).step == 1
    assert visible(tmp_path) == ["latest", "step_00000001"]


def test_leftovers_are_deleted_but_not_other_saves_in_progress(tmp_path: Path) -> None:
    CheckpointManager(tmp_path).prepare(5).joinpath("half").write_bytes(b"x")
    assert CheckpointManager(tmp_path).steps() == []
    manager = CheckpointManager(tmp_path)
    first = manager.prepare(6)
    assert visible(tmp_path) == [first.name]
    second = manager.prepare(7)
    assert first.is_dir()
    manager.publish(7, state={})
    manager.publish(6, state={})
    assert manager.steps() == [6, 7]
    assert (tmp_path / "latest").read_text() == "step_00000007\n"
    assert not second.exists()
    manager.prepare(8)
    manager.abandon(8)
    assert visible(tmp_path) == ["latest", "step_00000006", "step_00000007"]


@pytest.mark.parametrize(
    ("state", "field"),
    [
        ({"a": {"b": [1, {2, 3}]}}, "state.a.b.1"),
        ({"weights": b"bytes"}, "state.weights"),
        ({("x", 1): 1}, "state.('x', 1)"),
    ],
)
def test_state_that_json_cannot_hold(tmp_path: Path, state: Any, field: str) -> None:
    manager = CheckpointManager(tmp_path)
    folder = manager.prepare(1)
    with raises(CheckpointStateError, field=field):
        manager.publish(1, state=state)
    assert folder.is_dir()
    assert manager.steps() == []
    manager.publish(1, state={"nan": math.nan})
    assert math.isnan(manager.load(1).state["nan"])


def test_wrong_use(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path)
    with raises(CheckpointNotFoundError, field="step", value=3, allowed="no step is published"):
        manager.load(3)
    with raises(CheckpointUsageError, field="step", value=1):
        manager.publish(1, state={})
    with raises(CheckpointUsageError, field="step", value=-1):
        manager.prepare(-1)
    (manager.prepare(1) / "state.json").write_text("{}")
    with raises(CheckpointUsageError, field="files", value="state.json"):
        manager.publish(1, state={})
    (manager.prepare(2) / "link").symlink_to(tmp_path)
    with raises(CheckpointUsageError, field="files", value="link"):
        manager.publish(2, state={})
    assert manager.steps() == []


@pytest.mark.parametrize(("program", "usage"), [("/bin/plinth", "plinth ckpt"), ("ckpt/__main__.py", "python -m ckpt")])
def test_the_usage_is_as_the_command_was_typed(
    program: str, usage: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", [program])
    with pytest.raises(SystemExit):
        main([])
    assert capsys.readouterr().err.startswith(f"usage: {usage} [-h]")


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def run(*arguments: object) -> tuple[int, str]:
        code = main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return code, captured.out + captured.err

    manager = CheckpointManager(tmp_path)
    for step in (1, 2):
        publish(manager, step)
    manager.prepare(3)
    code, text = run("list", tmp_path)
    assert code == 0
    assert text.count("latest") == 1
    assert "unfinished: .partial_step_00000003" in text
    assert run("verify", tmp_path) == (0, "step_00000001: good\nstep_00000002: good\n2 of 2 checkpoints are good\n")
    assert run("verify", tmp_path / "step_00000001") == (0, "step_00000001: good\n1 of 1 checkpoints are good\n")
    (tmp_path / "step_00000002" / "ranks" / "1.bin").write_bytes(b"0ne")
    code, text = run("verify", tmp_path)
    assert code == 1
    assert "ranks/1.bin: altered" in text
    assert run("verify", tmp_path, "--step", 1)[0] == 0
    (tmp_path / "step_00000002" / MANIFEST_NAME).unlink()
    code, text = run("list", tmp_path)
    assert code == 1
    assert "damaged" in text
    for wrong in (("verify", tmp_path, "--step", 9), ("verify", tmp_path / "none"), ("list", tmp_path / "none")):
        code, text = run(*wrong)
        assert code == 2
        assert "error: " in text
    (tmp_path / "empty").mkdir()
    none = f"no checkpoints in {tmp_path / 'empty'}; give the folder that has them, such as RUN/checkpoints\n"
    assert run("verify", tmp_path / "empty") == (2, f"error: {none}")
    assert run("list", tmp_path / "empty") == (0, none)
    publish(CheckpointManager(tmp_path / "run" / "checkpoints"), 1)
    assert run("list", tmp_path / "run")[1].endswith(f"such as {tmp_path / 'run' / 'checkpoints'}\n")
    one = tmp_path / "step_00000001"
    assert run("list", one) == (0, f"{one} is one checkpoint; give its folder: {tmp_path}\n")


def test_managing_checkpoints_does_not_import_torch(tmp_path: Path) -> None:
    program = (
        "import pathlib, sys, ckpt\n"
        "manager = ckpt.CheckpointManager(pathlib.Path(sys.argv[1]))\n"
        "manager.prepare(1)\n"
        "there = manager.publish(1, state={}, models={'actor': {'w': {'shape': [2], 'dtype': 'float32'}}})\n"
        "assert ckpt.check_model(manager.load(1), 'actor', {'w': {'shape': [2], 'dtype': 'bfloat16'}})\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=True, timeout=60)
