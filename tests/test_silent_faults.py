"""benchmarks/silent: faults of peers show as its table says, and ours do not. One that is gone has to be written."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.thorough]
REPO = Path(__file__).parents[1]


def results(script: str) -> list[dict[str, Any]]:
    """The lines of JSON that the script prints."""
    command = [sys.executable, "-m", f"benchmarks.silent.{script}"]
    ran = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=400, check=False)
    lines = [json.loads(line) for line in ran.stdout.splitlines() if line.startswith('{"release"')]
    assert lines, ran.stderr[-2000:]
    return lines


def test_deepspeed_loses_micro_batches_at_stages_1_and_2() -> None:
    for line in results("lost_gradients"):
        assert line["ours"] == pytest.approx(line["true"], rel=1e-4)
        assert (abs(line["peer"] / line["true"] - 1) > 0.1) == (line["stage"] < 3)


def test_deepspeed_sums_micro_batches_in_bf16() -> None:
    for line in results("bf16_sums"):
        assert line["ours"] < 1e-4 < 1e-3 < line["peer"]


def test_deepspeed_rounds_rotary_frequencies() -> None:
    (line,) = results("rounded_positions")
    assert line["ours"] < 1e-2 < 1 < line["peer"]


def test_transformers_mixes_the_sequences_of_hybrids_only() -> None:
    for line in results("mixed_sequences"):
        assert line["ours"] < 1e-4
        assert (line["peer"] > 0.1) == (line["model"] != "qwen3")


def test_trl_resumes_with_other_samples() -> None:
    (line,) = results("resumed_prompts")
    assert (line["ours_twice"], line["ours_never"]) == (0, 0)
    assert line["peer_twice"] == line["peer_never"] > 0


def test_weights_outlive_deepspeeds_gathers() -> None:
    (line,) = results("gathered_views")
    assert (line["peer_views"], line["ours"]) == (0, 0)
    assert line["peer_nested"].startswith("raises")
