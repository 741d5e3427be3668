"""Reading a folder of checkpoints: needs no lock, and finds only whole checkpoints, whoever writes meanwhile."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from .errors import CheckpointDamagedError, CheckpointNotFoundError, UnsupportedFormatError
from .manifest import MANIFEST_NAME, Manifest, ManifestError, Problem, check_files, verify_folder

__all__ = ["STATE_NAME", "Checkpoint", "CheckpointReader", "folder_name"]

STATE_NAME = "state.json"
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


class CheckpointReader:
    """The published checkpoints below `root`, which need not exist yet."""

    def __init__(self, root: Path) -> None:
        self.root = Path(root)

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
        problems = check_files(self._final(step), manifest, [STATE_NAME])
        if problems:
            self._raise_damaged(step, tuple(problems))
        return self.read(step)

    def load(self, step: int) -> Checkpoint:
        """A published checkpoint, after reading every file of it and comparing it with the manifest.

        Raises CheckpointNotFoundError (naming the steps there are), CheckpointDamagedError (naming the damaged files
        and the newest good step) or UnsupportedFormatError.
        """
        problems = self.verify(step)
        if problems:
            self._raise_damaged(step, problems)
        return self.read(step)

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
        return None if step is None else self.read(step)

    def manifest(self, step: int) -> Manifest:
        """The manifest of a published checkpoint. Raises CheckpointDamagedError when it is unreadable."""
        try:
            return Manifest.read(self._final(step))
        except ManifestError as error:
            raise CheckpointDamagedError(
                f"{self._final(step) / MANIFEST_NAME}: {error}", step=step, files=(MANIFEST_NAME,)
            ) from None

    def read(self, step: int) -> Checkpoint:
        """A published checkpoint, its files unchecked. Raises CheckpointDamagedError when its state is no JSON."""
        try:
            state = json.loads((self._final(step) / STATE_NAME).read_text(encoding="utf-8"))
        except ValueError as error:
            raise CheckpointDamagedError(
                f"{self._final(step) / STATE_NAME}: is no JSON: {error}", step=step, files=(STATE_NAME,)
            ) from error
        return Checkpoint(path=self._final(step), step=step, state=state)

    # Inside

    def _final(self, step: int) -> Path:
        return self.root / folder_name(step)

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
