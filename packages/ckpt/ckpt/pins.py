"""Checkpoints that a thread of this process reads, such as an upload: no retention deletes them meanwhile."""

import threading
from collections import Counter
from collections.abc import Iterator, Set
from contextlib import contextmanager
from pathlib import Path

_guard = threading.Lock()
_pinned: Counter[Path] = Counter()


@contextmanager
def pinned(folder: Path) -> Iterator[bool]:
    """Keep a published checkpoint's folder while the context lasts; yields False if the folder does not exist.

    All managers of this process respect it. Replacing a checkpoint (`overwrite`, `discard_after`) is not prevented.
    """
    path = folder.absolute()
    with _guard:
        exists = path.is_dir()
        _pinned.update([path] * exists)
    try:
        yield exists
    finally:
        with _guard:
            _pinned.subtract([path] * exists)
            if not _pinned[path]:
                del _pinned[path]


@contextmanager
def no_new_pins() -> Iterator[Set[Path]]:
    """The absolute paths of the pinned folders, which stay the same while the context lasts."""
    with _guard:
        yield _pinned.keys()
