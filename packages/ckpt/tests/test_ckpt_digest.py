"""Checksums by chunks: computed from memory or from the disk they are the same, and those of old formats still hold."""

import hashlib
import json
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt import CheckpointDamagedError, CheckpointManager, FileEntry
from ckpt.digest import CHUNK_BYTES, hash_files, write_hashed
from ckpt.manifest import FORMAT_VERSION, MANIFEST_NAME, Manifest
from ckpt.savers import hashed_file
from ckpt.savers.hashed_file import HashedFile
from ckpt.threads import Pool

PROPERTY = settings(deadline=None, derandomize=True, max_examples=60)


def expected(content: bytes, chunk_bytes: int) -> str:
    """The definition, written down a second time."""
    if len(content) <= chunk_bytes:
        return hashlib.sha256(content).hexdigest()
    chunks = [content[start : start + chunk_bytes] for start in range(0, len(content), chunk_bytes)]
    return hashlib.sha256(b"".join(hashlib.sha256(chunk).digest() for chunk in chunks)).hexdigest()


@PROPERTY
@given(st.lists(st.binary(max_size=40), max_size=8), st.integers(1, 50))
def test_written_and_read_alike(pieces: list[bytes], chunk_bytes: int) -> None:
    content = b"".join(pieces)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "file"
        views = (memoryview(bytearray(piece)) for piece in pieces)
        written = write_hashed(path, views, len(content), chunk_bytes=chunk_bytes)
        assert path.read_bytes() == content
        read: list[int] = []
        found = hash_files([(path, len(content))] * 2, chunk_bytes=chunk_bytes, on_read=read.append)
        assert [written] * 2 == found == [expected(content, chunk_bytes)] * 2
        assert sum(read) == 2 * len(content)
        assert hash_files([(path, len(content))], chunk_bytes=None) == [hashlib.sha256(content).hexdigest()]


@PROPERTY
@given(st.lists(st.binary(max_size=40), max_size=8), st.integers(1, 50), st.sampled_from([1, 1 << 20]))
def test_a_file_written_by_others_is_hashed_meanwhile(pieces: list[bytes], chunk_bytes: int, inline_bytes: int) -> None:
    content = b"".join(pieces)
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patched:
        patched.setattr(hashed_file, "_INLINE_BYTES", inline_bytes)
        patched.setattr(hashed_file, "FLUSH_BYTES", 60)
        path = Path(folder) / "file"
        with HashedFile(path, chunk_bytes=chunk_bytes) as file:
            for piece in pieces:
                buffer = bytearray(piece)
                assert file.write(buffer) == len(piece)
                buffer[:] = bytes(len(piece))  # the writer may reuse it
        assert path.read_bytes() == content
        assert file.entry == FileEntry(num_bytes=len(content), sha256=expected(content, chunk_bytes))


def test_torch_saves_into_a_hashed_file(tmp_path: Path) -> None:
    tree = {"a": torch.randn(5_000_000), "b": [torch.arange(7), "text"]}
    with HashedFile(tmp_path / "file.pt") as file:
        torch.save(tree, file)
    size = (tmp_path / "file.pt").stat().st_size
    assert file.entry == FileEntry(num_bytes=size, sha256=str(hash_files([(tmp_path / "file.pt", size)])[0]))
    loaded = torch.load(tmp_path / "file.pt", weights_only=True, mmap=True)
    assert torch.equal(loaded["a"], tree["a"])
    with pytest.raises(OSError, match="No space"), HashedFile(Path("/dev/full")) as full:
        full.write(b"x")


def test_a_file_that_cannot_be_read_does_not_hide_the_others(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"a")
    found = hash_files([(tmp_path / "none", 1), (tmp_path / "a", 1)])
    assert isinstance(found[0], FileNotFoundError)
    assert found[1] == hashlib.sha256(b"a").hexdigest()


def test_a_failed_write_raises(tmp_path: Path) -> None:
    def views() -> object:
        yield memoryview(bytearray(100))
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        write_hashed(tmp_path / "file", views(), 100, chunk_bytes=10)  # type: ignore[arg-type]
    with pytest.raises(OSError, match="No space"):
        write_hashed(Path("/dev/full"), iter([memoryview(bytearray(100))]), 100, chunk_bytes=10)


def test_without_new_threads_the_work_is_done_all_the_same() -> None:
    pool = Pool(1)
    with pool:
        pass
    assert pool.submit(sum, [1, 2]).result() == 3  # it has been shut down, as at an interpreter's end
    with pytest.raises(ZeroDivisionError):
        pool.submit(divmod, 1, 0).result()


def _publish_as_format_1(manager: CheckpointManager, step: int, content: bytes) -> Path:
    """What version 0.1.0 wrote: plain SHA-256 of every file, no chunk size, no packages."""
    (manager.prepare(step) / "weights").write_bytes(content)
    folder = manager.publish(step, state={"step": step}).path
    files = {
        name: {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        for name, data in {"weights": content, "state.json": (folder / "state.json").read_bytes()}.items()
    }
    body = {"format_version": 1, "step": step, "created_at": "2026-11-20T00:00:00+00:00", "files": files}
    checksum = hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
    (folder / MANIFEST_NAME).write_text(json.dumps({**body, "manifest_sha256": checksum}, indent=1) + "\n")
    return folder


def test_checkpoints_of_the_first_format_are_read_and_checked(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, keep_last=2)
    content = bytearray(CHUNK_BYTES + 100)
    folder = _publish_as_format_1(manager, 1, bytes(content))
    assert manager.load(1).state == {"step": 1}
    found = manager.manifest(1)
    assert (found.format_version, found.chunk_bytes, found.packages) == (1, None, {})
    content[CHUNK_BYTES + 3] ^= 1
    (folder / "weights").write_bytes(content)
    with pytest.raises(CheckpointDamagedError, match="weights: altered"):
        manager.load(1)
    content[CHUNK_BYTES + 3] ^= 1
    (folder / "weights").write_bytes(content)
    (manager.prepare(2) / "weights").write_bytes(content)
    manager.publish(2, state={})
    manifest = Manifest.read(manager.load(2).path)
    assert (manifest.format_version, manifest.chunk_bytes) == (FORMAT_VERSION, CHUNK_BYTES)
    assert manifest.files["weights"].sha256 == expected(bytes(content), CHUNK_BYTES)
    assert manager.load(1).step == 1
    content[-1] ^= 1
    (tmp_path / "step_00000002" / "weights").write_bytes(content)
    with pytest.raises(CheckpointDamagedError, match=r"weights: altered.*step 1 "):
        manager.load(2)


def test_versions_of_packages_are_recorded(tmp_path: Path) -> None:
    import platform
    from importlib.metadata import version

    manager = CheckpointManager(tmp_path)
    manager.prepare(1)
    manager.publish(1, state={})
    packages = manager.manifest(1).packages
    assert packages["python"] == platform.python_version()
    assert packages["torch"] == version("torch")
