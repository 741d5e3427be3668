"""The checkpoint manager.

    root/
      latest                        the name of the newest published checkpoint, one line
      step_00000020/                a published checkpoint
        manifest.json               every file's size and checksum, format version
        state.json                  the caller's state
        ...                         whatever the ranks wrote
      .partial_step_00000030/       a save under way, or left by a killed process

A checkpoint is published by one rename, after every byte of it has reached the disk. Whoever looks into `root`,
whenever, finds only whole checkpoints. One process at a time writes to a root; any number may read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn

from .errors import (
    CheckpointDamagedError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    CheckpointStateError,
    CheckpointUsageError,
    UnsupportedFormatError,
)
from .files import TRASH_PREFIX, publish_folder, remove_folder, write_text
from .manifest import MANIFEST_NAME, Manifest, ManifestError, Problem, check_file, verify_folder

__all__ = ["LATEST_NAME", "STATE_NAME", "Checkpoint", "CheckpointManager"]

LATEST_NAME = "latest"
STATE_NAME = "state.json"
PARTIAL_PREFIX = ".partial_"
_STEP_FOLDER = re.compile(r"step_([0-9]{8,})")


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A published checkpoint: its folder, its step and the state given to `publish`."""

    path: Path
    step: int
    state: Mapping[str, Any]


def folder_name(step: int) -> str:
    """The name of a step's folder."""
    return f"step_{step:08d}"


class CheckpointManager:
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

    def __init__(self, root: Path, *, keep_last: int | None = None) -> None:
        """`root` is made by the first `prepare`; `publish` keeps the newest `keep_last` checkpoints, None keeps all."""
        if keep_last is not None and keep_last < 1:
            raise CheckpointUsageError(f"keep_last={keep_last!r}: must be at least 1, or None to keep all")
        self.root = Path(root)
        self.keep_last = keep_last
        self._preparing: set[int] = set()

    # Saving

    def prepare(self, step: int, *, overwrite: bool = False) -> Path:
        """Make and return the empty folder that all ranks write step's files into.

        Deletes what killed saves left. Raises CheckpointExistsError when the step is published already, unless
        `overwrite`: then `publish` replaces it.
        """
        if step < 0:
            raise CheckpointUsageError(f"step={step!r}: must be 0 or more")
        if not overwrite and self._final(step).exists():
            raise CheckpointExistsError(
                f"{self._final(step)}: step {step} is published already. Resume from it, delete it, or pass "
                "overwrite=True."
            )
        self.root.mkdir(parents=True, exist_ok=True)
        self._preparing.discard(step)
        self._clean_up()
        partial = self._partial(step)
        partial.mkdir()
        self._preparing.add(step)
        return partial

    def publish(self, step: int, *, state: Mapping[str, Any]) -> Checkpoint:
        """Publish what was written into step's prepared folder, together with `state`; then prune.

        Call it once, after every rank has finished writing and closed its files. `state` must be JSON-able; floats
        come back to the last bit, tuples come back as lists. Returns when all is on the disk.

        Raises CheckpointStateError for a state JSON cannot hold (nothing is published and the prepared folder stays)
        and CheckpointUsageError when the step was not prepared, holds links, or uses a file name of this package.
        """
        partial, final = self._partial(step), self._final(step)
        if not partial.is_dir():
            raise CheckpointUsageError(f"step {step} was not prepared; call prepare({step}) before publish({step})")
        for name in (MANIFEST_NAME, STATE_NAME):
            if (partial / name).exists() and step in self._preparing:
                raise CheckpointUsageError(f"{name}: this name is the manager's own; write the file under another")
        text = _state_to_json(state)
        self._preparing.discard(step)
        write_text(partial / STATE_NAME, text)
        created_at = datetime.now(UTC).isoformat(timespec="seconds")
        manifest = Manifest.describe(partial, step=step, created_at=created_at)
        write_text(partial / MANIFEST_NAME, manifest.to_json())
        if final.exists():
            self._withdraw(step)
        publish_folder(partial, final)
        self._point_latest()
        self._prune(spare=step)
        return Checkpoint(path=final, step=step, state=json.loads(text))

    def abandon(self, step: int) -> None:
        """Delete what was written for a prepared step that will not be published."""
        self._preparing.discard(step)
        if self._partial(step).exists():
            remove_folder(self._partial(step))

    def prune(self) -> list[int]:
        """Delete all but the newest `keep_last` checkpoints; return the steps deleted, oldest first."""
        return self._prune(spare=None)

    def discard_after(self, step: int) -> list[int]:
        """Delete the checkpoints newer than `step`; return their steps, oldest first.

        Call it when a run goes back to an older checkpoint, so that the newest one is the run's own again.
        """
        doomed = [newer for newer in self.steps() if newer > step]
        for newer in reversed(doomed):
            self._withdraw(newer)
        return doomed

    # Loading

    def steps(self) -> list[int]:
        """The steps published, oldest first. Only names are read."""
        if not self.root.is_dir():
            return []
        found = (_STEP_FOLDER.fullmatch(path.name) for path in self.root.iterdir() if path.is_dir())
        return sorted(int(match.group(1)) for match in found if match)

    def latest(self) -> Checkpoint | None:
        """The newest published checkpoint, None when there is none.

        Its manifest and state are checked, its other files are not: `load` does that. Raises CheckpointDamagedError
        when manifest or state is damaged.
        """
        steps = self.steps()
        if not steps:
            return None
        step = steps[-1]
        try:
            manifest = Manifest.read(self._final(step))
        except ManifestError:
            self._raise_damaged(step, verify_folder(self._final(step)))
        problem = check_file(self._final(step), STATE_NAME, manifest.files[STATE_NAME])
        if problem is not None:
            self._raise_damaged(step, (problem,))
        return self._read(step)

    def load(self, step: int) -> Checkpoint:
        """A published checkpoint, after reading every file of it and comparing it with the manifest.

        Raises CheckpointNotFoundError (naming the steps there are), CheckpointDamagedError (naming the damaged files
        and the newest good step) or UnsupportedFormatError.
        """
        problems = self.verify(step)
        if problems:
            self._raise_damaged(step, problems)
        return self._read(step)

    def verify(self, step: int) -> tuple[Problem, ...]:
        """What is wrong with a published checkpoint; empty when nothing is. Raises CheckpointNotFoundError."""
        if not self._final(step).is_dir():
            steps = self.steps()
            known = f"published steps: {', '.join(map(str, steps))}" if steps else "no checkpoint is published there"
            raise CheckpointNotFoundError(f"{self.root}: no checkpoint of step {step}; {known}")
        return verify_folder(self._final(step))

    def newest_good(self) -> Checkpoint | None:
        """The newest checkpoint that verifies, None when there is none. Reads every file of those it tries."""
        step = self._newest_good_step(skip=())
        return None if step is None else self._read(step)

    def manifest(self, step: int) -> Manifest:
        """The manifest of a published checkpoint. Raises CheckpointDamagedError when it is unreadable."""
        try:
            return Manifest.read(self._final(step))
        except ManifestError as error:
            raise CheckpointDamagedError(
                f"{self._final(step) / MANIFEST_NAME}: {error}", step=step, files=(MANIFEST_NAME,)
            ) from None

    # Inside

    def _final(self, step: int) -> Path:
        return self.root / folder_name(step)

    def _partial(self, step: int) -> Path:
        return self.root / (PARTIAL_PREFIX + folder_name(step))

    def _read(self, step: int) -> Checkpoint:
        state = json.loads((self._final(step) / STATE_NAME).read_text(encoding="utf-8"))
        return Checkpoint(path=self._final(step), step=step, state=state)

    def _newest_good_step(self, skip: tuple[int, ...]) -> int | None:
        for step in reversed(self.steps()):
            if step in skip:
                continue
            try:
                if not verify_folder(self._final(step)):
                    return step
            except UnsupportedFormatError:
                continue
        return None

    def _raise_damaged(self, step: int, problems: tuple[Problem, ...]) -> NoReturn:
        good = self._newest_good_step(skip=(step,))
        advice = (
            f"The newest good checkpoint is step {good} ({self._final(good)})."
            if good is not None
            else "No other checkpoint in this folder is good."
        )
        listed = "; ".join(map(str, problems[:5])) + (f"; and {len(problems) - 5} more" if len(problems) > 5 else "")
        raise CheckpointDamagedError(
            f"{self._final(step)}: the checkpoint is damaged: {listed}. {advice}",
            step=step,
            files=tuple(problem.file for problem in problems),
            newest_good=good,
        )

    def _clean_up(self) -> None:
        kept = {self._partial(step).name for step in self._preparing}
        for path in self.root.iterdir():
            if path.name.startswith((PARTIAL_PREFIX, TRASH_PREFIX)) and path.name not in kept and path.is_dir():
                remove_folder(path)

    def _prune(self, spare: int | None) -> list[int]:
        # The one just published stays even when a run that went back left newer ones.
        if self.keep_last is None:
            return []
        doomed = [step for step in self.steps()[: -self.keep_last] if step != spare]
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


def _state_to_json(state: Mapping[str, Any]) -> str:
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
