import asyncio
import subprocess
import sys
import threading
import time
from unittest.mock import Mock

import pytest
from run_kit_testkit import Clock

from plinth_testing import raises
from run_kit import memory
from run_kit.errors import TrackingError
from run_kit.memory import GIB, MemorySampler, TreeMemory, process_tree_memory
from run_kit.timing import Laps, PhaseTimer


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(time, "perf_counter", clock)
    return clock


@pytest.fixture
def timer() -> PhaseTimer:
    return PhaseTimer()


def test_phases_nest_and_sum(clock: Clock, timer: PhaseTimer) -> None:
    with timer.step():
        with timer.phase("gen"):
            clock.now += 2
        for _ in range(2):
            with timer.phase("update"):
                clock.now += 1
                with timer.phase("backward"):
                    clock.now += 3
        with timer.phase("validate", outside=True):
            clock.now += 10
        clock.now += 1
    assert timer.metrics() == {
        "timing_s/step": 11,
        "timing_s/gen": 2,
        "timing_s/update": 8,
        "timing_s/update/backward": 6,
        "timing_s/validate": 10,
        "timing_s/other": 1,
    }


def test_a_new_step_clears_the_last(clock: Clock, timer: PhaseTimer) -> None:
    for name in ("a", "b"):
        with timer.step(), timer.phase(name):
            clock.now += 1
    assert timer.metrics() == {"timing_s/step": 1, "timing_s/b": 1, "timing_s/other": 0}


def test_errors_leave_the_timer_usable(clock: Clock, timer: PhaseTimer) -> None:
    with pytest.raises(RuntimeError), timer.step(), timer.phase("a"):  # noqa: PT012
        clock.now += 1
        raise RuntimeError
    with timer.step(), timer.phase("b"):
        clock.now += 1
    assert timer.metrics()["timing_s/b"] == 1


def test_outside_phases_must_be_top_level(timer: PhaseTimer) -> None:
    with timer.step(), timer.phase("a"), raises(TrackingError, field="outside"):
        timer.phase("validate", outside=True).__enter__()


def test_tasks_belong_to_the_phase_that_started_them_and_threads_to_the_step(timer: PhaseTimer) -> None:
    async def work() -> None:
        with timer.phase("request"):
            await asyncio.sleep(0.01)

    async def both() -> None:
        await asyncio.gather(work(), work())

    def in_thread() -> None:
        with timer.phase("writer"):
            time.sleep(0.01)

    with timer.step(), timer.phase("gen"):
        asyncio.run(both())
        thread = threading.Thread(target=in_thread)
        thread.start()
        thread.join()
    assert timer.metrics().keys() == {f"timing_s/{path}" for path in ("step", "gen", "gen/request", "writer", "other")}


def test_laps_are_seconds_between_marks(clock: Clock) -> None:
    laps = Laps()
    clock.now += 1.5
    laps.mark("models")
    clock.now += 2.0
    laps.mark("servers")
    assert str(laps) == "3.5 s: models 1.5, servers 2.0"


def test_child_processes_are_counted() -> None:
    block = 64 * 1024 * 1024
    alone = process_tree_memory()
    child = subprocess.Popen(
        [sys.executable, "-c", f"b = bytearray(b'x' * {block}); print('ready', flush=True); input()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        both = process_tree_memory()
        assert both.num_processes == alone.num_processes + 1
        assert both.pss_bytes - alone.pss_bytes > 0.9 * block
        assert process_tree_memory(child.pid).num_processes == 1
    finally:
        child.communicate("\n", timeout=30)
    assert process_tree_memory(child.pid).num_processes == 0


def test_metrics_do_not_wait_for_a_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    read = Mock(return_value=TreeMemory(pss_bytes=GIB, num_processes=4))
    expected = {"memory/host_gib": 1.0, "memory/host_peak_gib": 1.0, "memory/num_processes": 4.0}
    monkeypatch.setattr(memory, "INTERVAL_S", 60)
    monkeypatch.setattr(memory, "process_tree_memory", read)
    with MemorySampler() as sampler:
        assert sampler.metrics() == sampler.metrics() == expected
        assert read.call_count == 1  # the thread has none yet
    assert sampler.metrics() == expected
    assert read.call_count == 2  # the thread takes no more


def test_metrics_have_the_newest_sample_and_the_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = iter([5, 2])
    taken = threading.Event()

    def read() -> TreeMemory:
        size = next(sizes, 0) * GIB
        if not size:
            taken.set()
            time.sleep(60)
        return TreeMemory(pss_bytes=size, num_processes=4)

    monkeypatch.setattr(memory, "INTERVAL_S", 0.001)
    monkeypatch.setattr(memory, "process_tree_memory", read)
    sampler = MemorySampler().__enter__()
    assert taken.wait(10)  # the third sample is being taken
    metrics = sampler.metrics()
    assert (metrics["memory/host_gib"], metrics["memory/host_peak_gib"]) == (2, 5)


def test_sampler_that_fails_for_a_while_goes_on_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    fails, tries = threading.Event(), threading.Semaphore(0)
    fails.set()

    def read() -> TreeMemory:
        tries.release()
        if fails.is_set():
            raise OSError(24, "Too many open files")
        return TreeMemory(pss_bytes=GIB, num_processes=4)

    monkeypatch.setattr(memory, "INTERVAL_S", 0.001)
    monkeypatch.setattr(memory, "process_tree_memory", read)
    with MemorySampler() as sampler:
        for _ in range(3):
            assert tries.acquire(timeout=10)
        with pytest.raises(OSError, match="Too many open files"):
            sampler.metrics()
        fails.clear()
        for _ in range(10):
            assert tries.acquire(timeout=10), "the thread goes on"
        assert sampler.metrics()["memory/host_gib"] == 1
