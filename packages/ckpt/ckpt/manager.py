"""The checkpoint manager.

    root/
      latest                        the name of the newest published checkpoint, one line
      step_00000020/                a published checkpoint
        manifest.json               every file's size and checksum, format version, versions of packages
        state.json                  the caller's state
        models.json                 names and shapes of the models' parameters, where they were given
        ...                         whatever the ranks wrote
      .partial_step_00000030/       a save under way, or left by a killed process
      .lock                         held by the process that writes here, for as long as it lives or until `close`

A checkpoint is published by one rename, after every byte of it has reached the disk. Whoever looks into `root`,
whenever, finds only whole checkpoints. One process at a time writes to a root; any number may read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from .errors import (
    CheckpointExistsError,
    CheckpointSpaceError,
    CheckpointStateError,
    CheckpointUsageError,
    UnsupportedFormatError,
)
from .files import TRASH_PREFIX, check_space, is_disk_full, publish_folder, remove_folder, write_text
from .lock import WriterLock
from .manifest import MANIFEST_NAME, FileEntry, Manifest, ManifestError
from .models import MODELS_NAME
from .packages import package_versions
from .reader import STATE_NAME, Checkpoint, CheckpointReader, folder_name
from .retention import Retention, steps_to_delete

__all__ = ["LATEST_NAME", "PARTIAL_PREFIX", "Checkpoint", "CheckpointManager", "folder_name"]

LATEST_NAME = "latest"
PARTIAL_PREFIX = ".partial_"


class CheckpointManager(CheckpointReader):
    """Saves and loads the checkpoints of one run.

    Saving has two halves, so that many ranks can write: one process calls `prepare`, every rank writes into the folder
    it returns, and when all are done one process calls `publish`. A save that dies in between leaves nothing behind
    but a hidden folder, which the next `prepare` deletes.

        manager = CheckpointManager(Path("run/checkpoints"), keep_last=3)
        folder = manager.prepare(20)
        engine.save_checkpoint(folder, tag="actor")            # every rank
        manager.publish(20, state={"epoch": 1, "sampler": sampler.state_dict()})
        ...
        newest = manager.latest()                               # None on a first start
        checkpoint = manager.load(newest.step)                  # every file checked
    """

    def __init__(
        self, root: Path, *, keep_last: int | None = None, retention: Retention | None = None, lock: bool = True
    ) -> None:
        """`root` is made by the first `prepare`.

        `publish` keeps the newest `keep_last` checkpoints, or what `retention` says; with neither it keeps all. The
        first call that writes takes the folder's lock until `close`, the manager's or the process's end; `lock=False`
        is for file systems without locks.
        """
        if keep_last is not None and retention is not None:
            raise CheckpointUsageError(f"keep_last={keep_last!r}: give it in the retention, or without one")
        super().__init__(root)
        self.retention = retention if retention is not None else Retention(keep_last=keep_last)
        self._preparing: set[int] = set()
        self._lock = WriterLock(self.root) if lock else None

    def close(self) -> None:
        """Let another process write here. The manager can be used again; its next write takes the lock again."""
        if self._lock is not None:
            self._lock.release()

    # Saving

    def prepare(self, step: int, *, overwrite: bool = False, expected_bytes: int | None = None) -> Path:
        """Make and return the empty folder that all ranks write step's files into.

        Deletes what killed saves left, then checks that the disk has room for `expected_bytes`, 5% and 1 MiB; without
        `expected_bytes` for as much as the newest published checkpoint holds (the first is not checked).

        Raises CheckpointExistsError when the step is published already, unless `overwrite`: then `publish` replaces
        it; CheckpointSpaceError; CheckpointLockedError when another process writes here.
        """
        if step < 0:
            raise CheckpointUsageError(f"step={step!r}: must be 0 or more")
        if not overwrite and self._final(step).exists():
            raise CheckpointExistsError(
                f"{self._final(step)}: step {step} is published already. Resume from it, delete it, or pass "
                "overwrite=True."
            )
        self.root.mkdir(parents=True, exist_ok=True)
        self._take_lock()
        self._preparing.discard(step)
        self._clean_up()
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
        """Publish what was written into step's prepared folder, together with `state`; then prune.

        Call it once, after every rank has finished writing and closed its files. `state` must be JSON-able; floats
        come back to the last bit, tuples come back as lists. `metrics` say what the checkpoint is worth. `models` are
        `describe_model`'s, by name, for `check_model` at the load. `entries` are what `save_state_dict` or
        `describe_files` returned, by file name. Returns when all is on the disk.

        Raises CheckpointStateError for a state JSON cannot hold (nothing is published and the prepared folder stays),
        CheckpointUsageError when the step was not prepared, holds links, or uses a file name of this package, and
        CheckpointSpaceError when the disk is full (the prepared folder is deleted).
        """
        partial, final = self._partial(step), self._final(step)
        if not partial.is_dir():
            raise CheckpointUsageError(f"step {step} was not prepared; call prepare({step}) before publish({step})")
        for name in (MANIFEST_NAME, STATE_NAME, MODELS_NAME):
            if (partial / name).exists() and step in self._preparing:
                raise CheckpointUsageError(f"{name}: this name is the manager's own; write the file under another")
        text = state_to_json(state)
        values = {name: float(value) for name, value in (metrics or {}).items()}
        self._take_lock()
        self._preparing.discard(step)
        created_at = datetime.now(UTC).isoformat(timespec="seconds")
        try:
            write_text(partial / STATE_NAME, text)
            if models:
                write_text(partial / MODELS_NAME, json.dumps(models, indent=1) + "\n")
            manifest = Manifest.describe(
                partial,
                step=step,
                created_at=created_at,
                metrics=values,
                packages=package_versions(),
                entries=entries,
            )
            write_text(partial / MANIFEST_NAME, manifest.to_json())
        except OSError as error:
            if not is_disk_full(error):
                raise
            self.abandon(step)
            raise CheckpointSpaceError(
                f"{partial}: {error.strerror} while step {step} was published. What was written of it is deleted; the "
                "earlier checkpoints are whole. Make room, or keep fewer."
            ) from error
        if final.exists():
            self._withdraw(step)
        publish_folder(partial, final)
        self._point_latest()
        self._prune(spare=step)
        return Checkpoint(path=final, step=step, state=json.loads(text))

    def adopt(self, step: int) -> Checkpoint:
        """Publish a prepared folder that holds a whole checkpoint already, manifest included, verified and fsynced.

        For a copy from elsewhere: nothing is hashed or changed, and nothing is pruned.
        """
        partial, final = self._partial(step), self._final(step)
        manifest = Manifest.read(partial)
        if manifest.step != step:
            raise CheckpointUsageError(f"{partial}: holds step {manifest.step}, not {step}")
        self._take_lock()
        self._preparing.discard(step)
        if final.exists():
            self._withdraw(step)
        publish_folder(partial, final)
        self._point_latest()
        return self.read(step)

    def abandon(self, step: int) -> None:
        """Delete what was written for a prepared step that will not be published."""
        self._preparing.discard(step)
        if self._partial(step).exists():
            self._take_lock()
            remove_folder(self._partial(step))

    def prunable(self) -> list[int]:
        """The steps that `prune` would delete, oldest first."""
        return self._doomed(spare=None)

    def prune(self) -> list[int]:
        """Delete the checkpoints that the retention does not keep; return their steps, oldest first."""
        return self._prune(spare=None)

    def discard_after(self, step: int) -> list[int]:
        """Delete the checkpoints newer than `step`; return their steps, oldest first.

        Call it when a run goes back to an older checkpoint, so that the newest one is the run's own again.
        """
        doomed = [newer for newer in self.steps() if newer > step]
        if doomed:
            self._take_lock()
        for newer in reversed(doomed):
            self._withdraw(newer)
        return doomed

    # Inside

    def _partial(self, step: int) -> Path:
        return self.root / (PARTIAL_PREFIX + folder_name(step))

    def _clean_up(self) -> None:
        kept = {self._partial(step).name for step in self._preparing}
        for path in self.root.iterdir():
            if path.name.startswith((PARTIAL_PREFIX, TRASH_PREFIX)) and path.name not in kept and path.is_dir():
                remove_folder(path)

    def _take_lock(self) -> None:
        if self._lock is not None:
            self._lock.acquire()

    def _check_space(self, expected_bytes: int | None) -> None:
        estimate = "as the caller expects"
        if expected_bytes is None:
            steps = self.steps()
            try:
                expected_bytes = Manifest.read(self._final(steps[-1])).num_bytes if steps else None
            except (ManifestError, UnsupportedFormatError):
                return
            estimate = f"as much as step {steps[-1]}" if steps else ""
        if expected_bytes is not None:
            check_space(self.root, expected_bytes, estimate=estimate)

    def _doomed(self, spare: int | None) -> list[int]:
        steps = self.steps()
        metrics: dict[int, Mapping[str, float]] = {}
        if self.retention.keep_best is not None:
            for step in steps:
                try:
                    metrics[step] = Manifest.read(self._final(step)).metrics
                except (ManifestError, UnsupportedFormatError):
                    continue  # what it is worth is unknown, so it is none of the best
        return steps_to_delete(steps, metrics, self.retention, spare=spare)

    def _prune(self, spare: int | None) -> list[int]:
        # The one just published stays even when a run that went back left newer ones.
        doomed = self._doomed(spare)
        if doomed:
            self._take_lock()
        for step in doomed:
            remove_folder(self._final(step))
        return doomed

    def _withdraw(self, step: int) -> None:
        """Take a published checkpoint away, so that `latest` never names a missing one."""
        self._point_latest(without=step)
        remove_folder(self._final(step))

    def _point_latest(self, without: int | None = None) -> None:
        steps = [step for step in self.steps() if step != without]
        pointer = self.root / LATEST_NAME
        if steps:
            write_text(pointer, folder_name(steps[-1]) + "\n")
        else:
            pointer.unlink(missing_ok=True)


def state_to_json(state: Mapping[str, Any]) -> str:
    try:
        text = json.dumps(dict(state), indent=1)
    except (TypeError, ValueError, RecursionError) as error:
        raise CheckpointStateError(
            f"state: cannot be written as JSON at {_find_offender(state, 'state')} ({error}). Use dict, list, str, "
            "int, float, bool and None; put tensors and arrays in files of their own."
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
