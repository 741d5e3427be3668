"""Checksums: equal when computed while writing and while reading; those of older formats are still verified."""

import hashlib
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt import CheckpointDamagedError, CheckpointManager, FileEntry, digest
from ckpt.digest import HashedFile, hash_files
from ckpt.manifest import FORMAT_VERSION, MANIFEST_NAME, CheckpointManifest
from ckpt.threads import Pool

PROPERTY = settings(deadline=None, derandomize=True, max_examples=60)


def sha256_of_format_2(content: bytes, chunk_bytes: int) -> str:
    """The definition, written down a second time."""
    if len(content) <= chunk_bytes:
        return hashlib.sha256(content).hexdigest()
    chunks = [content[start : start + chunk_bytes] for start in range(0, len(content), chunk_bytes)]
    return hashlib.sha256(b"".join(hashlib.sha256(chunk).digest() for chunk in chunks)).hexdigest()


@PROPERTY
@given(
    st.lists(st.binary(max_size=40), max_size=8),
    st.integers(1, 50),
    st.integers(1, 50),
    st.sampled_from([1, 1 << 20]),
)
def test_written_and_read_checksums_are_equal(
    pieces: list[bytes], block_bytes: int, chunk_bytes: int, inline_bytes: int
) -> None:
    content = b"".join(pieces)
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patched:
        patched.setattr(digest, "_BLOCK_BYTES", block_bytes)
        patched.setattr(digest, "_INLINE_BYTES", inline_bytes)
        patched.setattr(digest, "_FLUSH_BYTES", 60)
        path, other = Path(folder) / "file", Path(folder) / "other"
        with HashedFile(path) as file:
            for piece in pieces:
                buffer = bytearray(piece)
                assert file.write(buffer) == len(piece)
                buffer[:] = bytes(len(piece))  # the writer may reuse it
        with HashedFile(other) as streamed:
            streamed.write_all(memoryview(bytearray(piece)) for piece in pieces)
        assert path.read_bytes() == other.read_bytes() == content
        expected = blake3(content).hexdigest()
        assert file.entry == streamed.entry == FileEntry(num_bytes=len(content), checksum=expected)
        read: list[int] = []
        files = [(path, len(content))] * 2
        assert hash_files(files, on_read=read.append) == [expected] * 2
        assert sum(read) == 2 * len(content)
        assert hash_files(files, algorithm="sha256") == [hashlib.sha256(content).hexdigest()] * 2
        found = hash_files(files, algorithm="sha256", chunk_bytes=chunk_bytes)
        assert found == [sha256_of_format_2(content, chunk_bytes)] * 2


def test_torch_saves_into_a_hashed_file(tmp_path: Path) -> None:
    tree = {"a": torch.randn(5_000_000), "b": [torch.arange(7), "text"]}
    with HashedFile(tmp_path / "file.pt") as file:
        torch.save(tree, file)
    size = (tmp_path / "file.pt").stat().st_size
    assert file.entry == FileEntry(num_bytes=size, checksum=str(hash_files([(tmp_path / "file.pt", size)])[0]))
    loaded = torch.load(tmp_path / "file.pt", weights_only=True, mmap=True)
    assert torch.equal(loaded["a"], tree["a"])
    with pytest.raises(OSError, match="No space"), HashedFile(Path("/dev/full")) as full:
        full.write(b"x")


def test_an_unreadable_file_does_not_hide_the_others(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"a")
    found = hash_files([(tmp_path / "none", 1), (tmp_path / "a", 1)])
    assert isinstance(found[0], FileNotFoundError)
    assert found[1] == blake3(b"a").hexdigest()


def test_a_forked_child_can_hash(tmp_path: Path) -> None:
    content = bytes(range(256)) * 20_000
    (tmp_path / "file").write_bytes(content)
    expected = [blake3(content).hexdigest()]
    assert hash_files([(tmp_path / "file", len(content))]) == expected
    child = os.fork()
    if child == 0:  # without the parent's threads
        os._exit(0 if hash_files([(tmp_path / "file", len(content))]) == expected else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_failed_write_raises(tmp_path: Path) -> None:
    def views() -> Iterator[memoryview]:
        yield memoryview(bytearray(100))
        raise OSError(28, "No space left on device")

    for path, pieces in ((tmp_path / "file", views()), (Path("/dev/full"), iter([memoryview(bytearray(100))]))):
        with pytest.raises(OSError, match="No space"), HashedFile(path) as file:
            file.write_all(pieces)
        assert file.entry is None


def test_a_pool_works_without_new_threads() -> None:
    pool = Pool(1)
    with pool:
        pass
    assert pool.submit(sum, [1, 2]).result() == 3  # shut down, as at interpreter exit
    with pytest.raises(ZeroDivisionError):
        pool.submit(divmod, 1, 0).result()


def _publish_in_old_format(manager: CheckpointManager, step: int, content: bytes, chunk_bytes: int | None) -> Path:
    """Formats 1 (plain SHA-256) and 2 (SHA-256 by chunks), as older versions wrote them."""
    (manager.prepare(step) / "weights").write_bytes(content)
    folder = manager.publish(step, state={"step": step}).path
    files = {
        name: {"bytes": len(data), "sha256": sha256_of_format_2(data, chunk_bytes or len(data))}
        for name, data in {"weights": content, "state.json": (folder / "state.json").read_bytes()}.items()
    }
    body = {"format_version": 1, "step": step, "created_at": "2026-11-20T00:00:00+00:00", "files": files}
    if chunk_bytes is not None:
        body |= {"format_version": 2, "chunk_bytes": chunk_bytes, "packages": {"torch": "2.13.0"}}
    checksum = hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
    (folder / MANIFEST_NAME).write_text(json.dumps({**body, "manifest_sha256": checksum}, indent=1) + "\n")
    return folder


@pytest.mark.parametrize("chunk_bytes", [None, 1 << 20])
def test_checkpoints_of_older_formats_are_read_and_verified(tmp_path: Path, chunk_bytes: int | None) -> None:
    manager = CheckpointManager(tmp_path, keep_last=2)
    content = bytearray((1 << 20) + 100)
    folder = _publish_in_old_format(manager, 1, bytes(content), chunk_bytes)
    assert manager.load(1).state == {"step": 1}
    found = manager.manifest(1)
    assert (found.format_version, found.chunk_bytes) == (1 if chunk_bytes is None else 2, chunk_bytes)
    assert (found.algorithm, found.packages) == ("sha256", {} if chunk_bytes is None else {"torch": "2.13.0"})
    content[1 << 20] ^= 1
    (folder / "weights").write_bytes(content)
    with pytest.raises(CheckpointDamagedError, match="weights: altered"):
        manager.load(1)
    content[1 << 20] ^= 1
    (folder / "weights").write_bytes(content)
    (manager.prepare(2) / "weights").write_bytes(content)
    manager.publish(2, state={})
    manifest = CheckpointManifest.read(manager.load(2).path)
    assert (manifest.format_version, manifest.algorithm) == (FORMAT_VERSION, "blake3")
    assert manifest.files["weights"].checksum == blake3(content).hexdigest()
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
