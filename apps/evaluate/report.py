"""Writes the results of an evaluation: `results.tsv`, `summary.json` and `report.html`."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from apps.evaluate.config import EvaluateConfig
from apps.evaluate.results import Evaluation, Intervals, compare_all, intervals
from apps.tables import Row, cell_text, tsv_text
from ckpt import package_versions
from rl_core import BootstrapMean
from run_kit.cli import INVOKED_AS
from run_kit.config.redaction import tree_without_secrets, yaml_without_secrets
from run_kit.report.data import MAX_ROLLOUTS, fitting, spread
from run_kit.report.page import Section, Table, render
from run_kit.tracking.metrics_table import atomic_write

_FACTS = ("num_prompts", "samples_per_prompt", "num_failed", "mean_tokens", "truncated")
_COUNTS = ("num_gains", "num_losses")


def write_results(folder: Path, config: EvaluateConfig, evaluations: Sequence[Evaluation]) -> None:
    """Writes all three files; the first model is the baseline of the differences."""
    metrics = {one.name: intervals(one.columns(config.pass_at), config) for one in evaluations}
    facts = {one.name: {"label": one.name, **_facts(one)} for one in evaluations}
    comparisons = compare_all(evaluations, config)
    summary = {
        "command": INVOKED_AS.get(),
        "written_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "settings": tree_without_secrets(config),
        "versions": package_versions(),
        "models": [
            {**facts[label], "metrics": {name: asdict(one) for name, one in own.items()}}
            for label, own in metrics.items()
        ],
        "comparisons": [asdict(one) for one in comparisons],
    }
    records = [
        {"step": one.step or 0, "run": one.name, "prompt": prompt.prompt, "ground_truth": prompt.ground_truth}
        | {"prompt_id": prompt.prompt_id, "reward": sample.score, **asdict(sample)}
        for one in evaluations
        for prompt in one.prompts
        for sample in prompt.samples
    ]
    sections = [
        Section(
            key="results",
            title="Results",
            note=f"Mean over prompts and {config.confidence:.0%} bootstrap interval. Failed samples enter no metric: a "
            "prompt counts for pass@k if it has k scored samples.",
            table=_table({label: _texts(own, facts[label], _FACTS) for label, own in metrics.items()}),
        ),
        Section(
            key="differences",
            title="Differences",
            note=f"Against {evaluations[0].name}: paired bootstrap of the difference over the prompts; an interval "
            "without 0 is a difference.",
            table=_table({one.other: _texts(one.differences, vars(one), _COUNTS, "+.3f") for one in comparisons}),
        ),
        Section(key="samples", title="Samples", has_records=True),
        Section(key="settings", title="Settings", folded={"config.yaml": yaml_without_secrets(config)}),
    ]
    page = render(folder.name, sections, records=fitting(spread(records, MAX_ROLLOUTS)))
    atomic_write(folder / "results.tsv", tsv_text([row for one in evaluations for row in prompt_rows(one, config)]))
    atomic_write(folder / "summary.json", json.dumps(summary, indent=2, allow_nan=False) + "\n")
    atomic_write(folder / "report.html", page)


def interval_text(interval: BootstrapMean, form: str = ".3f") -> str:
    """`0.512 [0.470, 0.553]`."""
    return f"{interval.mean:{form}} [{interval.low:{form}}, {interval.high:{form}}]"


def prompt_rows(one: Evaluation, config: EvaluateConfig) -> list[Row]:
    """One row for each prompt and k of pass@k; a value that a prompt does not have is nan."""
    passed = {name: values for name, values in one.columns(config.pass_at).items() if name.startswith("pass@")}
    return [
        {
            "model": one.name,
            "step": one.step,
            "prompt_id": prompt.prompt_id,
            "data_source": prompt.data_source,
            "k": name.removeprefix("pass@"),
            "pass_at_k": values[index],
            "num_samples": len(prompt.samples),
            "num_right": prompt.num_right,
            "num_failed": one.num_samples - len(prompt.samples),
            "score_mean": prompt.score_mean,
            "majority": prompt.majority,
        }
        for index, prompt in enumerate(one.prompts)
        for name, values in passed.items()
    ]


def _facts(evaluation: Evaluation) -> dict[str, Any]:
    samples = [sample for prompt in evaluation.prompts for sample in prompt.samples]
    failures = (reason for prompt in evaluation.prompts for reason in prompt.failures)
    return {
        "step": evaluation.step,
        "seconds": round(evaluation.seconds, 1),
        "samples_per_prompt": evaluation.num_samples,
        "num_prompts": len(evaluation.prompts),
        "num_prompts_without_samples": sum(not prompt.samples for prompt in evaluation.prompts),
        "num_samples": len(samples),
        "num_failed": len(evaluation.prompts) * evaluation.num_samples - len(samples),
        "first_failure": next(failures, None),
        "mean_tokens": float(np.mean([sample.num_tokens for sample in samples])) if samples else None,
        "truncated": float(np.mean([sample.finish_reason == "length" for sample in samples])) if samples else None,
    }


def _texts(intervals: Intervals, facts: Mapping[str, Any], shown: Sequence[str], form: str = ".3f") -> dict[str, str]:
    """Cells of a table by column: intervals, and the facts that are shown."""
    cells = {name: interval_text(one, form) for name, one in intervals.items()}
    return cells | {name.removeprefix("num_").replace("_", " "): cell_text(facts[name]) for name in shown}


def _table(rows: Mapping[str, Mapping[str, str]]) -> Table | None:
    names = list(dict.fromkeys(name for cells in rows.values() for name in cells))
    cells = [(label, [own.get(name, "") for name in names]) for label, own in rows.items()]
    return Table(head=("model", *names), rows=cells) if rows else None
