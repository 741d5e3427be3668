"""benchmarks/small_cards without GPUs: the commands that it gives to the apps."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from apps.grpo.config import GrpoConfig
from apps.sft.config import SftConfig
from benchmarks.small_cards.run import PRESETS, ballast, keys, medians
from run_kit import load_config

ROOT = Path(__file__).resolve().parents[1]
APPS = ROOT / "apps"

# A benchmark whose holders take no memory; they execute the first lines, too.
HOLDING = """
import signal, threading
from benchmarks.small_cards import run
run.take = lambda gpu, free_gib: []
if __name__ == "__main__":
    interrupted = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: interrupted.set())
    with run.ballast(2, 1.0):
        print("held", flush=True)
        interrupted.wait(60)
    print("left")
"""


@pytest.fixture
def benchmark_with_ballast(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], list[psutil.Process]]]:
    """The process of `HOLDING`, which leads a process group, and its holders."""
    (tmp_path / "holding.py").write_text(HOLDING)
    command, env = [sys.executable, str(tmp_path / "holding.py")], os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "held\n"
            children = psutil.Process(process.pid).children()
            holders = [child for child in children if "spawn_main" in " ".join(child.cmdline())]
            assert len(holders) == 2
            yield process, holders
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def test_the_apps_accept_every_key(tmp_path: Path) -> None:
    loaded = {}
    for part, kind in (("sft", SftConfig), ("grpo", GrpoConfig)):
        preset, *overrides = keys(tmp_path, part, 3, 2)
        assert preset == f"preset={PRESETS[part]}"
        file = APPS / part / "presets" / f"{PRESETS[part]}.yaml"
        loaded[part] = load_config(kind, presets=[file], overrides=overrides)
    assert loaded["sft"].supervised.num_steps(10_000) == loaded["grpo"].trainer.total_training_steps == 3


def test_medians_are_of_the_steps_after_the_first_one(tmp_path: Path) -> None:
    folder = tmp_path / "outputs" / "grpo_20260101_000000"
    folder.mkdir(parents=True)
    assert medians(tmp_path, "sft") == ""
    (folder / "metrics.tsv").write_text(
        "step\ttiming_s/step\ttiming_s/sync\trollout/log_prob_mismatch\n1\t9\t9\t9\n2\t1\t0\t1\n3\t2\t0\t2\n4\t3\t0\t3\n"
    )
    assert medians(tmp_path, "grpo") == "step 2.0 s, mismatch of log-probs 2"


def test_no_ballast_starts_no_process() -> None:
    with ballast(2, 0):
        pass


def test_a_benchmark_ends_whose_holders_got_its_sigterm(
    benchmark_with_ballast: tuple[subprocess.Popen[str], list[psutil.Process]],
) -> None:
    process, _ = benchmark_with_ballast
    os.killpg(process.pid, signal.SIGTERM)  # as `timeout` does
    assert process.communicate(timeout=20)[0] == "left\n"


def test_holders_end_with_a_benchmark_that_is_killed(
    benchmark_with_ballast: tuple[subprocess.Popen[str], list[psutil.Process]],
) -> None:
    process, holders = benchmark_with_ballast
    process.kill()
    assert not psutil.wait_procs(holders, timeout=20)[1]
