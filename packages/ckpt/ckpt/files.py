"""Durable file operations: when a function here returns, its result survives a power failure.

A rename is atomic but not durable: the bytes of the file and the folder that holds its name each need an fsync.
"""

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .errors import CheckpointSpaceError, ExportError

#: Prefix of folders that are being deleted; any process may delete them.
TRASH_PREFIX = ".trash_"


def check_space(folder: Path, num_bytes: int, *, estimate: str) -> None:
    """Raise CheckpointSpaceError unless the disk of `folder` has room for `num_bytes` plus 5% plus 1 MiB.

    `estimate` tells in the message where `num_bytes` comes from.
    """
    needed = num_bytes + num_bytes // 20 + (1 << 20)
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise CheckpointSpaceError(
            f"{folder}: a checkpoint needs about {needed:,} bytes ({estimate}, plus 5% and 1 MiB), but the disk has "
            f"{free:,} free. Nothing was written",
            remedy="free some space, keep fewer checkpoints, or save to another disk",
        )


def no_space(error: OSError, path: Path, doing: str) -> CheckpointSpaceError:
    """The error of a disk that is full while `doing`, with the free space on the disk of `path`."""
    free = shutil.disk_usage(next(folder for folder in path.parents if folder.exists())).free
    return CheckpointSpaceError(
        f"{path}: {error.strerror} while {doing}; {free:,} bytes are free. Its files are deleted; earlier checkpoints "
        "are whole",
        remedy="free some space, or keep fewer checkpoints",
    )


def is_disk_full(error: OSError) -> bool:
    """True if the disk is full, or a quota or file size limit is reached."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def fsync_file(path: Path) -> None:
    """Flush a file's bytes, or the file names of a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def partial_name(path: Path) -> Path:
    """The temporary name that `write_text` uses before the rename."""
    return path.with_name(f".{path.name}.partial")


def write_text(path: Path, text: str) -> None:
    """Write a small file atomically: a reader sees the old text or the new text, even after a power failure."""
    partial = partial_name(path)
    partial.write_text(text, encoding="utf-8")
    fsync_file(partial)
    os.replace(partial, path)
    fsync_file(path.parent)


def publish_folder(partial: Path, final: Path) -> None:
    """Rename the folder `partial` to `final`, which must not exist, after flushing the names inside.

    Both are in the same parent folder. The caller has fsynced the files' bytes.
    """
    for folder, _, _ in os.walk(partial):
        fsync_file(Path(folder))
    os.rename(partial, final)
    fsync_file(final.parent)


@contextmanager
def new_folder(out: Path, *, overwrite: bool = False) -> Iterator[Path]:
    """A hidden empty folder to fill, which is renamed to `out` when the block ends and deleted after an error.

    The caller fsyncs the files' bytes. Raises ExportError when `out` exists and is not an empty folder, unless
    `overwrite`.
    """
    if out.exists() and not overwrite and (not out.is_dir() or any(out.iterdir())):
        raise ExportError(
            field="out",
            value=str(out),
            allowed="a new or empty folder",
            remedy="choose another, or overwrite it (overwrite=True, --overwrite)",
        )
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_name(f".{out.name}.partial")
    if partial.exists():
        remove_folder(partial)
    partial.mkdir()
    try:
        yield partial
        if out.exists():
            remove_folder(out)
        publish_folder(partial, out)
    except BaseException:
        if partial.exists():
            remove_folder(partial)
        raise


def remove_folder(path: Path) -> None:
    """Delete a folder. It is renamed first, so readers never see it half deleted."""
    trash = path.with_name(TRASH_PREFIX + path.name.lstrip("."))
    if trash.exists():
        shutil.rmtree(trash)
    os.rename(path, trash)
    fsync_file(path.parent)
    shutil.rmtree(trash)


def walk_files(root: Path) -> Iterator[Path]:
    """Every file below `root`, sorted by relative path. Symbolic links are yielded, not followed."""
    paths: list[Path] = []
    for folder, subfolders, names in os.walk(root):
        links = [name for name in subfolders if (Path(folder) / name).is_symlink()]
        paths += [Path(folder) / name for name in (*names, *links)]
    yield from sorted(paths, key=lambda path: path.relative_to(root).as_posix())
