"""Heartbeats of the trainer ranks: what each of them does, and since when it has not moved.

A thread of each rank looks at the rank's main thread once a second and sends what it sees to the driver, in one
datagram. The driver reads them while it waits for a call, so it can name a rank that hangs, on any host.
"""

import json
import os
import secrets
import socket
import sys
import sysconfig
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any

INTERVAL_S = 1.0
_MAX_BYTES = 2048
_STANDARD_LIBRARY = sysconfig.get_paths()["stdlib"]
_WAITING = ("torch/distributed/", "deepspeed/comm/", "ds_engine/agreement.py", "ds_engine/guard/")
"""Files in which a rank waits for the others: it is not the one that hangs."""


@dataclass(frozen=True, kw_only=True)
class Beat:
    """Activity of a rank's main thread."""

    host: str
    pid: int
    still: float
    """Seconds for which the thread had been where it is when the heartbeat was sent."""
    where: str
    """The innermost call outside the standard library, `file:line in function`, and what it called there."""
    beat_at: float = 0.0
    """Time at which the heartbeat arrived, in seconds of the driver's monotonic clock."""

    def still_s(self, now: float) -> float:
        """Seconds without movement."""
        return self.still + self.frozen_s(now)

    def frozen_s(self, now: float) -> float:
        """Seconds since the last heartbeat: a stopped process, or one that never releases the GIL, sends none."""
        return now - self.beat_at

    def describe(self, now: float) -> str:
        """`at file:line in function for 60 s (host, pid 7)`."""
        frozen = f", no heartbeat for {self.frozen_s(now):.0f} s" if self.frozen_s(now) > 3 * INTERVAL_S else ""
        return f"at {self.where} for {self.still_s(now):.0f} s{frozen} ({self.host}, pid {self.pid})"


@dataclass(frozen=True, kw_only=True)
class Receiver:
    """Receiver of the ranks' heartbeats."""

    host: str
    port: int
    token: str
    """Sent with every heartbeat; without it a datagram is ignored."""


class Heartbeat:
    """Sends the heartbeats of this process; construct it in the thread that works.

    Args:
        receiver: that of a `Heartbeats`.
        rank: this process's rank in the group.
    """

    def __init__(self, receiver: Receiver, rank: int, *, interval_s: float = INTERVAL_S) -> None:
        self._receiver, self._rank, self._worker = receiver, rank, threading.get_ident()
        self._interval_s = interval_s
        self._socket = socket.socket(_family(receiver.host), socket.SOCK_DGRAM)
        self._place: tuple[int, ...] = ()
        self._moved_at = 0.0
        threading.Thread(target=self._send_forever, name="heartbeat", daemon=True).start()

    def _send_forever(self) -> None:
        receiver = self._receiver
        while True:
            with suppress(Exception):  # the driver has gone, or the network or memory for a moment
                beat = {"token": receiver.token, "rank": self._rank, **asdict(self._look())}
                self._socket.sendto(json.dumps(beat).encode(), (receiver.host, receiver.port))
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
            still=now - self._moved_at,
            where=_describe_frame(innermost)[:400],
        )


def _describe_frame(frame: FrameType | None) -> str:
    """The innermost call outside the standard library, and in brackets what it called there: that is often a lock."""
    if frame is None:
        return "its end"
    caller: FrameType | None = frame
    while caller is not None and _is_standard(caller.f_code.co_filename):
        caller = caller.f_back
    if caller is None or caller is frame:
        return _site(frame)
    return f"{_site(caller)} ({_site(frame)})"


def _is_standard(path: str) -> bool:
    return path.startswith((f"{_STANDARD_LIBRARY}/", "<frozen ")) and "/site-packages/" not in path


def _site(frame: FrameType) -> str:
    path = frame.f_code.co_filename.rpartition("/site-packages/")[2]
    return f"{'/'.join(Path(path).parts[-3:])}:{frame.f_lineno} in {frame.f_code.co_name}"


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


class Heartbeats:
    """Receives the heartbeats of a group of ranks.

    Args:
        host: an address of this host that the ranks reach.
    """

    def __init__(self, host: str = "127.0.0.1") -> None:
        self._socket = socket.socket(_family(host), socket.SOCK_DGRAM)
        self._socket.bind((host, 0))
        self.receiver = Receiver(host=host, port=self._socket.getsockname()[1], token=secrets.token_hex(16))
        """Given to the ranks."""
        self._beats: dict[int, Beat] = {}
        self._is_closed = False
        threading.Thread(target=self._receive_forever, name="heartbeats", daemon=True).start()

    def read(self, rank: int) -> Beat | None:
        """The last heartbeat of a rank; None before the first."""
        return self._beats.get(rank)

    def close(self) -> None:
        """Stops listening; later heartbeats are lost."""
        self._is_closed = True
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # ends the thread's wait
        self._socket.close()

    def _receive_forever(self) -> None:
        while not self._is_closed:
            try:
                self._keep(json.loads(self._socket.recv(_MAX_BYTES)))
            except OSError:  # of a closed socket, or for a moment: without this thread every rank would seem to hang
                time.sleep(0.0 if self._is_closed else 0.1)
            except Exception:
                pass  # somebody else's datagram

    def _keep(self, message: dict[str, Any]) -> None:
        if secrets.compare_digest(str(message.pop("token")), self.receiver.token):
            rank = int(message.pop("rank"))
            self._beats[rank] = Beat(**{**message, "beat_at": time.monotonic()})


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


def find_frozen(beats: Mapping[int, Beat | None], now: float, *, limit_s: float) -> dict[int, Beat]:
    """The ranks that have sent no heartbeat for `limit_s` seconds; one that has sent none yet still starts."""
    return {rank: beat for rank, beat in beats.items() if beat is not None and beat.frozen_s(now) >= limit_s}
