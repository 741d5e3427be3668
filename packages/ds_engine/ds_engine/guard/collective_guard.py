"""CollectiveGuard: detects ranks whose collectives diverge or stall, in any torch.distributed program.

    with CollectiveGuard():
        train()

Ranks hang if they call different collectives, or if one of them calls none. The guard logs every collective of a rank
and compares the logs through the rendezvous store, so an error is raised on all ranks within seconds:

* lockstep  the ranks of a group compare each collective before it is issued, so a mismatch is never issued. One store
            round trip per collective (about 0.2 ms on one host); for the CPU, where a mismatch otherwise kills the
            process, and for debugging.
* watch     a thread compares counts and hashes twice per second and aborts the communicators if they differ. A few
            microseconds per collective; for GPU training.

A stopped guard costs nothing: it restores torch's own methods.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Any, Literal, Self

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from ..errors import CollectiveMismatchError, EngineConfigError, RankStalledError
from ..torch_errors import classify_torch_error
from ..upstream import FENCE
from .collective_log import METHODS, SIZED_BY, CollectiveRecord, GroupLog, RankDump, call_site, describe_call, diagnose

COLLECTIVES = FENCE.patch(
    name="collective guard",
    reason="torch has no hook before a collective, and no public name of the rendezvous store and of the abort",
    otherwise="refused",
    replaces={"torch.distributed:ProcessGroup": tuple(METHODS)},
    reads={
        "torch.distributed.distributed_c10d": ("_get_default_store()",),
        "torch.distributed:ProcessGroup": ("_get_backend",),
    },
)
_TICK_S = 0.5
_DUMP_WAIT_S = 5.0
_EXIT_CODE = 71
_active: CollectiveGuard | None = None
_num_started = 0


def start_guard(
    mode: Literal["off", "auto", "lockstep", "watch"], *, stall_timeout_s: float = 60.0
) -> CollectiveGuard | None:
    """Start a guard; returns None if `mode` is off or a guard is active, which covers all groups of the process."""
    if mode == "off" or _active is not None:
        return None
    guard = CollectiveGuard(mode=mode, stall_timeout_s=stall_timeout_s)
    guard.start()
    return guard


def mark(label: str) -> None:
    """Label the collectives that follow, such as "step 12, micro batch 3", in the reports of an active guard."""
    if _active is not None:
        _active.label = label


def num_guarded() -> int:
    """Number of collectives of this rank that the active guard has logged; 0 without a guard."""
    return 0 if _active is None else sum(watched.log.count for watched in list(_active._groups.values()))


@contextmanager
def _patched(before: Callable[[Any, str, tuple[Any, ...]], None]) -> Iterator[None]:
    """Call `before(group, method, args)` before every collective of every group of this process."""
    group_class = dist.ProcessGroup
    COLLECTIVES.check()
    inside = threading.local()

    def wrap(name: str, original: Any) -> Any:
        def call(group: Any, *args: Any, **kwargs: Any) -> Any:
            if getattr(inside, "busy", False):  # a method that calls another is one collective
                return original(group, *args, **kwargs)
            inside.busy = True
            try:
                before(group, name, args)
                return original(group, *args, **kwargs)
            finally:
                inside.busy = False

        return call

    wrapped = {name: wrap(name, getattr(group_class, name)) for name in SIZED_BY if name in vars(group_class)}
    with COLLECTIVES.replaced(group_class, **wrapped):
        yield


@contextmanager
def record_collectives() -> Iterator[list[CollectiveRecord]]:
    """Record the collectives that this process issues inside the block, in order, without comparing them."""
    records: list[CollectiveRecord] = []

    def before(group: Any, method: str, args: tuple[Any, ...]) -> None:
        records.append(CollectiveRecord(len(records), *describe_call(method, args), call_site()))

    with _patched(before):
        yield records


@dataclass(kw_only=True)
class _Watched:
    """A process group that has issued a collective. Keeps attributes that torch drops when the group is destroyed."""

    group: Any
    ranks: list[int]
    backend: str
    lockstep: bool
    last_call_s: float
    log: GroupLog = field(default_factory=GroupLog)
    peer_count: int = 0
    """Number of collectives of the slowest peer at the last comparison."""


class CollectiveGuard:
    """Compares the collectives of all ranks while it is active. Enter and exit it on every rank.

    Args:
        mode: "lockstep", "watch", or "auto" (lockstep for gloo groups, watch for others).
        stall_timeout_s: seconds that ranks wait for a rank that issues no collective before this is an error. Must
            exceed the longest work of a single rank while others wait, such as writing a checkpoint.
        exit_after_s: watch mode only: seconds after a failure until a process that is still stuck in a kernel, which
            the abort did not release, exits with code 71.

    Raises, on every rank at its next collective (in lockstep instead of the collective that would hang):
        CollectiveMismatchError: ranks called different collectives; the message contains ranks, operations, sizes,
            source lines and label.
        RankStalledError: a rank stopped issuing collectives; the message contains its main thread's source line.

    Every rank also prints the reason to stderr.
    """

    def __init__(
        self,
        *,
        mode: Literal["auto", "lockstep", "watch"] = "auto",
        stall_timeout_s: float = 60.0,
        exit_after_s: float = 10.0,
    ) -> None:
        if mode not in ("auto", "lockstep", "watch"):
            raise EngineConfigError(field="mode", value=mode, allowed="auto, lockstep or watch")
        if stall_timeout_s <= 0:
            raise EngineConfigError(
                field="stall_timeout_s", value=stall_timeout_s, allowed="a positive number of seconds"
            )
        self.label = ""
        self._mode = mode
        self._stall_timeout_s = stall_timeout_s
        self._exit_after_s = exit_after_s
        self._groups: dict[str, _Watched] = {}
        self._stopped_ranks: set[int] = set()
        self._store_is_lost = False
        self._failure: Exception | None = None
        self._is_diagnosing = False
        self._ranks_that_answered: list[int] = []
        self._raised = threading.Event()
        self._stop = threading.Event()
        self._stores = threading.local()

    # ----------------------------------------------------- start and stop

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start the guard; collective.

        Raises:
            RuntimeError: another guard is active in this process.
        """
        global _active, _num_started
        if _active is not None:
            raise RuntimeError("another CollectiveGuard is active in this process")
        self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
        self._began_s = time.monotonic()
        self._main_thread = threading.get_ident()
        _num_started += 1
        self._prefix = f"plinth_collective_guard/{_num_started}"
        self._base_store = _rendezvous_store()
        self._store()  # connect this thread now: after a failure the server may be gone, and connecting would block
        self._patch = _patched(self._before)
        self._patch.__enter__()
        self._watcher = threading.Thread(target=self._watch, name="collective-guard", daemon=True)
        self._watcher.start()
        _active = self

    def stop(self) -> None:
        """Stop the guard and restore torch's methods. Waits about a second for the other ranks to stop theirs."""
        global _active
        _active = None
        self._patch.__exit__(None, None, None)
        if self._failure is None and not self._store_is_lost:
            with suppress(Exception):
                self._announce_stop()
        self._stop.set()
        self._watcher.join(timeout=5)

    def _announce_stop(self) -> None:
        """Tell the other ranks that this rank stopped without failure: the store may end with this process."""
        store = self._store()
        for name, watched in list(self._groups.items()):
            self._publish(store, name, watched)
        store.set(f"stopped/{self._rank}", "")
        store.set("stopped", "")
        _wait(store, [f"stopped/{rank}" for rank in range(self._world_size)], 2.5 * _TICK_S)

    # ------------------------------------------------- before each collective

    def _before(self, group: Any, method: str, args: tuple[Any, ...]) -> None:
        if self._failure is not None:
            self._raise()
        name = group.group_name
        watched = self._groups.get(name)
        if watched is None:
            backend = dist.get_backend(group)
            watched = self._groups[name] = _Watched(
                group=group,
                ranks=dist.get_process_group_ranks(group),
                backend=backend,
                lockstep=self._mode == "lockstep" or (self._mode == "auto" and "gloo" in backend),
                last_call_s=time.monotonic(),
            )
        if self._store_is_lost and self._stopped_ranks.intersection(watched.ranks):
            raise RankStalledError(
                f"ranks {sorted(self._stopped_ranks)} stopped their guard, and the rendezvous store is gone"
            )
        record = watched.log.append(*describe_call(method, args), call_site(), self.label)
        watched.last_call_s = time.monotonic()
        if len(watched.ranks) > 1 and watched.lockstep and not self._store_is_lost:
            self._exchange(name, watched.ranks, record)

    def _exchange(self, group: str, ranks: list[int], record: CollectiveRecord) -> None:
        """Publish the next collective and wait until all ranks of the group have published the same."""
        store = self._store()
        store.set(f"next/{group}/{record.index}/{self._rank}", record.signature)
        peers = [rank for rank in ranks if rank != self._rank]
        keys = [f"next/{group}/{record.index}/{rank}" for rank in peers]
        deadline = time.monotonic() + self._stall_timeout_s
        while not (is_complete := _wait(store, keys, _TICK_S)) and time.monotonic() <= deadline:
            if self._failure is not None:
                self._raise()
        if not is_complete or any(store.get(key).decode() != record.signature for key in keys):
            self._diagnose_failure(group)
            self._await_diagnosis()
        if record.index > 0:  # all ranks are here, so all have read the previous round
            store.delete_key(f"next/{group}/{record.index - 1}/{self._rank}")

    # --------------------------------------------------------- watcher thread

    def _watch(self) -> None:
        """Main function of the thread: answers requests for logs and, in watch mode, compares hashes."""
        try:
            while not self._stop.wait(_TICK_S):
                store = self._store()
                if store.check(["request"]):
                    if not self._is_diagnosing:
                        self._answer_request(store)
                    return
                if store.check(["stopped"]):
                    self._stopped_ranks = {rank for rank in range(self._world_size) if store.check([f"stopped/{rank}"])}
                for name, watched in list(self._groups.items()):
                    if len(watched.ranks) > 1 and not watched.lockstep:
                        self._compare(store, name, watched)
        except Exception as error:  # the process of the store, which is a rank, has ended
            self._store_is_lost = True
            waits = any(
                w.log.count > w.peer_count for w in self._groups.values() if len(w.ranks) > 1 and not w.lockstep
            )
            if not self._stop.is_set() and (waits or not self._stopped_ranks):
                self._fail(f"the rendezvous store no longer answers, so its rank has ended ({error})", diverged=False)

    def _publish(self, store: Any, name: str, watched: _Watched) -> None:
        """Publish count and hash of this rank's log."""
        count = watched.log.count
        store.set(f"state/{name}/{self._rank}", f"{count} {watched.log.hash_at(count) or 0}")

    def _compare(self, store: Any, name: str, watched: _Watched) -> None:
        """Publish this rank's log and compare: the first rank of the group with all, the others with the first."""
        self._publish(store, name, watched)
        log, leader, counts = watched.log, watched.ranks[0], []
        for peer in watched.ranks if self._rank == leader else [leader]:
            if peer == self._rank:
                continue
            key = f"state/{name}/{peer}"
            published = store.get(key).decode() if store.check([key]) else "0 0"  # a missing key: it has issued none
            peer_count, peer_hash = map(int, published.split())
            counts.append(peer_count)
            mine = log.hash_at(peer_count)
            diverged = peer_count <= log.count and mine is not None and mine != peer_hash
            is_behind = peer_count < log.count
            if diverged or (is_behind and time.monotonic() - watched.last_call_s > self._stall_timeout_s):
                self._diagnose_failure(name)
                return
        watched.peer_count = min(counts)

    def _diagnose_failure(self, group: str) -> None:
        """Request the logs of all ranks and publish the diagnosis; only the first rank to call does this."""
        store = self._store()
        if store.compare_set("request", "", f"{self._rank} {group}").decode() != f"{self._rank} {group}":
            return
        self._is_diagnosing = True
        dumps: dict[int, RankDump] = {self._rank: self._dump(group)}
        deadline = time.monotonic() + _DUMP_WAIT_S
        ranks = self._groups[group].ranks
        for rank in ranks:
            key = f"dump/{rank}"
            if rank != self._rank and _wait(store, [key], max(0.1, deadline - time.monotonic())):
                dumps[rank] = RankDump.from_json(json.loads(store.get(key)))
        text, diverged = diagnose(group, ranks, dumps)
        store.set("diagnosis", json.dumps([text, diverged, list(dumps)]))
        self._fail(text, diverged=diverged, answered=list(dumps))

    def _answer_request(self, store: Any) -> None:
        group = store.get("request").decode().split(" ", 1)[1]
        store.set(f"dump/{self._rank}", json.dumps(asdict(self._dump(group))))
        if _wait(store, ["diagnosis"], 2 * _DUMP_WAIT_S):
            text, diverged, answered = json.loads(store.get("diagnosis"))
        else:
            text, diverged, answered = "a rank found a failure and ended before it published the diagnosis", False, []
        self._fail(text, diverged=diverged, answered=answered)

    def _dump(self, group: str) -> RankDump:
        watched = self._groups.get(group)
        log = watched.log if watched is not None else GroupLog()
        frame = sys._current_frames().get(self._main_thread)
        position = "an unknown line"
        if frame is not None:
            line = traceback.extract_stack(frame)[-1]
            position = f"{line.filename}:{line.lineno} in {line.name}"
        return RankDump(
            rank=self._rank,
            count=log.count,
            records=tuple(log.recent),
            idle_s=time.monotonic() - (watched.last_call_s if watched is not None else self._began_s),
            position=position,
        )

    # -------------------------------------------------------------- failure

    def _fail(self, text: str, *, diverged: bool, answered: list[int] | None = None) -> None:
        if self._failure is not None:
            return
        if answered:
            self._store().set(f"seen/{self._rank}", "")
            self._ranks_that_answered = answered
        self._failure = (CollectiveMismatchError if diverged else RankStalledError)(text)
        print(f"collective guard, rank {self._rank}: {text}", file=sys.stderr, flush=True)
        waiting_in_kernels = [watched for watched in list(self._groups.values()) if not watched.lockstep]
        if not waiting_in_kernels or threading.current_thread() is not self._watcher:
            return
        for watched in waiting_in_kernels:
            if "gloo" not in watched.backend:  # gloo's abort does not release waiting ranks
                _abort(watched.group)
        if not self._raised.wait(self._exit_after_s) and not self._stop.is_set():
            os._exit(_EXIT_CODE)

    def _await_diagnosis(self) -> None:
        deadline = time.monotonic() + 3 * _DUMP_WAIT_S
        while self._failure is None and time.monotonic() < deadline:
            time.sleep(0.02)
        self._raise()

    def _raise(self) -> None:
        self._raised.set()
        # The store is part of one rank's process: if it ended now, the other ranks could not read the reason.
        with suppress(Exception):
            _wait(self._store(), [f"seen/{rank}" for rank in self._ranks_that_answered], _DUMP_WAIT_S)
        raise self._failure or RankStalledError("a rank found a failure, but no diagnosis came")

    def _store(self) -> Any:
        """This thread's connection: a blocking call would block other threads on a shared connection."""
        if not hasattr(self._stores, "store"):
            base = self._base_store.clone() if hasattr(self._base_store, "clone") else self._base_store
            self._stores.store = PrefixStore(self._prefix, base)
        return self._stores.store


def _rendezvous_store() -> Any:
    store = dist.distributed_c10d._get_default_store()
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store


def _wait(store: Any, keys: list[str], seconds: float) -> bool:
    try:
        store.wait(keys, timedelta(seconds=seconds))
    except (dist.DistStoreError, RuntimeError) as error:
        if classify_torch_error(error) == "timeout":
            return False
        raise
    return True


def _abort(group: Any) -> None:
    """Abort the communicator if possible: NCCL's abort ends kernels that wait for a peer."""
    try:
        backend = group._get_backend(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
        backend.abort()
    except Exception as error:
        print(f"collective guard: could not abort {group.group_name}: {error}", file=sys.stderr, flush=True)
