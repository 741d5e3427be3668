"""Remote storage: failed uploads are never visible, and a download equals its upload."""

import tempfile
from pathlib import Path
from typing import Any

import pytest
from ckpt_fakes import publish
from ckpt_mortal import Died, Fate, MortalStorage

from ckpt import (
    Checkpoint,
    CheckpointDamagedError,
    CheckpointExistsError,
    CheckpointManager,
    CheckpointNotFoundError,
    CheckpointUsageError,
    RemoteCheckpoints,
)
from plinth_testing import raises


def save(root: Path, step: int, content: bytes = b"weights") -> Checkpoint:
    return publish(root, step, {"actor/rank0.bin": content, "actor/empty.bin": b""}, metrics={"score": 0.5})


def test_upload_and_download(tmp_path: Path, url: str) -> None:
    remote = RemoteCheckpoints(url)
    assert remote.steps() == []
    for step in (3, 20):
        remote.upload(save(tmp_path / "here", step))
    assert remote.steps() == [3, 20]
    checkpoint = remote.download(20, tmp_path / "there")
    assert CheckpointManager(tmp_path / "there").load(20) == checkpoint
    assert checkpoint.state == {"step": 20}
    assert (checkpoint.path / "actor" / "rank0.bin").read_bytes() == b"weights"
    here, there = (CheckpointManager(tmp_path / name).manifest(20) for name in ("here", "there"))
    assert here == there, "metrics and date included"
    assert remote.download(20, tmp_path / "there", on_file=lambda _: pytest.fail("it is there")) == checkpoint
    save(tmp_path / "there", 21)
    remote.upload(save(tmp_path / "here", 21, b"other"))
    with pytest.raises(CheckpointExistsError):
        remote.download(21, tmp_path / "there")
    remote.download(21, tmp_path / "there", overwrite=True)
    remote.delete(21)
    with raises(CheckpointNotFoundError, field="step", value=4, allowed="3, 20"):
        remote.download(4, tmp_path / "there")
    remote.delete(3)
    assert remote.steps() == [20]


def test_a_step_is_replaced_only_when_asked(tmp_path: Path, url: str) -> None:
    remote = RemoteCheckpoints(url)
    remote.upload(save(tmp_path / "old", 1, b"old"))
    new = save(tmp_path / "new", 1, b"new")
    with raises(CheckpointExistsError, field="step", value=1):
        remote.upload(new)
    remote.upload(new, overwrite=True)
    assert (remote.download(1, tmp_path / "there").path / "actor" / "rank0.bin").read_bytes() == b"new"
    assert len(remote._uploads()) == 1


def mortal(url: str, instant: int, *, after: bool) -> RemoteCheckpoints:
    """The storage of a process that dies before or after the request with this number."""
    remote = RemoteCheckpoints(url)
    remote.fs = MortalStorage(remote.fs, "process", Fate(instant, frozenset({"process"}), after=after))
    return remote


@pytest.mark.parametrize("after", [False, True])
def test_an_uploader_killed_at_any_request_leaves_no_visible_part(tmp_path: Path, url: str, after: bool) -> None:
    old, new = save(tmp_path / "old", 1, b"old"), save(tmp_path / "new", 1, b"new")
    for instant in range(1, 80):
        reader = RemoteCheckpoints(f"{url}/{instant}")
        reader.upload(old)
        try:
            mortal(reader.url, instant, after=after).upload(new, overwrite=True)
            died = False
        except Died:
            died = True
        assert reader.steps() == [1]
        with tempfile.TemporaryDirectory() as there:
            content = (reader.download(1, Path(there)).path / "actor" / "rank0.bin").read_bytes()
        assert content in (b"old", b"new")
        reader.clean_up()
        assert reader.steps() == [1]
        assert all(reader.exists(f"{name}/manifest.json") for name in reader._uploads())
        if not died:
            assert content == b"new"
            assert instant > 5
            return
    pytest.fail("the upload never finished")


def test_a_downloader_killed_at_any_request_publishes_no_part(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/remote"
    RemoteCheckpoints(url).upload(save(tmp_path / "here", 1))
    there = CheckpointManager(tmp_path / "there")
    for instant in range(1, 80):
        try:
            mortal(url, instant, after=True).download(1, there.root)
            break
        except Died:
            assert there.steps() == []
    assert there.verify(1) == ()
    assert [path.name for path in there.root.iterdir() if path.name.startswith(".partial")] == []


def test_an_upload_that_fails_cleans_up(tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    remote = RemoteCheckpoints(url)
    checkpoint = save(tmp_path / "here", 1)

    def fail(*_: Any, **__: Any) -> None:
        raise ConnectionError("the network is gone")

    with monkeypatch.context() as patched:
        patched.setattr(remote.fs, "mv", fail)
        with pytest.raises(ConnectionError):
            remote.upload(checkpoint)
    assert remote.steps() == []
    assert remote._uploads() == []
    remote.upload(checkpoint)
    assert remote.steps() == [1]


def test_damage_is_found_in_both_directions(tmp_path: Path, url: str) -> None:
    remote = RemoteCheckpoints(url)
    checkpoint = save(tmp_path / "here", 1)
    path = remote.upload(checkpoint)
    remote.fs.pipe_file(f"{path}/actor/rank0.bin", b"wEights")
    with raises(CheckpointDamagedError, step=1, files=("actor/rank0.bin",)):
        remote.download(1, tmp_path / "there")
    assert CheckpointManager(tmp_path / "there").steps() == []
    remote.fs.pipe_file(f"{path}/manifest.json", b"{")
    with raises(CheckpointDamagedError, files=("manifest.json",)):
        remote.download(1, tmp_path / "there")
    (checkpoint.path / "actor" / "rank0.bin").write_bytes(b"w")
    with raises(CheckpointDamagedError, files=("actor/rank0.bin",)):
        remote.upload(checkpoint, overwrite=True)


def test_a_storage_is_written_to_before_it_is_used(tmp_path: Path, url: str) -> None:
    RemoteCheckpoints(url).check_writable()
    assert RemoteCheckpoints(url).names() == []
    (tmp_path / "file").write_text("")
    with raises(CheckpointUsageError, field="url", value=f"file://{tmp_path}/file/run"):
        RemoteCheckpoints(f"file://{tmp_path}/file/run").check_writable()
    if url.startswith("s3:"):
        with raises(CheckpointUsageError, field="url"):
            RemoteCheckpoints("s3://no-such-bucket/run").check_writable()


def test_unknown_storage() -> None:
    with raises(CheckpointUsageError, field="url", value="nothing://x"):
        RemoteCheckpoints("nothing://x")
