"""Saving in the background: the training step pays for a copy to host memory and nothing else."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from .errors import CheckpointUsageError
from .manager import Checkpoint, CheckpointManager, state_to_json
from .state_dicts import HostSnapshot

__all__ = ["AsyncSaver"]

_log = logging.getLogger("ckpt")


class AsyncSaver:
    """Publishes checkpoints of plain state dicts from a background thread; one save is in flight at a time.

        with AsyncSaver(manager) as saver:
            for step in ...:
                ...
                saver.save(step, {"model": model.state_dict(), "optimizer": optimizer.state_dict()}, state={"lr": lr})

    Each entry becomes the file `<name>.safetensors` of the checkpoint; `load_state_dict` reads it. A save that fails
    raises at the next call of `save`, `wait` or `close`. Host memory holds one copy of the state dicts, reused by
    every save. A process killed at any instant leaves the checkpoints published so far; a process that ends normally
    first finishes the save in flight.

    For one process that holds the whole state. With several ranks, gather to one, or call `prepare` and `publish`.
    """

    def __init__(self, manager: CheckpointManager) -> None:
        """`manager` publishes and prunes; leave its writing methods alone while a save is in flight."""
        self._manager = manager
        self._snapshots: dict[str, HostSnapshot] = {}
        self._thread: threading.Thread | None = None
        self._result: Checkpoint | None = None
        self._error: BaseException | None = None

    def save(
        self,
        step: int,
        state_dicts: Mapping[str, Any],
        *,
        state: Mapping[str, Any] | None = None,
        metrics: Mapping[str, float] | None = None,
        overwrite: bool = False,
    ) -> float:
        """Copy `state_dicts` to host memory, start writing, and return the seconds that this call took.

        When the call returns, the originals may change. It waits for an earlier save still in flight. `state` and
        `metrics` are `CheckpointManager.publish`'s.

        Raises the error of the earlier save, if it failed; then nothing is saved now. Raises CheckpointStateError for
        what cannot be stored and CheckpointUsageError for names that are no file names.
        """
        started = time.perf_counter()
        self.wait()
        for name in state_dicts:
            if not name or "/" in name or "\0" in name or name.startswith("."):
                raise CheckpointUsageError(f"{name!r}: give each state dict a plain file name, without folders")
        plain_state = json.loads(state_to_json(state or {}))
        snapshots = {name: self._snapshots.get(name) or HostSnapshot() for name in state_dicts}
        for name, tree in state_dicts.items():
            snapshots[name].take(tree)
        self._snapshots = snapshots
        arguments = (step, plain_state, dict(metrics or {}), overwrite)
        self._thread = threading.Thread(target=self._write, args=arguments, name=f"ckpt-save-{step}")
        self._thread.start()
        return time.perf_counter() - started

    def wait(self) -> Checkpoint | None:
        """Wait until no save is in flight and return the newest checkpoint this object published, None before one.

        Raises the error of the save waited for, once.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error
        return self._result

    def close(self) -> None:
        """Wait, raise what went wrong, and give the host memory back."""
        try:
            self.wait()
        finally:
            self._snapshots = {}

    def __enter__(self) -> AsyncSaver:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        try:
            self.close()
        except Exception as failed:
            error.add_note(f"A checkpoint failed as well: {failed}")

    def _write(self, step: int, state: dict[str, Any], metrics: dict[str, float], overwrite: bool) -> None:
        prepared = False
        try:
            num_bytes = sum(snapshot.num_bytes for snapshot in self._snapshots.values())
            folder = self._manager.prepare(step, overwrite=overwrite, expected_bytes=num_bytes)
            prepared = True
            files = {f"{name}.safetensors": snapshot for name, snapshot in self._snapshots.items()}
            entries = {name: snapshot.write(folder / name) for name, snapshot in files.items()}
            self._result = self._manager.publish(step, state=state, metrics=metrics, entries=entries)
        except BaseException as error:
            # The thread has nobody to raise to. The log tells at once, the next call raises.
            _log.error("saving step %d in the background failed: %s", step, error)
            error.add_note(f"This is the background save of step {step}; nothing of it was published.")
            self._error = error
            if prepared:
                self._abandon(step)

    def _abandon(self, step: int) -> None:
        try:
            self._manager.abandon(step)
        except OSError as error:
            _log.error("what was written of step %d could not be deleted: %s", step, error)
