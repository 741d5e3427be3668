"""A first signal is a request, a second one ends the program; what was installed before comes back."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from run_kit import RunStopped, StopRequest
from run_kit.signals import signals_as_exceptions, stopping_signal

LOOP = """
import select, sys
from dataclasses import dataclass
from run_kit import RunFolder, RunStopped, StopRequest, Tracker, TrackingConfig, run_cli

@dataclass(frozen=True, kw_only=True)
class Config:
    output: str = "."

def main(config):
    stop = StopRequest()
    tracking = TrackingConfig(report=False, curves=False, tensorboard=False)
    with Tracker(RunFolder.create(config.output, "x"), tracking, num_steps=100) as tracker:
        with stop.listen("stopping after this step"):
            for step in range(1, 101):
                tracker.info(f"step {step} begins")
                # The step lasts until the test says so. It looks again and again: Python handles a signal that comes
                # between its last look for signals and a blocking read only when the read returns.
                while not select.select([sys.stdin], [], [], 0.05)[0]:
                    pass
                sys.stdin.readline()
                tracker.log(step, {"a": 1.0})
                if stop.signal:
                    raise RunStopped(stop.signal)

run_cli(Config, main, app_name="loop", argv=sys.argv[1:])
"""


def _heed_signals() -> None:
    """A shell's background jobs ignore SIGINT, and those of nohup SIGHUP; their children inherit that."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def start_loop(folder: Path) -> "subprocess.Popen[str]":
    process = subprocess.Popen(
        [sys.executable, "-c", LOOP, f"output={folder}"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=_heed_signals,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "step 1 begins\n"
    return process


@pytest.mark.parametrize(
    ("signals", "code", "num_rows"),
    [
        ([signal.SIGINT], 130, 1),
        ([signal.SIGTERM], 143, 1),
        ([signal.SIGUSR1], 138, 1),
        ([signal.SIGINT, signal.SIGINT], 130, 0),
        ([signal.SIGUSR1, signal.SIGTERM], 143, 0),
        ([signal.SIGHUP], 129, 0),
    ],
)
def test_one_signal_ends_after_the_step_and_two_at_once(
    tmp_path: Path, signals: list[signal.Signals], code: int, num_rows: int
) -> None:
    process = start_loop(tmp_path)
    assert process.stdout is not None
    first, *others = signals
    out = ""
    process.send_signal(first)
    if first != signal.SIGHUP:
        while "stopping after this step" not in out:
            line = process.stdout.readline()
            assert line, out
            out += line
    for number in others:
        process.send_signal(number)
    if num_rows:
        rest, _ = process.communicate("go\n", timeout=120)
    else:  # the step does not end by itself
        rest = process.stdout.read()
        process.wait(120)
    out += rest
    assert process.returncode == code, out
    assert out.count("stopping after this step") == (signals[0] != signal.SIGHUP)
    assert "Traceback" not in out
    (run,) = tmp_path.iterdir()
    rows = (run / "metrics.tsv").read_text().splitlines()[1:] if num_rows else []
    assert len(rows) == num_rows
    assert f'"message": "by {signals[-1].name}"' in (run / "run.json").read_text()
    assert ("Traceback" in (run / "train.log").read_text()) == (num_rows == 0)


WAIT = """
import sys, time
from dataclasses import dataclass
import ray
from run_kit import RunFolder, Tracker, TrackingConfig, run_cli

@dataclass(frozen=True, kw_only=True)
class Config:
    output: str = "."

@ray.remote
def sleep():
    time.sleep(300)

def main(config):
    tracking = TrackingConfig(report=False, curves=False, tensorboard=False)
    with Tracker(RunFolder.create(config.output, "x"), tracking, num_steps=100) as tracker:
        pending = [sleep.remote()]
        tracker.info("waiting")
        ray.wait(pending)

ray.init(address="local", num_cpus=1, include_dashboard=False, logging_level="error")  # it handles SIGTERM itself
run_cli(Config, main, app_name="wait", argv=sys.argv[1:])
"""


@pytest.mark.slow
def test_a_signal_during_a_call_of_ray_is_the_one_that_ends_the_run(tmp_path: Path) -> None:
    """Ray answers any exception of a signal handler but KeyboardInterrupt with SystemExit(1)."""
    process = subprocess.Popen(
        [sys.executable, "-c", WAIT, f"output={tmp_path}"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line == "waiting\n":
            break
    time.sleep(1)  # it is in ray.wait then; before, the exception would arrive unchanged
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 143, out
    (run,) = tmp_path.iterdir()
    assert '"message": "by SIGTERM"' in (run / "run.json").read_text()


def test_a_second_signal_does_not_interrupt_the_cleanup(capfd: pytest.CaptureFixture[str]) -> None:
    cleaned = []
    with pytest.raises(SystemExit) as ended, signals_as_exceptions():  # noqa: PT012
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)
            cleaned.append(True)
    assert (ended.value.code, cleaned) == (143, [True])
    assert "still cleaning up" in capfd.readouterr().err


def test_another_exit_after_a_signal_keeps_its_code() -> None:
    def main() -> None:
        with signals_as_exceptions():
            try:
                os.kill(os.getpid(), signal.SIGTERM)
            except SystemExit:
                raise SystemExit(7) from None

    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 7
    assert stopping_signal(SystemExit(1)) is None


def test_handlers_come_back_when_nothing_asked_and_after_the_first_signal() -> None:
    handled = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
    before = [signal.getsignal(number) for number in handled]
    stop = StopRequest()
    with signals_as_exceptions():
        outer = [signal.getsignal(number) for number in handled]
        assert outer != before
        with stop.listen("later"):
            assert signal.getsignal(signal.SIGHUP) == outer[-1]
            os.kill(os.getpid(), signal.SIGUSR1)
            assert stop.signal == signal.SIGUSR1
            assert [signal.getsignal(number) for number in handled] == outer
        with stop.listen("it was asked before"), pytest.raises(SystemExit) as ended:
            os.kill(os.getpid(), signal.SIGTERM)
        assert ended.value.code == 143
    assert [signal.getsignal(number) for number in handled] == before


def test_an_ignored_signal_stays_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        stop = StopRequest()
        with signals_as_exceptions(), stop.listen(""):
            os.kill(os.getpid(), signal.SIGINT)
        assert stop.signal is None
    finally:
        signal.signal(signal.SIGINT, before)


def test_which_signal_an_exception_reports() -> None:
    assert stopping_signal(KeyboardInterrupt()) == signal.SIGINT
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        assert stopping_signal(RunStopped(number)) == number
    assert stopping_signal(SystemExit(129)) == signal.SIGHUP
    for error in (None, SystemExit(), SystemExit(1), SystemExit(128), SystemExit("x"), ValueError()):
        assert stopping_signal(error) is None
