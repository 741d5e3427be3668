"""Background uploads: their order, what is kept, failures of the storage, and uploads that are cut off."""

import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from ckpt_fakes import publish
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt import AsyncUploader, Checkpoint, CheckpointManager, RemoteCheckpoints, Retention, UploadError
from ckpt.tools.command_line import main
from plinth_testing import raises, wait_until

PROPERTY = settings(deadline=None, derandomize=True, max_examples=12)


class FailingMoves:
    """A file system in which publishing a manifest fails while the next of `fails` is true."""

    def __init__(self, fs: Any, fails: Iterator[bool], tried: list[int]) -> None:
        self._fs, self._fails, self._tried = fs, fails, tried

    def __getattr__(self, name: str) -> Any:
        return getattr(self._fs, name)

    def mv(self, source: str, target: str) -> None:
        self._tried.append(int(target.partition("step_")[2][:8]))
        if next(self._fails, False):
            raise ConnectionError("the network is gone")
        self._fs.mv(source, target)


class Gate(RemoteCheckpoints):
    """A storage that takes one upload for each `allow`."""

    def __init__(self, url: str, fails: list[bool] | None = None) -> None:
        super().__init__(url)
        self._allowed = threading.Semaphore(0)
        self.begun: list[int] = []
        self.tried: list[int] = []
        self.fs = FailingMoves(self.fs, iter(fails or []), self.tried)

    def allow(self, number: int = 1) -> None:
        for _ in range(number):
            self._allowed.release()

    def upload(self, checkpoint: Checkpoint, **options: Any) -> str:
        self.begun.append(checkpoint.step)
        assert self._allowed.acquire(timeout=120), "the test allows no further upload"
        return super().upload(checkpoint, **options)


def memory_url() -> str:
    return f"memory://{uuid.uuid4().hex}/run"


events = st.lists(st.tuples(st.sampled_from([0.0, 0.5, 1.0]), st.integers(0, 2), st.booleans()), min_size=1, max_size=7)


@PROPERTY
@given(
    events=events,
    keep_last=st.integers(1, 3),
    keep_every=st.none() | st.integers(2, 3),
    keep_best=st.none() | st.integers(1, 2),
)
def test_uploads_are_in_order_and_end_as_the_folder(
    events: list[tuple[float, int, bool]], keep_last: int, keep_every: int | None, keep_best: int | None
) -> None:
    """However fast saves and uploads are, and whichever uploads fail. An event: score, uploads that end, a failure."""
    metric = "score" if keep_best else None
    rule = Retention(keep_last=keep_last, keep_every=keep_every, keep_best=keep_best, metric=metric)
    with TemporaryDirectory() as folder:
        root, remote = Path(folder), Gate(memory_url(), [fails for *_, fails in events])
        with AsyncUploader(root, remote, retention=rule, report=lambda _: None) as uploader:
            manager = CheckpointManager(root, retention=rule, on_publish=uploader.add)
            for step, (score, num_uploads, _) in enumerate(events, start=1):
                publish(manager, step, {"weights": bytes(step)}, metrics={"score": score})
                remote.allow(num_uploads)
            remote.allow(2 * len(events))
        assert remote.tried == sorted(remote.tried), "an upload is tried again before a newer one"
        assert remote.steps() == manager.steps()
        assert CheckpointManager(root, retention=rule).prune() == [], "nothing is left that an upload needed"
        with TemporaryDirectory() as there:
            for step in remote.steps():
                assert remote.download(step, Path(there)).state == {"step": step}


def test_a_report_that_fails_does_not_end_the_thread(tmp_path: Path) -> None:
    said: list[str] = []

    def report(line: str) -> None:
        if not said:
            said.append(line)
            raise OSError(28, "No space left on device")

    remote = RemoteCheckpoints(memory_url())
    with raises(UploadError, steps=(1,)), AsyncUploader(tmp_path, remote, report=report) as uploader:
        manager = CheckpointManager(tmp_path, on_publish=uploader.add)
        broken = publish(manager, 1)
        wait_until(lambda: remote.steps() == [1])
        (broken.path / "ranks/0.bin").write_bytes(b"damaged")
        uploader.add(broken)
        wait_until(lambda: said)
        publish(manager, 2)
        wait_until(lambda: remote.steps() == [1, 2])


def test_saves_neither_wait_for_an_upload_nor_delete_what_it_reads(tmp_path: Path) -> None:
    said: list[str] = []
    remote, rule = Gate(memory_url()), Retention(keep_last=1)
    with AsyncUploader(tmp_path, remote, retention=rule, report=said.append) as uploader:
        manager = CheckpointManager(tmp_path, retention=rule, on_publish=uploader.add)
        publish(manager, 1)
        wait_until(lambda: remote.begun == [1])  # the thread holds step 1 and waits in `upload`
        started = time.monotonic()
        for step in (2, 3, 4):
            publish(manager, step)
        assert time.monotonic() - started < 60, "a save waited for the upload"
        assert manager.steps() == [1, 4], "step 1 is being uploaded"
        remote.allow(2)
    assert remote.tried == [1, 4]
    assert (remote.steps(), manager.steps()) == ([4], [4])
    assert [line for line in said if "retention" in line] == [
        f"step {step} is not uploaded: the retention deleted it before its turn came" for step in (2, 3)
    ]
    assert [(upload.name, upload.num_bytes > 4) for upload in uploader.take_finished()] == [
        ("step 1", True),
        ("step 4", True),
    ]
    assert uploader.take_finished() == []


def test_a_storage_that_fails_is_tried_again_then_named_with_what_it_lacks(tmp_path: Path) -> None:
    said: list[str] = []
    remote = Gate(memory_url(), [False] + [True] * 999)
    remote.allow(50)
    manager = CheckpointManager(tmp_path)
    uploader = AsyncUploader(tmp_path, remote, report=said.append, retry_s=0.02)
    for step in (1, 2, 3):
        uploader.add(publish(manager, step))
    with raises(UploadError, steps=(2, 3)):
        uploader.close()
    assert any("step_00000002" in line and "the network is gone" in line for line in said), said
    assert remote.steps() == [1]
    url = f"file://{tmp_path}/storage"
    assert main(["upload", str(tmp_path), url]) == 0, "the command that the error names"
    assert RemoteCheckpoints(url).steps() == [1, 2, 3]


def test_an_error_of_the_block_is_raised_with_what_the_storage_lacks(tmp_path: Path) -> None:
    remote = Gate(memory_url(), [True] * 99)
    remote.allow(9)
    uploader = AsyncUploader(tmp_path, remote, report=lambda _: None, retry_s=0.001)

    def train() -> None:
        with uploader:
            uploader.add(publish(CheckpointManager(tmp_path), 1))
            raise RuntimeError("training failed")

    with pytest.raises(RuntimeError, match="training failed") as raised:
        train()
    assert "lacks step 1" in raised.value.__notes__[0]


def test_an_interrupted_block_does_not_wait(tmp_path: Path) -> None:
    def train() -> None:
        with AsyncUploader(tmp_path, Gate(memory_url()), report=lambda _: None) as uploader:
            uploader.add(publish(CheckpointManager(tmp_path), 1))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train()


def test_a_damaged_checkpoint_is_named_and_not_tried_again(tmp_path: Path) -> None:
    manager, remote = CheckpointManager(tmp_path), Gate(memory_url())
    remote.allow(9)
    for step in (1, 2):
        publish(manager, step)
    (manager.root / "step_00000001" / "ranks/0.bin").write_bytes(b"y")
    uploader = AsyncUploader(tmp_path, remote, report=lambda _: None)
    for step in (1, 2):
        uploader.add(manager.read(step))
    with raises(UploadError, steps=(1,)):
        uploader.close()
    assert remote.begun == [1, 2]
    assert remote.steps() == [2]


def test_a_folder_is_uploaded_before_later_checkpoints_and_appears_whole(tmp_path: Path) -> None:
    model = tmp_path / "model"
    (model / "tokenizer").mkdir(parents=True)
    (model / "weights").write_bytes(b"weights")
    (model / "tokenizer" / "vocabulary").write_bytes(b"")
    remote = RemoteCheckpoints(f"file://{tmp_path}/storage/run")
    with AsyncUploader(tmp_path / "here", remote) as uploader:
        uploader.add(model)
        uploader.add(publish(CheckpointManager(tmp_path / "here"), 1))
    assert [upload.name for upload in uploader.take_finished()] == ["model", "step 1"]
    assert remote.names()[0] == "model"
    assert remote.steps() == [1]
    out = tmp_path / "there" / "model"
    remote.download_folder("model", out)
    assert (out / "weights").read_bytes() == b"weights"
    assert (out / "tokenizer" / "vocabulary").is_file()
    (tmp_path / "storage" / "run" / "model" / "manifest.json").unlink()
    assert not remote.has_folder("model"), "without its manifest it is unfinished"
