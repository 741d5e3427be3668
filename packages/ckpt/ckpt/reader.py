"""Reads a folder of checkpoints. Needs no lock and sees only whole checkpoints, also while another process writes."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

from plinth_base.errors import listed

from .errors import CheckpointDamagedError, CheckpointNotFoundError, UnsupportedFormatError
from .manifest import (
    MANIFEST_NAME,
    CheckpointManifest,
    ManifestError,
    Problem,
    compare_folder,
    folder_name,
    step_of,
    verify_folder,
)

STATE_NAME = "state.json"


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A published checkpoint: its folder, its step and the state passed to `publish`."""

    path: Path
    step: int
    state: Mapping[str, Any] = field(repr=False)  # the states of random generators alone print as 20,000 characters
    verified: str | None = field(default=None, compare=False)
    """Checksum of the manifest with which `load` or `newest_good` compared all files; None if they did not."""


class CheckpointReader:
    """The published checkpoints below `root`, which need not exist yet."""

    def __init__(self, root: Path) -> None:
        self.root = Path(root)

    def steps(self) -> list[int]:
        """The published steps, oldest first. Reads only folder names."""
        if not self.root.is_dir():
            return []
        steps = (step_of(path) for path in self.root.iterdir() if path.is_dir())
        return sorted(step for step in steps if step is not None)

    def load(self, step: int) -> Checkpoint:
        """A published checkpoint, after comparing every file with the manifest.

        Raises CheckpointNotFoundError (with the published steps; also if another process deletes it meanwhile),
        CheckpointDamagedError (with the damaged files and the newest good step) or UnsupportedFormatError.
        """
        checkpoint = self._load(step)
        if not isinstance(checkpoint, Checkpoint):
            self._raise_damaged(step, checkpoint)
        return checkpoint

    def verify(self, step: int) -> tuple[Problem, ...]:
        """Read all files of a published checkpoint; return the differences from its manifest.

        Raises CheckpointNotFoundError.
        """
        self._check_exists(step)
        return verify_folder(self._final(step))

    def newest_good(
        self, *, on_skip: Callable[[int, str], object] = lambda step, reason: None, without: int | None = None
    ) -> Checkpoint | None:
        """The newest checkpoint that verifies, None if there is none. Reads all files of the checkpoints it tries.

        `on_skip` gets the step of each checkpoint that is passed over, and the reason; `without` is not tried.
        """
        tried = {without}
        # Listed again each time: a process that writes here may publish a newer one and delete the one being read.
        while untried := [step for step in self.steps() if step not in tried]:
            tried.add(step := untried[-1])
            try:
                checkpoint = self._load(step)
                if isinstance(checkpoint, Checkpoint):
                    return checkpoint
                reason = listed(checkpoint, separator="; ")
            except CheckpointNotFoundError:
                continue
            except (UnsupportedFormatError, CheckpointDamagedError) as error:
                reason = str(error)
            on_skip(step, reason)
        return None

    def manifest(self, step: int) -> CheckpointManifest:
        """The manifest of a published checkpoint. Raises CheckpointDamagedError when it cannot be read."""
        try:
            return CheckpointManifest.read(self._final(step))
        except ManifestError as error:
            raise CheckpointDamagedError(
                f"{self._final(step) / MANIFEST_NAME}: {error}", step=step, files=(MANIFEST_NAME,)
            ) from None

    def read(self, step: int) -> Checkpoint:
        """A published checkpoint without verifying it. Raises CheckpointDamagedError when its state is not JSON."""
        try:
            state = json.loads((self._final(step) / STATE_NAME).read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:
            raise CheckpointDamagedError(
                f"{self._final(step) / STATE_NAME}: is not JSON: {error}", step=step, files=(STATE_NAME,)
            ) from error
        return Checkpoint(path=self._final(step), step=step, state=state)

    def _final(self, step: int) -> Path:
        return self.root / folder_name(step)

    def _check_exists(self, step: int) -> None:
        if not self._final(step).is_dir():
            known = ", ".join(map(str, self.steps())) or "no step is published"
            raise CheckpointNotFoundError(f"no such checkpoint in {self.root}", field="step", value=step, allowed=known)

    def _load(self, step: int) -> Checkpoint | tuple[Problem, ...]:
        """The checkpoint, or its differences from its manifest. Raises CheckpointNotFoundError if it is deleted."""
        self._check_exists(step)
        try:
            manifest, problems = compare_folder(self._final(step))
            if manifest is not None and not problems:
                return replace(self.read(step), verified=manifest.checksum)
        except FileNotFoundError:
            self._check_exists(step)
            raise
        self._check_exists(step)
        return problems

    def _raise_damaged(self, step: int, problems: tuple[Problem, ...]) -> NoReturn:
        newest = self.newest_good(without=step)
        good = None if newest is None else newest.step
        advice = (
            f"The newest good checkpoint is step {good} ({self._final(good)})."
            if good is not None
            else "No other checkpoint in this folder is good."
        )
        raise CheckpointDamagedError(
            f"{self._final(step)}: the checkpoint is damaged: {listed(problems, separator='; ')}. {advice}",
            step=step,
            files=tuple(problem.file for problem in problems),
            newest_good=good,
        )
