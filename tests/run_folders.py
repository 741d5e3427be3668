"""Reads and compares run folders: metrics, recorded samples, the ledger of samples."""

import csv
import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rl_runtime.training.ledger import SampleRow

# Measured, not computed: they differ from run to run and between hosts.
NOT_EXACT = ("timing_s/", "perf/", "memory/", "checkpoint/upload_", "sync/total_s", "rollout/tokens_per_s")


TINY_STEPS = (
    *("batch.train_batch_size=4", "batch.mini_batch_size=2", "sampling.n=4"),
    "algorithm.entropy_coef=0.05",  # a gradient even where all answers are equally wrong
    *("warm_start.steps=5", "warm_start.optim.warmup_steps=0"),
    *("trainer.val_before_train=false", "trainer.val_after_train=false"),
)
"""Keys of a run of GRPO with small steps, for a test of what happens between them."""


def only(paths: Iterable[Path]) -> Path:
    (path,) = paths
    return path


def metrics_rows(run: Path) -> list[dict[str, str]]:
    """The rows of metrics.tsv."""
    with (run / "metrics.tsv").open() as file:
        return list(csv.DictReader(file, delimiter="\t"))


def column(run: Path, name: str) -> list[float]:
    """The values of a metric, without the steps that lack it."""
    return [float(row[name]) for row in metrics_rows(run) if row.get(name)]


def rollouts(run: Path) -> list[dict[str, Any]]:
    """The samples that the run has recorded, in the order of its steps."""
    return [json.loads(line) for file in sorted(run.glob("rollouts/*.jsonl")) for line in file.open()]


def exact_metrics(run: Path) -> dict[str, dict[str, str]]:
    """Metrics by step, without measured ones (times, memory) and empty cells."""
    return {
        row["step"]: {name: value for name, value in row.items() if value and not name.startswith(NOT_EXACT)}
        for row in metrics_rows(run)
    }


def comparable(run: Path) -> dict[str, dict[str, str]]:
    """Exact metrics by step, but those of the push, which a step that was saved and not logged lacks, and of faults."""
    left_out = ("sync/", "rollout/num_restarts", "rollout/num_retries")
    return {
        step: {name: value for name, value in row.items() if not name.startswith(left_out)}
        for step, row in exact_metrics(run).items()
    }


def check_ledger(rows: list[SampleRow], *, steps: int, groups: int, samples: int, max_staleness: int) -> None:
    """Every step has its samples, none is there twice, none is too old, and no prompt is missing."""
    assert Counter((row.group, row.sample) for row in rows).most_common(1)[0][1] == 1, "a sample is there twice"
    assert {row.outcome for row in rows} == {"trained"}
    assert Counter(row.step for row in rows) == dict.fromkeys(range(1, steps + 1), groups * samples)
    for row in rows:
        assert 0 <= row.step - 1 - int(row.oldest_version) <= max_staleness, row
    numbers = sorted({int(row.group.split("/")[1].split(":")[0]) for row in rows})
    assert numbers == list(range(steps * groups)), "a group was lost"
