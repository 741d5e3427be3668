"""Saves checkpoints in the background: the training step pays only for a copy to host memory."""

import json
import logging
import threading
import time
from collections.abc import Mapping
from typing import Any, Self, TypeAlias

from ..digest import FileEntry
from ..errors import CheckpointUsageError
from ..manager import CheckpointManager, state_to_json
from ..reader import Checkpoint
from ..store.hosts import HostCheckpoints
from ..store.shared_folder import SharedFolder
from .capture import Capture
from .coordination import SaveCoordinator, SaverRanks
from .state_dicts import HostSnapshot

_log = logging.getLogger("ckpt")

_Captures: TypeAlias = Mapping[str, Capture | HostSnapshot]


def rank_file(name: str, rank: int) -> str:
    """The checkpoint's file for the state dict `name` of one rank, when several ranks save."""
    return f"{name}.rank{rank:05d}.safetensors"


class AsyncSaver:
    """Publishes checkpoints from a background thread; one save is in flight at a time.

        with AsyncSaver(manager) as saver:
            for step in ...:
                ...
                saver.save(step, {"model": model.state_dict(), "optimizer": optimizer.state_dict()}, state={"lr": lr})

    With `copy_in_background` the step does not pay for the copy either. Use it when the weights stay unchanged for a
    while after the save (a rollout, the next forward and backward pass):

        saver.save(step, {...}, copy_in_background=True)
        ...
        saver.wait_copied()
        optimizer.step()

    Each entry becomes the file `<name>.safetensors` of the checkpoint; `load_state_dict` reads it. A failed save raises
    its error at the next call of `save`, `wait` or `close`. Host memory holds one copy of the state dicts; all saves
    reuse it. When the process is killed, the published checkpoints stay intact. When it ends normally, it finishes the
    save in flight first.

    Several ranks, each with its own part of the state, can save one checkpoint: each creates an AsyncSaver for the same
    folder, with `ranks`, and calls `save` with the same steps. Each rank copies and writes its own part. The publishing
    process (rank 0, or a driver without a rank) publishes when the files of all ranks are on the disk. No training step
    waits for this, and no collective is used. An entry of a rank becomes `<name>.rank<5 digits>.safetensors`
    (`rank_file`). An error on any rank is raised in every process by the same call. For ranks on hosts that share no
    folder, pass a `HostCheckpoints` in place of the manager.
    """

    def __init__(
        self,
        manager: CheckpointManager | HostCheckpoints,
        *,
        ranks: SaverRanks | None = None,
        timeout_s: float = 1800.0,
    ) -> None:
        """`manager` publishes and prunes. Do not call its writing methods while a save is in flight.

        In a process that does not publish, `manager` only names the folder. `timeout_s`: with several ranks, how long a
        process waits for another one during a save before it raises.
        """
        self._store = SharedFolder(manager) if isinstance(manager, CheckpointManager) else manager
        self._ranks = ranks if ranks is not None else SaverRanks(num_ranks=1, rank=0, run_id="alone")
        is_alone = ranks is None or ranks.num_processes == 1
        self._coordinator: SaveCoordinator | None = None
        if not is_alone:
            self._coordinator = SaveCoordinator(self._store, self._ranks, timeout_s=timeout_s)
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
        copy_in_background: bool = False,
    ) -> float:
        """Copy `state_dicts` to host memory, start writing, and return the seconds that this call took.

        The originals may change when the call returns; with `copy_in_background` only when
        `wait_copied` returns. The call first waits for an earlier save that is still in flight. Each value is a
        state dict or a `Capture`, such as DeepSpeedState. `state`, `metrics` and `models` are arguments of
        `CheckpointManager.publish`, `overwrite` of `CheckpointManager.prepare`; with several ranks, only those of the
        publishing process are used.

        Raises the error of the earlier save if it failed, and then saves nothing. Raises CheckpointStateError for a
        value that cannot be stored and CheckpointUsageError for a name that is not a plain file name.
        """
        started = time.perf_counter()
        self.wait()
        for name in state_dicts:
            if not name or "/" in name or "\0" in name or name.startswith("."):
                raise CheckpointUsageError(field="state_dicts", value=name, allowed="plain file names, without folders")
        if self._ranks.rank is None and state_dicts:
            raise CheckpointUsageError(
                "a process without a rank writes no state dicts", field="state_dicts", value=", ".join(state_dicts)
            )
        number = self._num_saves = self._num_saves + 1
        try:
            plain_state = json.loads(state_to_json(state or {}))
            captures = self._take(state_dicts)
            if not copy_in_background:
                _copy(captures)
        except BaseException as error:
            self._report_failure(number, error)
            raise
        if copy_in_background:
            self._copied.clear()
        published = {"state": plain_state, "metrics": dict(metrics or {}), "models": dict(models or {})}
        arguments = (number, step, captures, published, overwrite)
        thread = threading.Thread(target=self._run, args=arguments, name=f"ckpt-save-{step}")
        try:
            thread.start()
        except RuntimeError as error:  # no more threads
            self._copied.set()
            self._report_failure(number, error)
            raise
        self._thread = thread
        return time.perf_counter() - started

    def wait_copied(self) -> float:
        """Wait until the originals of the save in flight may change; return the seconds this took.

        Also returns when the copy failed: the next `save`, `wait` or `close` raises the error.
        """
        started = time.perf_counter()
        self._copied.wait()
        return time.perf_counter() - started

    def wait(self) -> Checkpoint | None:
        """Wait for the save in flight. Return the newest checkpoint this object saved, None if there is none.

        Raises the error of that save, once.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error
        return self._result

    def close(self) -> None:
        """Wait for the save in flight, raise its error, and free the host memory."""
        try:
            self.wait()
        finally:
            self._snapshots = {}
            if self._coordinator is not None:
                self._coordinator.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.close()
            return
        self._store.cancel()
        if self._coordinator is not None:
            self._coordinator.cancel()  # the other ranks may be dead too
        try:
            self.close()
        except Exception as failed:
            error.add_note(f"A checkpoint failed as well: {failed}")

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

    def _run(self, number: int, step: int, captures: _Captures, published: Mapping[str, Any], overwrite: bool) -> None:
        try:
            if not self._copied.is_set():
                self._copy_in_background(number, captures)
            if self._ranks.is_publisher:
                self._result = self._publish(number, step, captures, published, overwrite)
            else:
                self._result = self._contribute(number, step, captures)
        except BaseException as error:
            # A thread cannot raise to its caller: log the error now, raise it in the next call.
            _log.error("the background save of step %d failed: %s", step, error)
            error.add_note(f"The background save of step {step} failed; nothing of it was published.")
            self._error = error

    def _copy_in_background(self, number: int, captures: _Captures) -> None:
        try:
            _copy(captures)
        except BaseException as error:
            self._report_failure(number, error)
            raise
        finally:
            self._copied.set()

    def _publish(
        self, number: int, step: int, captures: _Captures, published: Mapping[str, Any], overwrite: bool
    ) -> Checkpoint:
        # The other ranks hold about as much. A process without a rank lets the manager estimate.
        expected = sum(capture.num_bytes for capture in captures.values()) * self._ranks.num_ranks
        name = ""
        try:
            name = self._store.open(
                step, overwrite=overwrite, expected_bytes=expected if self._ranks.rank is not None else None
            )
            if self._coordinator is not None:
                self._coordinator.open(number, name)
            entries = self._write(name, captures) if captures else {}
            if self._coordinator is not None:
                entries |= self._coordinator.collect(number)
            checkpoint = self._store.publish(name, step, entries=entries, **published)
        except BaseException as error:
            self._report_failure(number, error)
            if name:
                try:
                    self._store.abandon(name, step)
                except Exception as failed:  # every storage has classes of its own
                    _log.error("could not delete the unpublished files of step %d: %s", step, failed)
            raise
        if self._coordinator is not None:
            self._coordinator.conclude(number, None)
        return checkpoint

    def _contribute(self, number: int, step: int, captures: _Captures) -> Checkpoint:
        assert self._coordinator is not None, "a single process publishes itself"
        name = ""
        try:
            try:
                name = self._coordinator.await_open(number)
                self._coordinator.report(number, self._write(name, captures))
            except Exception as error:
                self._report_failure(number, error)
                self._coordinator.await_outcome(number)  # raises the first cause, which may be another rank's
                raise
            self._coordinator.await_outcome(number)
        except Exception:
            if name:
                self._store.drop(name)
            raise
        return self._store.finish(name, step)

    def _write(self, name: str, captures: _Captures) -> dict[str, FileEntry]:
        """Write this process's part of the checkpoint `name`, and deliver it."""
        folder = self._store.folder(name, sum(capture.num_bytes for capture in captures.values()))
        entries: dict[str, FileEntry] = {}
        for part, capture in captures.items():
            if isinstance(capture, Capture):
                entries |= capture.write(folder, part)
            else:
                assert self._ranks.rank is not None, "a process without a rank writes nothing"
                file = f"{part}.safetensors" if self._ranks.num_ranks == 1 else rank_file(part, self._ranks.rank)
                entries[file] = capture.write(folder / file)
        self._store.deliver(name, entries)
        return entries

    def _report_failure(self, number: int, error: BaseException) -> None:
        if self._coordinator is None:
            return
        try:
            if self._ranks.is_publisher:
                self._coordinator.conclude(number, error)
            else:
                self._coordinator.report(number, error)
        except Exception as failed:
            _log.error("could not report the failure to the other ranks: %s", failed)


def _copy(captures: _Captures) -> None:
    for capture in captures.values():
        capture.copy()
