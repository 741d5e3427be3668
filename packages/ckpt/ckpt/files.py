"""Durable file operations: what is called done here survives a power cut.

A rename is atomic but not durable: the file's bytes, and the folder that holds its name, each need an fsync.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .errors import CheckpointSpaceError, ExportError

__all__ = [
    "check_space",
    "fsync_file",
    "fsync_folder",
    "is_disk_full",
    "new_folder",
    "publish_folder",
    "remove_folder",
    "walk_files",
    "write_text",
]

#: Folders whose name begins so are leftovers on their way out; anyone may delete them.
TRASH_PREFIX = ".trash_"


def check_space(folder: Path, num_bytes: int, *, estimate: str) -> None:
    """Raise CheckpointSpaceError unless `folder`'s disk has room for `num_bytes`, 5% and 1 MiB.

    `estimate` says in the message where `num_bytes` comes from.
    """
    needed = num_bytes + num_bytes // 20 + (1 << 20)
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise CheckpointSpaceError(
            f"{folder}: a checkpoint needs about {needed:,} bytes ({estimate}, and 5% and 1 MiB more), the disk has "
            f"{free:,} free. Nothing was written. Make room, keep fewer checkpoints, or save to another disk."
        )


def is_disk_full(error: OSError) -> bool:
    """Whether the system refused to write for want of room: the disk's, the quota's or the file size limit's."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def fsync_file(path: Path) -> None:
    """Force a file's bytes to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fsync_folder(path: Path) -> None:
    """Force a folder's names to the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def partial_name(path: Path) -> Path:
    """The name under which `write_text` writes before the rename."""
    return path.with_name(f".{path.name}.partial")


def write_text(path: Path, text: str) -> None:
    """Write a small file so that a reader sees the old text or the new, never a part, even after a power cut."""
    partial = partial_name(path)
    partial.write_text(text, encoding="utf-8")
    fsync_file(partial)
    os.replace(partial, path)
    fsync_folder(path.parent)


def publish_folder(partial: Path, final: Path) -> None:
    """Make the folder `partial` appear as `final`, which must not exist; the names inside are made durable first.

    Both lie in the same parent folder. The files' own bytes are the caller's to fsync.
    """
    for folder, _, _ in os.walk(partial):
        fsync_folder(Path(folder))
    os.rename(partial, final)
    fsync_folder(final.parent)


@contextmanager
def new_folder(out: Path, *, overwrite: bool = False) -> Iterator[Path]:
    """A hidden empty folder to fill, which becomes `out` when the block ends; after an error nothing is left of it.

    The files' own bytes are the caller's to fsync. Raises ExportError when `out` exists and is not an empty folder,
    unless `overwrite`.
    """
    if out.exists() and not overwrite and (not out.is_dir() or any(out.iterdir())):
        raise ExportError(
            f"{out}: exists and is not an empty folder; choose another or overwrite it (overwrite=True, --overwrite)"
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
    """Delete a folder; a reader never finds it half deleted under its name."""
    trash = path.with_name(TRASH_PREFIX + path.name.lstrip("."))
    if trash.exists():
        shutil.rmtree(trash)
    os.rename(path, trash)
    fsync_folder(path.parent)
    shutil.rmtree(trash)


def walk_files(root: Path) -> Iterator[Path]:
    """Every file below `root`, sorted by relative path. A symbolic link is yielded as itself, not followed."""
    found = []
    for folder, subfolders, names in os.walk(root):
        links = [name for name in subfolders if (Path(folder) / name).is_symlink()]
        found += [Path(folder) / name for name in (*names, *links)]
    yield from sorted(found, key=lambda path: path.relative_to(root).as_posix())
