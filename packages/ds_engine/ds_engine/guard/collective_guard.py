"""Catches ranks that fall out of step, within seconds and on all ranks, in any torch.distributed program.

    with CollectiveGuard():
        train()

Ranks hang when they call different collectives, or one of them calls none. The guard logs every collective a rank
issues and compares the logs through the rendezvous store, beside the training traffic:

* lockstep  before a collective is issued all its ranks exchange what they are about to do, so nothing wrong ever is.
            One store round trip a collective (about 0.2 ms on one host): for the CPU, where a mismatch otherwise kills
            the process, and for hunting bugs.
* watch     a thread compares counts and hashes twice a second and aborts the communicators when they disagree. A few
            microseconds a collective: for GPU training.

Off, it costs nothing: the methods it replaces are torch's own again.
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
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal, Self

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from ..errors import CollectiveMismatchError, RankStalledError
from .collective_log import METHODS, CollectiveRecord, GroupLog, RankDump, call_site, describe_call, diagnose

__all__ = ["CollectiveGuard", "mark", "record_collectives"]

_TICK_S = 0.5
_DUMP_WAIT_S = 5.0
_EXIT_CODE = 71
_active: CollectiveGuard | None = None
_num_started = 0


def start_guard(mode: Literal["off", "auto", "lockstep", "watch"], *, stall_timeout_s: float) -> CollectiveGuard | None:
    """A started guard; None when it is off or one is active: that one sees all groups of the process already."""
    if mode == "off" or _active is not None:
        return None
    guard = CollectiveGuard(mode=mode, stall_timeout_s=stall_timeout_s)
    guard.start()
    return guard


def mark(label: str) -> None:
    """Say what the program is doing now ("step 12, micro batch 3"); reports of an active guard quote it."""
    if _active is not None:
        _active.label = label


def num_guarded() -> int:
    """Collectives that the active guard has seen this rank issue; 0 without one."""
    return 0 if _active is None else sum(watched.log.count for watched in list(_active._groups.values()))


@contextmanager
def _patched(before: Callable[[Any, str, tuple[Any, ...]], None]) -> Iterator[None]:
    """Calls `before(group, method, args)` ahead of every collective of every group of this process."""
    group_class = dist.ProcessGroup
    # The class's own entries: getattr would unwrap the method descriptors, which could then not be put back.
    originals = {name: vars(group_class)[name] for name in METHODS if name in vars(group_class)}
    inside = threading.local()

    def wrap(name: str, original: Any) -> Any:
        def call(group: Any, *args: Any, **kwargs: Any) -> Any:
            if getattr(inside, "busy", False):  # one method calling another is one collective
                return original(group, *args, **kwargs)
            inside.busy = True
            try:
                before(group, name, args)
                return original(group, *args, **kwargs)
            finally:
                inside.busy = False

        return call

    for name in originals:
        setattr(group_class, name, wrap(name, getattr(group_class, name)))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(group_class, name, original)


@contextmanager
def record_collectives() -> Iterator[list[CollectiveRecord]]:
    """The collectives this process issues inside the block, in order; nothing is compared."""
    records: list[CollectiveRecord] = []

    def before(group: Any, method: str, args: tuple[Any, ...]) -> None:
        records.append(CollectiveRecord(len(records), *describe_call(method, args), call_site()))

    with _patched(before):
        yield records


@dataclass(kw_only=True)
class _Watched:
    """A process group that had a collective. What torch forgets when the group is destroyed is remembered."""

    group: Any
    ranks: list[int]
    backend: str
    lockstep: bool
    last_call_s: float
    log: GroupLog = field(default_factory=GroupLog)
    peer_count: int = 0
    """Collectives of the peer that had issued the fewest when last compared."""


class CollectiveGuard:
    """Compares all ranks' collectives while it is active. Enter and leave it on every rank.

    Args:
        mode: "lockstep", "watch", or "auto": lockstep for gloo groups, watch for others.
        stall_timeout_s: how long ranks may wait for one that issues nothing before that counts as a failure. Has to
            exceed the longest thing a single rank does while others wait (writing a checkpoint, say).
        exit_after_s: watch mode only: how long after a failure a rank may stay out of reach, stuck in a kernel that the
            abort did not release, before its process ends with exit code 71.
        store: a torch.distributed Store all ranks reach; by default the one the process group met at.

    Raises, from the next collective on every rank (in lockstep instead of the collective that would hang):
        CollectiveMismatchError: ranks called different collectives; names ranks, operations, sizes, lines and label.
        RankStalledError: one rank stopped calling; names it and the line its main thread is at.

    Every rank also prints the reason to stderr.
    """

    def __init__(
        self,
        *,
        mode: Literal["auto", "lockstep", "watch"] = "auto",
        stall_timeout_s: float = 60.0,
        exit_after_s: float = 10.0,
        store: Any = None,
    ) -> None:
        if mode not in ("auto", "lockstep", "watch"):
            raise ValueError(f"mode={mode!r} is not allowed: auto, lockstep or watch")
        if stall_timeout_s <= 0:
            raise ValueError(f"stall_timeout_s={stall_timeout_s!r} is not allowed: a positive number of seconds")
        self.label = ""
        self._mode = mode
        self._stall_timeout_s = stall_timeout_s
        self._exit_after_s = exit_after_s
        self._base_store = store
        self._groups: dict[str, _Watched] = {}
        self._left: set[int] = set()
        self._store_is_lost = False
        self._failure: Exception | None = None
        self._judging = False
        self._answered: list[int] = []
        self._raised = threading.Event()
        self._stop = threading.Event()
        self._stores = threading.local()

    # ---------------------------------------------------------------- life

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Begin watching; collective."""
        global _active, _num_started
        if _active is not None:
            raise RuntimeError("another CollectiveGuard is active in this process")
        self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
        self._began_s = time.monotonic()
        self._main_thread = threading.get_ident()
        _num_started += 1
        self._prefix = f"plinth_collective_guard/{_num_started}"
        if self._base_store is None:
            self._base_store = _rendezvous_store()
        self._store()  # this thread's connection: when the server is gone after a failure, connecting would wait
        self._patch = _patched(self._before)
        self._patch.__enter__()
        self._watcher = threading.Thread(target=self._watch, name="collective-guard", daemon=True)
        self._watcher.start()
        _active = self

    def stop(self) -> None:
        """Stop watching and give torch its methods back. Ranks that are not there yet are waited for for a second."""
        global _active
        _active = None
        self._patch.__exit__(None, None, None)
        if self._failure is None and not self._store_is_lost:
            with suppress(Exception):
                self._leave()
        self._stop.set()
        self._watcher.join(timeout=5)

    def _leave(self) -> None:
        """The store may live in this process and end with it: let those who go on know that nothing went wrong."""
        store = self._store()
        for name, watched in list(self._groups.items()):
            self._publish(store, name, watched)
        store.set(f"left/{self._rank}", "")
        store.set("left", "")
        _wait(store, [f"left/{rank}" for rank in range(self._world_size)], 2.5 * _TICK_S)

    # ----------------------------------------------- ahead of every collective

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
        if self._store_is_lost and self._left.intersection(watched.ranks):
            raise RankStalledError(f"ranks {sorted(self._left)} have left the guard and the rendezvous store is gone")
        record = watched.log.append(*describe_call(method, args), call_site(), self.label)
        watched.last_call_s = time.monotonic()
        if len(watched.ranks) > 1 and watched.lockstep and not self._store_is_lost:
            self._exchange(name, watched.ranks, record)

    def _exchange(self, group: str, ranks: list[int], record: CollectiveRecord) -> None:
        """Tell the group what comes next here; return once all of it says the same."""
        store = self._store()
        store.set(f"next/{group}/{record.index}/{self._rank}", record.signature)
        peers = [rank for rank in ranks if rank != self._rank]
        keys = [f"next/{group}/{record.index}/{rank}" for rank in peers]
        deadline = time.monotonic() + self._stall_timeout_s
        while not _wait(store, keys, _TICK_S):
            if self._failure is not None:
                self._raise()
            if time.monotonic() > deadline:
                self._sound_alarm(group)
                self._await_verdict()
        if any(store.get(key).decode() != record.signature for key in keys):
            self._sound_alarm(group)
            self._await_verdict()
        if record.index > 0:  # everyone got here, so everyone has read the round before
            store.delete_key(f"next/{group}/{record.index - 1}/{self._rank}")

    # ------------------------------------------------------------ the watcher

    def _watch(self) -> None:
        """Thread: answers alarms, fetches verdicts, and in watch mode compares hashes."""
        try:
            while not self._stop.wait(_TICK_S):
                store = self._store()
                if store.check(["alarm"]):
                    if not self._judging:
                        self._answer_alarm(store)
                    return
                if store.check(["left"]):
                    self._left = {rank for rank in range(self._world_size) if store.check([f"left/{rank}"])}
                for name, watched in list(self._groups.items()):
                    if len(watched.ranks) > 1 and not watched.lockstep:
                        self._compare(store, name, watched)
        except Exception as error:  # the store's process is gone, and with it a rank
            self._store_is_lost = True
            waits = any(
                w.log.count > w.peer_count for w in self._groups.values() if len(w.ranks) > 1 and not w.lockstep
            )
            if not self._stop.is_set() and (waits or not self._left):
                self._fail(f"the rendezvous store no longer answers, so its rank has ended ({error})", diverged=False)

    def _publish(self, store: Any, name: str, watched: _Watched) -> None:
        """This rank's log as (count, hash)."""
        count = watched.log.count
        store.set(f"state/{name}/{self._rank}", f"{count} {watched.log.hash_at(count) or 0}")

    def _compare(self, store: Any, name: str, watched: _Watched) -> None:
        """Publish where this rank is; the group's first rank compares with all, the others with it."""
        self._publish(store, name, watched)
        log, leader, counts = watched.log, watched.ranks[0], []
        for peer in watched.ranks if self._rank == leader else [leader]:
            if peer == self._rank:
                continue
            key = f"state/{name}/{peer}"
            published = store.get(key).decode() if store.check([key]) else "0 0"  # nothing: it has issued none
            peer_count, peer_hash = map(int, published.split())
            counts.append(peer_count)
            mine = log.hash_at(peer_count)
            if peer_count <= log.count and mine is not None and mine != peer_hash:
                self._sound_alarm(name)
                return
            behind = peer_count < log.count
            if behind and time.monotonic() - watched.last_call_s > self._stall_timeout_s:
                self._sound_alarm(name)
                return
        watched.peer_count = min(counts)

    def _sound_alarm(self, group: str) -> None:
        """Ask all ranks what they were doing. The first to call writes the verdict."""
        store = self._store()
        if store.compare_set("alarm", "", f"{self._rank} {group}").decode() != f"{self._rank} {group}":
            return
        self._judging = True
        dumps: dict[int, RankDump] = {self._rank: self._dump(group)}
        deadline = time.monotonic() + _DUMP_WAIT_S
        ranks = self._groups[group].ranks
        for rank in ranks:
            key = f"dump/{rank}"
            if rank != self._rank and _wait(store, [key], max(0.1, deadline - time.monotonic())):
                dumps[rank] = RankDump.from_json(json.loads(store.get(key)))
        text, diverged = diagnose(group, ranks, dumps)
        store.set("verdict", json.dumps([text, diverged, list(dumps)]))
        self._fail(text, diverged=diverged, answered=list(dumps))

    def _answer_alarm(self, store: Any) -> None:
        group = store.get("alarm").decode().split(" ", 1)[1]
        store.set(f"dump/{self._rank}", json.dumps(self._dump(group).to_json()))
        if _wait(store, ["verdict"], 2 * _DUMP_WAIT_S):
            text, diverged, answered = json.loads(store.get("verdict"))
        else:
            text, diverged, answered = "a rank raised the alarm and then ended", False, []
        self._fail(text, diverged=diverged, answered=answered)

    def _dump(self, group: str) -> RankDump:
        watched = self._groups.get(group)
        log = watched.log if watched is not None else GroupLog()
        frame = sys._current_frames().get(self._main_thread)
        position = "an unknown place"
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

    # ---------------------------------------------------------------- failing

    def _fail(self, text: str, *, diverged: bool, answered: list[int] | None = None) -> None:
        if self._failure is not None:
            return
        if answered:
            self._store().set(f"seen/{self._rank}", "")
            self._answered = answered
        self._failure = (CollectiveMismatchError if diverged else RankStalledError)(text)
        print(f"collective guard, rank {self._rank}: {text}", file=sys.stderr, flush=True)
        waiting_in_kernels = [watched for watched in list(self._groups.values()) if not watched.lockstep]
        if not waiting_in_kernels or threading.current_thread() is not self._watcher:
            return
        for watched in waiting_in_kernels:
            if "gloo" not in watched.backend:  # gloo's abort releases no one
                _abort(watched.group)
        if not self._raised.wait(self._exit_after_s) and not self._stop.is_set():
            os._exit(_EXIT_CODE)

    def _await_verdict(self) -> None:
        deadline = time.monotonic() + 3 * _DUMP_WAIT_S
        while self._failure is None and time.monotonic() < deadline:
            time.sleep(0.02)
        self._raise()

    def _raise(self) -> None:
        self._raised.set()
        # The store lives in one of the ranks: if that one ended now, the others would not learn the reason.
        with suppress(Exception):
            _wait(self._store(), [f"seen/{rank}" for rank in self._answered], _DUMP_WAIT_S)
        raise self._failure or RankStalledError("a rank raised the alarm, but no verdict came")

    def _store(self) -> Any:
        """A connection of this thread's own: a waiting call would block other threads' calls on the same one."""
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
        if "imeout" in str(error) or "timed out" in str(error).lower():
            return False
        raise
    return True


def _abort(group: Any) -> None:
    """Best effort: NCCL's abort ends kernels that wait for a peer."""
    try:
        backend = group._get_backend(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
        backend.abort()
    except Exception as error:
        print(f"collective guard: could not abort {group.group_name}: {error}", file=sys.stderr, flush=True)
