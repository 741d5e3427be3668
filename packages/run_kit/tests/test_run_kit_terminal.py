"""A terminal that is ASCII, closed or full does not end a run: its log has every line, and all steps are done."""

import io
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from run_kit.terminal import encodable

APP = """
import logging, signal, sys, time
from dataclasses import dataclass
from run_kit import RunFolder, Tracker, TrackingConfig, run_cli

@dataclass(frozen=True, kw_only=True)
class Config:
    output: str = ""

def main(config):
    print("before the folder \\u2192", flush=True)
    if not config.output:
        return
    tracking = TrackingConfig(report=False, curves=False, tensorboard=False)
    with Tracker(RunFolder.create(config.output, "x"), tracking, num_steps=3) as tracker:
        sys.stdin.read(1)
        for step in (1, 2, 3):
            tracker.info(f"step {step}: \\u2192 \\xe9 \\ud800")
            logging.getLogger("run_kit").warning("a warning \\u2192")
            tracker.log(step, {"a": 1.0})
    print("after the folder", flush=True)

run_cli(Config, main, app_name="x", argv=sys.argv[1:])
"""


@contextmanager
def output_to(place: str) -> Iterator[int]:
    """A file descriptor that a process may write to, at the beginning."""
    if place == "/dev/full":
        file = os.open(place, os.O_WRONLY)
    else:
        reader, file = pty.openpty() if place == "closed terminal" else os.pipe()
        os.close(reader)
    yield file
    os.close(file)


def run(arguments: list[str], stdout: int, stderr: int, **environment: str) -> "subprocess.CompletedProcess[bytes]":
    return subprocess.run(
        [sys.executable, "-c", APP, *arguments],
        input=b"x",
        stdout=stdout,
        stderr=stderr,
        env={**os.environ, **environment},
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN),
        timeout=60,
    )


def check_all_is_done(folder: Path) -> None:
    (made,) = folder.iterdir()
    log = (made / "train.log").read_text()
    assert [f"step {step}: → é \\ud800" in log for step in (1, 2, 3)] == [True] * 3
    assert log.count("WARNING run_kit: a warning →") == 3
    assert (made / "metrics.tsv").read_text() == "step\ta\n1\t1\n2\t1\n3\t1\n"
    assert '"state": "finished"' in (made / "run.json").read_text()


@pytest.mark.parametrize("place", ["/dev/full", "closed pipe", "closed terminal"])
def test_a_terminal_that_takes_nothing_does_not_end_a_run(tmp_path: Path, place: str) -> None:
    with output_to(place) as file:
        done = run([f"output={tmp_path}"], file, file)
    check_all_is_done(tmp_path)
    assert done.returncode == 0


def test_characters_that_the_terminal_lacks_are_escaped(tmp_path: Path) -> None:
    done = run([f"output={tmp_path}"], subprocess.PIPE, subprocess.PIPE, PYTHONIOENCODING="ascii")
    check_all_is_done(tmp_path)
    assert done.returncode == 0
    assert b"step 3: \\u2192 \\xe9 \\ud800\n" in done.stdout
    assert b"before the folder \\u2192\n" in done.stdout
    latin = io.TextIOWrapper(io.BytesIO(), encoding="latin-1")
    assert encodable("→ é \ud800", latin) == "\\u2192 é \\ud800"


def test_output_that_no_log_has_is_not_lost_in_silence() -> None:
    with output_to("/dev/full") as file:
        done = run([], file, subprocess.PIPE)
    assert (done.returncode, b"No space left" in done.stderr) == (1, True)


def test_a_process_without_streams_runs(tmp_path: Path) -> None:
    command = ["sh", "-c", 'exec "$@" >&- 2>&-', "sh", sys.executable, "-c", APP, f"output={tmp_path}"]
    assert subprocess.run(command, input=b"x", timeout=60).returncode == 0
    check_all_is_done(tmp_path)
