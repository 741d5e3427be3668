"""Heartbeats of the trainer ranks: what each of them does, and since when it has not moved.

A thread of each rank looks at the rank's main thread once a second and writes what it sees into memory shared with the
driver. The driver reads it while it waits for a call, so it can name a rank that hangs.
"""

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType

INTERVAL_S = 1.0
_SLOT = 1024
"""Bytes of a rank's heartbeat; a page holds whole slots, so a reader never sees a part of one."""
_WAITING = ("torch/distributed/", "deepspeed/comm/", "ds_engine/agreement.py", "ds_engine/guard/")
"""Files in which a rank waits for the others: it is not the one that hangs."""


@dataclass(frozen=True, kw_only=True)
class Beat:
    """What a rank's main thread does."""

    host: str
    pid: int
    beat_at: float
    """Time of this heartbeat, in seconds of the host's monotonic clock."""
    moved_at: float
    """Time at which the thread was first seen where it is."""
    where: str
    """The innermost Python frame, `file:line in function`."""

    def still_s(self, now: float) -> float:
        """Seconds without movement."""
        return now - self.moved_at

    def frozen_s(self, now: float) -> float:
        """Seconds since the last heartbeat: a stopped process, or one that never releases the GIL, sends none."""
        return now - self.beat_at

    def describe(self, now: float) -> str:
        """`at file:line in function for 60 s (host, pid 7)`."""
        frozen = f", no heartbeat for {self.frozen_s(now):.0f} s" if self.frozen_s(now) > 3 * INTERVAL_S else ""
        return f"at {self.where} for {self.still_s(now):.0f} s{frozen} ({self.host}, pid {self.pid})"


class Heartbeat:
    """Sends the heartbeats of this process; construct it in the thread that works.

    Args:
        path: memory of a `Heartbeats`.
        rank: number of the slot in it.
    """

    def __init__(self, path: str, rank: int, *, interval_s: float = INTERVAL_S) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        self._rank, self._worker, self._interval_s = rank, threading.get_ident(), interval_s
        self._place: tuple[int, ...] = ()
        self._moved_at = 0.0
        threading.Thread(target=self._send_forever, name="heartbeat", daemon=True).start()

    def _send_forever(self) -> None:
        while True:
            text = json.dumps(asdict(self._look())).encode()
            os.pwrite(self._file, text[:_SLOT].ljust(_SLOT), self._rank * _SLOT)
            time.sleep(self._interval_s)

    def _look(self) -> Beat:
        innermost = sys._current_frames().get(self._worker)
        now, frame, place = time.monotonic(), innermost, []
        while frame is not None:
            place += [id(frame), frame.f_lasti]
            frame = frame.f_back
        if tuple(place) != self._place:
            self._place, self._moved_at = tuple(place), now
        return Beat(
            host=socket.gethostname()[:64],
            pid=os.getpid(),
            beat_at=now,
            moved_at=self._moved_at,
            where=_describe_frame(innermost)[:400],
        )


def _describe_frame(frame: FrameType | None) -> str:
    if frame is None:
        return "its end"
    path = frame.f_code.co_filename.rpartition("/site-packages/")[2]
    return f"{'/'.join(Path(path).parts[-3:])}:{frame.f_lineno} in {frame.f_code.co_name}"


class Heartbeats:
    """The heartbeats of a group of ranks on this host, in memory that no file system holds."""

    def __init__(self, num_ranks: int) -> None:
        self._file = os.memfd_create("heartbeats", os.MFD_CLOEXEC)
        os.ftruncate(self._file, num_ranks * _SLOT)
        self.path = f"/proc/{os.getpid()}/fd/{self._file}"
        """Opens the memory in other processes of the same user."""

    def read(self, rank: int) -> Beat | None:
        """The last heartbeat of a rank; None before the first."""
        with suppress(ValueError, TypeError):
            return Beat(**json.loads(os.pread(self._file, _SLOT, rank * _SLOT)))
        return None

    def close(self) -> None:
        """Frees the memory; ranks that still run write into it unseen."""
        os.close(self._file)


def find_stalled(beats: Mapping[int, Beat | None], now: float, *, limit_s: float) -> dict[int, Beat]:
    """The ranks that hold up a call, if none of `beats` has moved for `limit_s` seconds; else none.

    A rank that sends no heartbeat, or is not waiting for other ranks, is held responsible; without one, all are.

    Args:
        beats: the last heartbeats of the ranks that have not finished the call.
        now: `time.monotonic()`.
    """
    known = {rank: beat for rank, beat in beats.items() if beat is not None}
    if not known or len(known) < len(beats) or min(beat.still_s(now) for beat in known.values()) < limit_s:
        return {}
    frozen = {rank: beat for rank, beat in known.items() if beat.frozen_s(now) > max(5.0, limit_s / 2)}
    not_waiting = {rank: beat for rank, beat in known.items() if not any(part in beat.where for part in _WAITING)}
    return frozen or not_waiting or known
