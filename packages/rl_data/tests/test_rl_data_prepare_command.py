"""`python -m rl_data prepare`: its output, refusals, data card and memory."""

import json
import os
import re
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rl_data_rows import GSM8K, write_lines

from plinth_testing import raises
from rl_data import DataConfigError, PrepareConfig
from rl_data.__main__ import main as module
from rl_data.prepare.card import DUPLICATE
from rl_data.prepare.command import main


def test_the_card_has_counts_the_command_and_examples_in_fences(tmp_path: Path) -> None:
    rows = [*GSM8K, {"question": "a | ``` & 3", "answer": "#### 3"}, {"question": "A  | ``` & 3", "answer": "#### 4"}]
    file = write_lines(tmp_path / "a.jsonl", rows[::-1] + GSM8K[:2])
    assert main([str(file), "--out", str(tmp_path / "out"), "--validation", "0", "--seed", "3"]) == 0
    text = (tmp_path / "out" / "card.md").read_text()
    for words in ("--seed 3", "24 rows read", "21 rows in train.parquet", f"## Examples: {DUPLICATE}"):
        assert words in text
    assert re.search("^````\n.*```.*\n.*\n````$", text, re.MULTILINE | re.DOTALL), "a longer fence around a fence"


def test_the_command_reports_and_fails_as_commands_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write_lines(tmp_path / "a.jsonl", GSM8K)
    assert main([str(file), "--out", str(tmp_path / "out")]) == 0
    shown = capsys.readouterr().out
    assert "20 rows read" in shown
    assert re.search(r"\d+ rows in train\.parquet", shown)
    assert "ground truth" not in shown
    some = write_lines(tmp_path / "c.jsonl", [{"question": "p", "ground_truth": "a"}, {"question": "q"}])
    assert main([str(some), "--out", str(tmp_path / "c"), "--validation", "0"]) == 0
    assert "\n1 rows have no ground truth" in capsys.readouterr().out
    assert main([str(file), "--out", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err.startswith("error: ")
    assert main([str(file), "--out", "x", "--validation", "1.5"]) == 2
    assert capsys.readouterr().err == "error: --validation: got 1.5; allowed: at least 0 and below 1\n"
    plain = write_lines(tmp_path / "b.jsonl", [{"question": "q", "answer": "a"}])
    assert main([str(plain), "--out", str(tmp_path / "b")]) == 2
    assert "--ground-truth-column answer" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([str(file), "--out", "x", "--duplicates", "nope"])
    assert main([str(file), "--out", "/proc/nothing/out"]) == 1
    assert "/proc/nothing" in capsys.readouterr().err


@pytest.mark.parametrize("options", [{"validation": -0.1}, {"seed": -1}, {"duplicates": "all"}])
def test_bad_options_are_refused(options: dict[str, Any]) -> None:
    field, value = next(iter(options.items()))
    with raises(DataConfigError, field=field, value=value):
        PrepareConfig(**({"files": ("a",), "out": "b"} | options))


def test_the_options_are_printed_and_nothing_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Batch files check a command by its configuration."""
    arguments = ["a.jsonl", "--out", str(tmp_path / "out"), "--validation", "0.2", "--print-config"]
    assert main(arguments) == 0
    printed = json.loads(capsys.readouterr().out)
    assert (printed["files"], printed["validation"], printed["duplicates"]) == (["a.jsonl"], 0.2, "near")
    assert list(tmp_path.iterdir()) == []
    assert main([*arguments, "--validation", "2"]) == 2


def test_the_module_runs_as_a_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_lines(tmp_path / "a.jsonl", GSM8K)
    command = [sys.executable, "-m", "rl_data", "prepare", "a.jsonl", "--out", "out", "--validation", "0"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "20 rows in train.parquet" in done.stdout
    assert module([]) == 2
    assert "usage" in capsys.readouterr().err


@pytest.mark.thorough
def test_memory_is_bounded(tmp_path: Path) -> None:
    """1 GiB of rows of 10 KB with 700 MiB of data; files that are mapped do not count."""
    line = json.dumps({"question": "How many apples has {} of the class?", "answer": f"{'word ' * 2000}\n#### 1"})
    with (tmp_path / "a.jsonl").open("w") as stream:
        for number in range((1 << 30) // len(line)):
            stream.write(line.replace("{}", str(number)) + "\n")
    command = [sys.executable, "-m", "rl_data", "prepare", "a.jsonl", "--out", "out"]
    limit = 700 << 20
    done = subprocess.run(
        command,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},  # each thread of Arrow reserves address space of its own
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_DATA, (limit, limit)),
    )
    assert done.returncode == 0, done.stderr
