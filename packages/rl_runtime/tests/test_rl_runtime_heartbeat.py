"""Heartbeats: a rank that hangs is named with its host, its place and for how long."""

import json
import os
import queue
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from plinth_testing import wait_until
from rl_runtime.ranks.heartbeat import (
    INTERVAL_S,
    Beat,
    Heartbeat,
    Heartbeats,
    _describe_frame,
    find_frozen,
    find_stalled,
)

WORK = """
import select, sys, time
from rl_runtime.ranks.heartbeat import Heartbeat, Receiver

def compute():
    while not select.select([sys.stdin], [], [], 0)[0]:
        sum(range(1000))

Heartbeat(Receiver(host=sys.argv[1], port=int(sys.argv[2]), token=sys.argv[3]), 1, interval_s=0.05)
compute()
time.sleep(1000)
"""


def beat(where: str = "torch/autograd/graph.py:1 in backward", *, still: float = 60, frozen: float = 0) -> Beat:
    return Beat(host="node", pid=7, beat_at=1000 - frozen, still=max(still - frozen, 0), where=where)


WAITS = "torch/distributed/distributed_c10d.py:1 in all_reduce"


@pytest.mark.parametrize(
    ("beats", "stalled"),
    [
        ({0: beat(), 1: beat(WAITS)}, {0}),
        ({0: beat(WAITS), 1: beat(WAITS)}, {0, 1}),
        ({0: beat(WAITS), 1: beat(WAITS, frozen=55)}, {1}),
        ({0: beat(), 1: beat(WAITS, frozen=55)}, {1}),
        ({0: beat(still=10), 1: beat(WAITS)}, set()),  # rank 0 still works
        ({0: None, 1: beat(WAITS)}, set()),  # rank 0 still starts
        ({}, set()),
    ],
)
def test_the_rank_that_holds_up_the_others_is_found(beats: dict[int, Beat | None], stalled: set[int]) -> None:
    assert set(find_stalled(beats, 1000.0, limit_s=50)) == stalled


def test_a_stopped_rank_is_found_while_others_move() -> None:
    beats = {0: beat(still=1), 1: beat(still=70, frozen=55), 2: beat(still=600), 3: None}
    assert set(find_frozen(beats, 1000.0, limit_s=50)) == {1}
    assert find_frozen(beats, 1000.0, limit_s=56) == {}


@pytest.fixture
def heartbeats() -> Iterator[Heartbeats]:
    made = Heartbeats()
    yield made
    made.close()


def test_a_thread_that_waits_for_a_lock_is_named_by_who_waits() -> None:
    answers = queue.Queue[None]()

    def wait_for_workers() -> None:
        answers.get()

    waiting = threading.Thread(target=wait_for_workers)
    waiting.start()
    assert waiting.ident is not None
    pattern = (
        r"tests/test_rl_runtime_heartbeat.py:\d+ in wait_for_workers \(.*/(queue|threading).py:\d+ in (get|wait)\)"
    )
    wait_until(lambda: re.search(pattern, _describe_frame(sys._current_frames()[waiting.ident or 0])) is not None)
    answers.put(None)
    waiting.join()
    assert re.fullmatch(r"[^()]+ in test_a_thread_that_waits[^()]*", _describe_frame(sys._getframe()))


def test_a_process_reports_where_it_is_and_a_stopped_one_is_silent(heartbeats: Heartbeats) -> None:
    receiver = heartbeats.receiver
    command = [sys.executable, "-c", WORK, receiver.host, str(receiver.port), receiver.token]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
        assert process.stdin is not None
        try:

            def sleeps() -> bool:
                if (heartbeat := heartbeats.read(1)) is None:
                    return False
                return heartbeat.still_s(time.monotonic()) > 0.6 and "in <module>" in heartbeat.where

            wait_until(lambda: (heartbeat := heartbeats.read(1)) is not None and "in compute" in heartbeat.where)
            process.stdin.close()
            wait_until(sleeps)
            assert heartbeats.read(0) is None, "rank 0 has not started"
            os.kill(process.pid, signal.SIGSTOP)

            def is_silent() -> bool:
                """True once everything sent before has arrived."""
                last = heartbeats.read(1)
                time.sleep(0.5)
                return heartbeats.read(1) == last

            wait_until(is_silent)
            stopped = heartbeats.read(1)
            assert stopped is not None
            assert "no heartbeat" not in stopped.describe(stopped.beat_at + INTERVAL_S)
            text = stopped.describe(stopped.beat_at + 60)
            assert f"no heartbeat for 60 s ({socket.gethostname()}, pid {process.pid})" in text
        finally:
            process.kill()


def test_datagrams_of_others_are_ignored(heartbeats: Heartbeats) -> None:
    receiver = heartbeats.receiver
    right = {"token": receiver.token, "rank": 0, "host": "node", "pid": 7, "still": 1.5, "where": "here"}
    wrong = [b"", b"no JSON", b"[]", b"{}", b'{"token": 3}', json.dumps(right | {"token": "guess"}).encode()]
    wrong += [json.dumps(right | {"more": 1}).encode(), json.dumps(right | {"rank": "x"}).encode()]
    wrong += [b"[" * 2000, json.dumps(right | {"rank": float("inf")}).encode()]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
        for datagram in wrong:
            stranger.sendto(datagram, (receiver.host, receiver.port))
        assert heartbeats.read(0) is None
        stranger.sendto(json.dumps(right).encode(), (receiver.host, receiver.port))
    wait_until(lambda: heartbeats.read(0) is not None)
    beat = heartbeats.read(0)
    assert beat is not None
    assert (beat.where, beat.still) == ("here", 1.5)


def test_threads_of_heartbeats_outlive_errors(heartbeats: Heartbeats, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without its threads, a rank that works would count as one that hangs."""
    failures = iter([MemoryError(), OSError(24, "Too many open files")])
    name = socket.gethostname()

    def gethostname() -> str:
        for failure in failures:
            raise failure
        return name

    class Flaky:
        """A socket that cannot receive twice."""

        def __init__(self, sock: socket.socket) -> None:
            self._sock, self._errors = sock, [OSError(105, "No buffer space available")] * 2

        def recv(self, size: int) -> bytes:
            if self._errors:
                raise self._errors.pop()
            return self._sock.recv(size)

        def __getattr__(self, attribute: str) -> object:
            return getattr(self._sock, attribute)

    monkeypatch.setattr(socket, "gethostname", gethostname)
    monkeypatch.setattr(heartbeats, "_socket", Flaky(heartbeats._socket))
    Heartbeat(heartbeats.receiver, 3, interval_s=0.01)
    wait_until(lambda: heartbeats.read(3) is not None)
