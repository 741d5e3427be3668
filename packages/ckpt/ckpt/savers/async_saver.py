"""Saving in the background: the training step pays for a copy to host memory and nothing else."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from ..errors import CheckpointUsageError
from ..manager import CheckpointManager, state_to_json
from ..manifest import FileEntry
from ..reader import Checkpoint
from .capture import Capture
from .rank_notes import RankNotes, Ranks
from .state_dicts import HostSnapshot

__all__ = ["AsyncSaver", "rank_file"]

_log = logging.getLogger("ckpt")


def rank_file(name: str, rank: int) -> str:
    """The file of a checkpoint that holds the state dict `name` of one of several ranks."""
    return f"{name}.rank{rank:05d}.safetensors"


class AsyncSaver:
    """Publishes checkpoints from a background thread; one save is in flight at a time.

        with AsyncSaver(manager) as saver:
            for step in ...:
                ...
                saver.save(step, {"model": model.state_dict(), "optimizer": optimizer.state_dict()}, state={"lr": lr})

    With `copy_beside` a step does not even pay for the copy, if nothing changes meanwhile (a rollout, the forward and
    backward pass):

        saver.save(step, {...}, copy_beside=True)
        ...
        saver.wait_copied()
        optimizer.step()

    Each entry becomes the file `<name>.safetensors` of the checkpoint; `load_state_dict` reads it. A save that fails
    raises at the next call of `save`, `wait` or `close`. Host memory holds one copy of the state dicts, reused by
    every save. A process killed at any instant leaves the checkpoints published so far; a process that ends normally
    first finishes the save in flight.

    Several ranks, each with its own part of the state, make one checkpoint: every one makes an AsyncSaver of the same
    folder, with `ranks`, and calls `save` alike. Each copies and writes for itself; the publishing process (rank 0, or
    a driver without a rank) publishes when the files of all are on the disk. Nobody's training waits for it, and no
    collective is used. A rank's entry becomes `<name>.rank<5 digits>.safetensors` (`rank_file`). What fails anywhere is
    raised in every process by the same call.
    """

    def __init__(self, manager: CheckpointManager, *, ranks: Ranks | None = None, patience_s: float = 1800.0) -> None:
        """`manager` publishes and prunes; leave its writing methods alone while a save is in flight.

        In a process that does not publish it only says which folder. `patience_s`: with several ranks, how long one
        waits for another in one save before it takes it for dead.
        """
        self._manager = manager
        self._ranks = ranks if ranks is not None else Ranks(num_ranks=1, rank=0, run_id="alone")
        # Without other processes there is nobody to write notes to.
        is_alone = ranks is None or ranks.num_processes == 1
        self._notes = None if is_alone else RankNotes(manager.root, self._ranks, patience_s=patience_s)
        self._snapshots: dict[str, HostSnapshot] = {}
        self._num_saves = 0
        self._thread: threading.Thread | None = None
        self._copied = threading.Event()
        self._copied.set()
        self._result: Checkpoint | None = None
        self._error: BaseException | None = None

    def save(
        self,
        step: int,
        state_dicts: Mapping[str, Any],
        *,
        state: Mapping[str, Any] | None = None,
        metrics: Mapping[str, float] | None = None,
        models: Mapping[str, Mapping[str, Any]] | None = None,
        overwrite: bool = False,
        copy_beside: bool = False,
    ) -> float:
        """Copy `state_dicts` to host memory, start writing, and return the seconds that this call took.

        When the call returns, the originals may change; with `copy_beside` not before `wait_copied` returns. It waits
        for an earlier save still in flight. A value is a state dict, or a `Capture`, such as DeepSpeedState. `state`,
        `metrics`, `models` and `overwrite` are `CheckpointManager.publish`'s and `prepare`'s; with several ranks the
        publishing process's count.

        Raises the error of the earlier save, if it failed; then nothing is saved now. Raises CheckpointStateError for
        what cannot be stored and CheckpointUsageError for names that are no file names.
        """
        started = time.perf_counter()
        self.wait()
        for name in state_dicts:
            if not name or "/" in name or "\0" in name or name.startswith("."):
                raise CheckpointUsageError(f"{name!r}: give each state dict a plain file name, without folders")
        if self._ranks.rank is None and state_dicts:
            raise CheckpointUsageError(f"{', '.join(state_dicts)}: a process without a rank writes no state dicts")
        number = self._num_saves = self._num_saves + 1
        try:
            plain_state = json.loads(state_to_json(state or {}))
            captures = self._take(state_dicts)
            if not copy_beside:
                _copy(captures)
        except BaseException as error:
            self._tell_failure(number, error)
            raise
        if copy_beside:
            self._copied.clear()
        published = {"state": plain_state, "metrics": dict(metrics or {}), "models": dict(models or {})}
        self._thread = threading.Thread(
            target=self._run, args=(number, step, captures, published, overwrite), name=f"ckpt-save-{step}"
        )
        self._thread.start()
        return time.perf_counter() - started

    def wait_copied(self) -> float:
        """Wait until the originals of the save in flight may change; the seconds that took.

        Returns too when the copying failed: the next `save`, `wait` or `close` raises what went wrong.
        """
        started = time.perf_counter()
        self._copied.wait()
        return time.perf_counter() - started

    def wait(self) -> Checkpoint | None:
        """Wait until no save is in flight and return the newest checkpoint this object saved, None before one.

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
            if self._notes is not None:
                self._notes.close()

    def __enter__(self) -> AsyncSaver:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        if self._notes is not None:
            self._notes.cancel()  # the other ranks may be dead too
        try:
            self.close()
        except Exception as failed:
            error.add_note(f"A checkpoint failed as well: {failed}")

    # Inside

    def _take(self, state_dicts: Mapping[str, Any]) -> dict[str, Capture | HostSnapshot]:
        captures: dict[str, Capture | HostSnapshot] = {}
        snapshots: dict[str, HostSnapshot] = {}
        for name, item in state_dicts.items():
            if isinstance(item, Capture):
                item.take()
                captures[name] = item
            else:
                captures[name] = snapshots[name] = self._snapshots.get(name) or HostSnapshot()
                snapshots[name].take(item)
        self._snapshots = snapshots
        return captures

    def _run(
        self,
        number: int,
        step: int,
        captures: Mapping[str, Capture | HostSnapshot],
        published: Mapping[str, Any],
        overwrite: bool,
    ) -> None:
        try:
            if not self._copied.is_set():
                self._copy_beside(number, captures)
            if self._ranks.is_publisher:
                self._result = self._publish(number, step, captures, published, overwrite)
            else:
                self._result = self._contribute(number, step, captures)
        except BaseException as error:
            # The thread has nobody to raise to. The log tells at once, the next call raises.
            _log.error("saving step %d in the background failed: %s", step, error)
            error.add_note(f"This is the background save of step {step}; nothing of it was published.")
            self._error = error

    def _copy_beside(self, number: int, captures: Mapping[str, Capture | HostSnapshot]) -> None:
        try:
            _copy(captures)
        except BaseException as error:
            self._tell_failure(number, error)
            raise
        finally:
            self._copied.set()

    def _publish(
        self,
        number: int,
        step: int,
        captures: Mapping[str, Capture | HostSnapshot],
        published: Mapping[str, Any],
        overwrite: bool,
    ) -> Checkpoint:
        # The other ranks hold about as much; a process without a rank goes by the newest checkpoint.
        expected = sum(capture.num_bytes for capture in captures.values()) * self._ranks.num_ranks
        prepared = False
        try:
            folder = self._manager.prepare(
                step, overwrite=overwrite, expected_bytes=expected if self._ranks.rank is not None else None
            )
            prepared = True
            if self._notes is not None:
                self._notes.delete_others()
                self._notes.open(number, folder)
            entries = self._write(folder, captures)
            if self._notes is not None:
                entries |= self._notes.collect(number)
            checkpoint = self._manager.publish(step, entries=entries, **published)
        except BaseException as error:
            self._tell_failure(number, error)
            if prepared:
                self._abandon(step)
            raise
        if self._notes is not None:
            self._notes.conclude(number, None)
        return checkpoint

    def _contribute(self, number: int, step: int, captures: Mapping[str, Capture | HostSnapshot]) -> Checkpoint:
        assert self._notes is not None, "a process alone publishes itself"
        try:
            self._notes.report(number, self._write(self._notes.await_folder(number), captures))
        except Exception as error:
            self._tell_failure(number, error)
            self._notes.await_outcome(number)  # it names the first cause, which need not be this one
            raise
        self._notes.await_outcome(number)
        return self._manager.read(step)

    def _write(self, folder: Path, captures: Mapping[str, Capture | HostSnapshot]) -> dict[str, FileEntry]:
        entries: dict[str, FileEntry] = {}
        for name, capture in captures.items():
            if isinstance(capture, Capture):
                entries |= capture.write(folder, name)
            else:
                assert self._ranks.rank is not None, "a process without a rank writes nothing"
                file = f"{name}.safetensors" if self._ranks.num_ranks == 1 else rank_file(name, self._ranks.rank)
                entries[file] = capture.write(folder / file)
        return entries

    def _tell_failure(self, number: int, error: BaseException) -> None:
        if self._notes is None:
            return
        try:
            if self._ranks.is_publisher:
                self._notes.conclude(number, error)
            else:
                self._notes.report(number, error)
        except OSError as failed:
            _log.error("the other ranks could not be told: %s", failed)

    def _abandon(self, step: int) -> None:
        try:
            self._manager.abandon(step)
        except OSError as error:
            _log.error("what was written of step %d could not be deleted: %s", step, error)


def _copy(captures: Mapping[str, Capture | HostSnapshot]) -> None:
    for capture in captures.values():
        capture.copy()
