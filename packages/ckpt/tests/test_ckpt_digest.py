"""Checksums are equal when computed while writing and while reading, and equal to those of blake3 itself."""

import os
import tempfile
from pathlib import Path

import pytest
import torch
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt import FileEntry, digest
from ckpt.digest import HashedFile, hash_files
from ckpt.threads import Pool

PROPERTY = settings(deadline=None, derandomize=True, max_examples=40)


@PROPERTY
@given(st.lists(st.binary(max_size=40), max_size=8), st.integers(1, 50), st.sampled_from([1, 1 << 20]))
def test_written_and_read_checksums_are_equal(pieces: list[bytes], block_bytes: int, inline_bytes: int) -> None:
    content = b"".join(pieces)
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patched:
        patched.setattr(digest, "_BLOCK_BYTES", block_bytes)
        patched.setattr(digest, "_INLINE_BYTES", inline_bytes)
        patched.setattr(digest, "_FLUSH_BYTES", 60)
        path = Path(folder) / "file"
        with HashedFile(path) as file:
            for piece in pieces:
                buffer = bytearray(piece)
                assert file.write(buffer) == len(piece)
                buffer[:] = bytes(len(piece))  # the writer may reuse it
        assert path.read_bytes() == content
        expected = blake3(content).hexdigest()
        assert file.entry == FileEntry(num_bytes=len(content), checksum=expected)
        assert hash_files([path]) == [expected]


def test_torch_saves_into_a_hashed_file(tmp_path: Path) -> None:
    tree = {"a": torch.randn(5_000_000), "b": [torch.arange(7), "text"]}
    with HashedFile(tmp_path / "file.pt") as file:
        torch.save(tree, file)
    size = (tmp_path / "file.pt").stat().st_size
    assert file.entry == FileEntry(num_bytes=size, checksum=str(hash_files([tmp_path / "file.pt"])[0]))
    loaded = torch.load(tmp_path / "file.pt", weights_only=True, mmap=True)
    assert torch.equal(loaded["a"], tree["a"])
    with pytest.raises(OSError, match="No space"), HashedFile(Path("/dev/full")) as full:
        full.write(b"x")
    assert not hasattr(full, "entry")


def test_an_unreadable_file_does_not_hide_the_others(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"a")
    missing, whole = hash_files([tmp_path / "none", tmp_path / "a"])
    assert isinstance(missing, FileNotFoundError)
    assert whole == blake3(b"a").hexdigest()


def test_a_forked_child_can_hash(tmp_path: Path) -> None:
    content = bytes(range(256)) * 20_000
    (tmp_path / "file").write_bytes(content)
    expected = [blake3(content).hexdigest()]
    assert hash_files([tmp_path / "file"]) == expected
    child = os.fork()
    if child == 0:  # without the parent's threads
        os._exit(0 if hash_files([tmp_path / "file"]) == expected else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_pool_works_without_new_threads() -> None:
    pool = Pool(1)
    with pool:
        pass
    assert pool.submit(sum, [1, 2]).result() == 3  # shut down, as at interpreter exit
    with pytest.raises(ZeroDivisionError):
        pool.submit(divmod, 1, 0).result()
