"""Manages the checkpoints of one run: prepares and publishes new ones, deletes old ones.

    root/
      latest                        the name of the newest published checkpoint, one line
      step_00000020/                a published checkpoint
        manifest.json               every file's size and checksum, format version, versions of packages
        state.json                  the caller's state
        models.json                 names and shapes of the models' parameters, if they were passed
        ...                         the files of the ranks
      .partial_step_00000030/       a save in progress, or left by a killed process
      .lock                         locked by the process that writes here, until `close` or its end

A checkpoint is published by one rename after all its bytes have reached the disk, so readers only ever see whole
checkpoints. One process at a time writes to a root; any number may read.
"""

import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from .digest import FileEntry
from .errors import CheckpointExistsError, CheckpointStateError, CheckpointUsageError, UnsupportedFormatError
from .files import TRASH_PREFIX, check_space, is_disk_full, no_space, publish_folder, remove_folder, write_text
from .lock import lock_folder
from .manifest import MANIFEST_NAME, CheckpointManifest, ManifestError, folder_name
from .models import MODELS_NAME
from .reader import STATE_NAME, Checkpoint, CheckpointReader
from .retention import Retention, steps_to_delete

__all__ = ["LATEST_NAME", "PARTIAL_PREFIX", "Checkpoint", "CheckpointManager", "folder_name"]

LATEST_NAME = "latest"
PARTIAL_PREFIX = ".partial_"


class CheckpointManager(CheckpointReader):
    """Saves and loads the checkpoints of one run.

    A save has two parts, so that many ranks can write: one process calls `prepare`, every rank writes into the returned
    folder, and when all are done one process calls `publish`. A save that is killed in between leaves a hidden folder,
    which the next `prepare` deletes.

        manager = CheckpointManager(Path("run/checkpoints"), keep_last=3)
        folder = manager.prepare(20)
        engine.save_checkpoint(folder, tag="actor")            # every rank
        manager.publish(20, state={"epoch": 1, "sampler": sampler.state_dict()})
        ...
        checkpoint = manager.newest_good()                      # every file verified; None if there is none
    """

    def __init__(
        self,
        root: Path,
        *,
        keep_last: int | None = None,
        retention: Retention | None = None,
        lock: bool = True,
        on_publish: Callable[[Checkpoint], None] | None = None,
    ) -> None:
        """The first `prepare` creates `root`.

        `publish` keeps the newest `keep_last` checkpoints, or those that `retention` selects; without both it keeps
        all. The first call that writes locks the folder, until `close` or until the manager or the process ends.
        `lock=False` is for file systems without locks. `publish` calls `on_publish` with the new checkpoint, for
        example `AsyncUploader.add`.
        """
        if keep_last is not None and retention is not None:
            raise CheckpointUsageError(
                "the retention has a keep_last too", field="keep_last", value=keep_last, remedy="pass only one of them"
            )
        super().__init__(root)
        self.retention = retention if retention is not None else Retention(keep_last=keep_last)
        self._on_publish = on_publish
        self._preparing: set[int] = set()
        self._locks = lock
        self._lock: object = None

    def close(self) -> None:
        """Release the lock, so that another process can write. The manager's next write takes the lock again."""
        self._lock = None

    # Saving

    def prepare(self, step: int, *, overwrite: bool = False, expected_bytes: int | None = None) -> Path:
        """Create and return the empty folder into which all ranks write the files of `step`.

        Deletes the folders of killed saves. Then checks that the disk has room for `expected_bytes` plus 5% plus 1 MiB;
        `expected_bytes` defaults to the size of the newest published checkpoint (no check for the first one).

        Raises CheckpointExistsError when the step is already published, unless `overwrite`: then `publish` replaces
        it. Raises CheckpointSpaceError, and CheckpointLockedError when another process writes here.
        """
        if step < 0:
            raise CheckpointUsageError(field="step", value=step, allowed="0 or more")
        if not overwrite and self._final(step).exists():
            raise CheckpointExistsError(
                f"{self._final(step)} is already published",
                field="step",
                value=step,
                remedy="resume from it, delete it, or pass overwrite=True",
            )
        self.root.mkdir(parents=True, exist_ok=True)
        self._take_lock()
        self._preparing.discard(step)
        kept = {self._partial(other).name for other in self._preparing}
        for path in self.root.iterdir():
            if path.name.startswith((PARTIAL_PREFIX, TRASH_PREFIX)) and path.name not in kept and path.is_dir():
                remove_folder(path)
        self._check_space(expected_bytes)
        partial = self._partial(step)
        partial.mkdir()
        self._preparing.add(step)
        return partial

    def publish(
        self,
        step: int,
        *,
        state: Mapping[str, Any],
        metrics: Mapping[str, float] | None = None,
        models: Mapping[str, Mapping[str, Any]] | None = None,
        entries: Mapping[str, FileEntry] | None = None,
    ) -> Checkpoint:
        """Publish the prepared folder of `step` with `state`, then delete checkpoints that the retention drops.

        Call it once, after every rank has written and closed its files. `state` must be JSON-serializable; floats keep
        all bits, tuples become lists. `metrics` are for the retention of the best. `models` are results of
        `describe_model` by name, for `check_model` at the load. `entries` are the results of `save_state_dict` or
        `describe_files` by file name. Returns when everything is on the disk.

        Raises CheckpointStateError for a state that JSON cannot hold (the prepared folder is kept),
        CheckpointUsageError when the step was not prepared or its folder holds links or file names of this package, and
        CheckpointSpaceError when the disk is full (the prepared folder is deleted).
        """
        partial = self._partial(step)
        if not partial.is_dir():
            raise CheckpointUsageError(
                "was not prepared", field="step", value=step, remedy=f"call prepare({step}) before publish({step})"
            )
        for name in (MANIFEST_NAME, STATE_NAME, MODELS_NAME):
            if (partial / name).exists() and step in self._preparing:
                raise CheckpointUsageError(
                    "this name is the manager's own", field="files", value=name, remedy="use another file name"
                )
        text = state_to_json(state)
        values = {name: float(value) for name, value in (metrics or {}).items()}
        self._take_lock()
        self._preparing.discard(step)
        try:
            write_state(partial, text, models or {})
            manifest = CheckpointManifest.describe(partial, step=step, metrics=values, entries=entries)
            write_text(partial / MANIFEST_NAME, manifest.to_json())
        except OSError as error:
            if not is_disk_full(error):
                raise
            self.abandon(step)
            raise no_space(error, partial, f"step {step} was being published") from error
        self._reveal(step)
        self._prune(keep=step)
        published = Checkpoint(path=self._final(step), step=step, state=json.loads(text))
        if self._on_publish is not None:
            self._on_publish(published)
        return published

    def adopt(self, step: int) -> Checkpoint:
        """Publish a prepared folder that already holds a whole checkpoint with its manifest, verified and fsynced.

        For copies from elsewhere. Hashes and changes nothing, deletes no checkpoint.
        """
        partial = self._partial(step)
        manifest = CheckpointManifest.read(partial)
        if manifest.step != step:
            raise CheckpointUsageError(f"{partial} holds step {manifest.step}", field="step", value=step)
        self._take_lock()
        self._preparing.discard(step)
        self._reveal(step)
        return replace(self.read(step), verified=manifest.checksum)

    def abandon(self, step: int) -> None:
        """Delete the folder of a prepared step that will not be published."""
        self._preparing.discard(step)
        if self._partial(step).exists():
            self._take_lock()
            remove_folder(self._partial(step))

    def prune(self) -> list[int]:
        """Delete the checkpoints that the retention does not keep. Returns their steps, oldest first."""
        return self._prune(keep=None)

    def discard_after(self, step: int) -> list[int]:
        """Delete the checkpoints newer than `step`. Returns their steps, oldest first.

        Call it when a run resumes from an older checkpoint, so that the newest one belongs to this run.
        """
        deleted = [newer for newer in self.steps() if newer > step]
        if deleted:
            self._take_lock()
        for newer in reversed(deleted):
            self._withdraw(newer)
        return deleted

    def _partial(self, step: int) -> Path:
        return self.root / (PARTIAL_PREFIX + folder_name(step))

    def _take_lock(self) -> None:
        if self._locks:
            self._lock = lock_folder(self.root)

    def _check_space(self, expected_bytes: int | None) -> None:
        estimate = "expected by the caller"
        if expected_bytes is None:
            steps = self.steps()
            try:
                expected_bytes = CheckpointManifest.read(self._final(steps[-1])).num_bytes if steps else None
            except (ManifestError, UnsupportedFormatError):
                return
            estimate = f"the size of step {steps[-1]}" if steps else ""
        if expected_bytes is not None:
            check_space(self.root, expected_bytes, estimate=estimate)

    def _metrics(self, step: int) -> Mapping[str, float]:
        try:
            return CheckpointManifest.read(self._final(step)).metrics
        except (ManifestError, UnsupportedFormatError):
            return {}  # it never counts as best

    def _prune(self, keep: int | None) -> list[int]:
        # The step just published is kept even if a run that resumed from an older one left newer checkpoints.
        with no_new_pins() as pinned:
            unwanted = steps_to_delete(self.steps(), self._metrics, self.retention, keep=keep)
            deleted = [step for step in unwanted if self._final(step).absolute() not in pinned]
            if deleted:
                self._take_lock()
            for step in deleted:
                remove_folder(self._final(step))
        return deleted

    def _reveal(self, step: int) -> None:
        """Put the prepared folder, which is whole, in the place of a published one."""
        if self._final(step).exists():
            self._withdraw(step)
        publish_folder(self._partial(step), self._final(step))
        self._point_latest()

    def _withdraw(self, step: int) -> None:
        """Delete a published checkpoint; `latest` is changed first, so that it never names a missing one."""
        self._point_latest(without=step)
        remove_folder(self._final(step))

    def _point_latest(self, without: int | None = None) -> None:
        steps = [step for step in self.steps() if step != without]
        pointer = self.root / LATEST_NAME
        if steps:
            write_text(pointer, folder_name(steps[-1]) + "\n")
        else:
            pointer.unlink(missing_ok=True)


# ---- checkpoints that a thread of this process reads, such as an upload: no retention deletes them meanwhile ---------
_pin_guard = threading.Lock()
_pinned: Counter[Path] = Counter()


@contextmanager
def pinned(folder: Path) -> Iterator[bool]:
    """Keep a published checkpoint's folder while the context lasts; yields False if the folder does not exist.

    All managers of this process respect it. Replacing a checkpoint (`overwrite`, `discard_after`) is not prevented.
    """
    path = folder.absolute()
    with _pin_guard:
        exists = path.is_dir()
        _pinned.update([path] * exists)
    try:
        yield exists
    finally:
        with _pin_guard:
            _pinned.subtract([path] * exists)
            if not _pinned[path]:
                del _pinned[path]


@contextmanager
def no_new_pins() -> Iterator[Set[Path]]:
    """The absolute paths of the pinned folders, which stay the same while the context lasts."""
    with _pin_guard:
        yield _pinned.keys()


def write_state(folder: Path, state: str, models: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Write the state (JSON text) and the records of models into a checkpoint's folder; returns the files' names."""
    texts = {STATE_NAME: state, **({MODELS_NAME: json.dumps(models, indent=1) + "\n"} if models else {})}
    for name, text in texts.items():
        write_text(folder / name, text)
    return list(texts)


def state_to_json(state: Mapping[str, Any]) -> str:
    """`state` as JSON text. Raises CheckpointStateError with the dotted path of a value that JSON cannot hold."""
    try:
        text = json.dumps(dict(state), indent=1)
    except (TypeError, ValueError, RecursionError) as error:
        raise CheckpointStateError(
            f"cannot be written as JSON: {error}",
            field=_find_offender(state, "state"),
            allowed="dict, list, str, int, float, bool and None",
            remedy="store tensors and arrays in files",
        ) from error
    return text + "\n"


def _find_offender(value: Any, where: str, depth: int = 0) -> str:
    """The dotted path of the first value that JSON cannot hold."""
    if depth > 50:
        return where
    items: list[tuple[Any, Any]] = []
    if isinstance(value, Mapping):
        items = list(value.items())
    elif isinstance(value, list | tuple):
        items = list(enumerate(value))
    for key, item in items:
        try:
            json.dumps({key: item} if isinstance(value, Mapping) else item)
        except (TypeError, ValueError, RecursionError):
            return _find_offender(item, f"{where}.{key}", depth + 1)
    return where
