"""Writes the results of an evaluation: `results.tsv`, `summary.json` and `report.html`."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from apps.evaluate.comparison import Comparison, compare_all
from apps.evaluate.config import EvaluateConfig
from apps.evaluate.results import Evaluation, intervals
from ckpt import package_versions
from rl_core import BootstrapMean
from rl_runtime import PromptResult
from run_kit.cli import INVOKED_AS
from run_kit.config.redaction import tree_without_secrets, yaml_without_secrets
from run_kit.report.data import MAX_ROLLOUTS, fitting, spread
from run_kit.report.page import Figure, Section, Table, render
from run_kit.tracking.curves import Line, line_svg
from run_kit.tracking.metrics_table import atomic_write

Intervals = dict[str, BootstrapMean]
_COLUMNS = (
    *("model", "step", "prompt_id", "data_source", "k", "pass_at_k"),
    *("num_samples", "num_right", "num_failed", "score_mean", "majority"),
)


def write_results(
    folder: Path, config: EvaluateConfig, own: Mapping[str, Evaluation], others: Mapping[str, Evaluation]
) -> dict[str, Intervals]:
    """Writes all three files; returns label -> metric -> interval.

    Args:
        own: the models of this evaluation.
        others: those of `compare`, by label; the first one is the baseline, else the first of `own`.
    """
    evaluations = {**others, **own}
    metrics = {label: intervals(one.columns(config.pass_at), config) for label, one in evaluations.items()}
    comparisons = compare_all(evaluations, config)
    models = [
        {"label": label, "is_own": label in own, **_facts(one), "metrics": _plain(metrics[label])}
        for label, one in evaluations.items()
    ]
    summary = {
        "command": INVOKED_AS.get(),
        "written_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "settings": tree_without_secrets(config),
        "versions": package_versions(),
        "models": models,
        "comparisons": [
            {
                "baseline": one.baseline,
                "other": one.other,
                **one.counts,
                "differences": _plain(one.differences),
            }
            for one in comparisons
        ],
    }
    records = [
        {"step": one.step or 0, "run": label, **_texts(prompt), "reward": sample.score, **asdict(sample)}
        for label, one in evaluations.items()
        for prompt in one.prompts
        for sample in prompt.samples
    ]
    sections = _sections(config, models, metrics, comparisons)
    note = f"{len(evaluations)} models, {len(records)} samples"
    page = render(folder.name, sections, note=note, records=fitting(spread(records, MAX_ROLLOUTS)))
    atomic_write(folder / "results.tsv", results_tsv(own, config))
    atomic_write(folder / "summary.json", json.dumps(summary, indent=2, allow_nan=False) + "\n")
    atomic_write(folder / "report.html", page)
    return metrics


def interval_text(interval: BootstrapMean | None, form: str = ".3f") -> str:
    """`0.512 [0.470, 0.553]`; empty without an interval."""
    if interval is None:
        return ""
    return f"{interval.mean:{form}} [{interval.low:{form}}, {interval.high:{form}}]"


def results_tsv(evaluations: Mapping[str, Evaluation], config: EvaluateConfig) -> str:
    """One row for each model, prompt and k of pass@k; a value that a prompt does not have is empty."""
    rows = (row for one in evaluations.values() for row in _rows(one, config))
    return "".join("\t".join(cells) + "\n" for cells in [_COLUMNS, *rows])


def _rows(one: Evaluation, config: EvaluateConfig) -> Iterator[list[str]]:
    passed = {name: values for name, values in one.columns(config.pass_at).items() if name.startswith("pass@")}
    for row, prompt in enumerate(one.prompts):
        for name, values in passed.items():
            cells = [one.name, one.step, prompt.prompt_id, prompt.data_source, name.removeprefix("pass@"), values[row]]
            cells += [len(prompt.samples), prompt.num_right, one.num_samples - len(prompt.samples)]
            yield [_cell(cell) for cell in [*cells, prompt.score_mean, prompt.majority]]


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return "" if math.isnan(value) else f"{value:.6g}"
    return "" if value is None else " ".join(str(value).split())


def _facts(evaluation: Evaluation) -> dict[str, Any]:
    samples = [sample for prompt in evaluation.prompts for sample in prompt.samples]
    failures = (reason for prompt in evaluation.prompts for reason in prompt.failures)
    return {
        "step": evaluation.step,
        "source": evaluation.source,
        "digest": evaluation.digest,
        "seconds": round(evaluation.seconds, 1),
        "samples_per_prompt": evaluation.num_samples,
        "num_prompts": len(evaluation.prompts),
        "num_prompts_without_samples": sum(not prompt.samples for prompt in evaluation.prompts),
        "num_samples": len(samples),
        "num_failed": evaluation.num_failed,
        "first_failure": next(failures, None),
        "mean_tokens": float(np.mean([sample.num_tokens for sample in samples])) if samples else None,
        "truncated": float(np.mean([sample.finish_reason == "length" for sample in samples])) if samples else None,
    }


def _plain(metrics: Intervals) -> dict[str, Any]:
    return {name: asdict(interval) for name, interval in metrics.items()}


def _sections(
    config: EvaluateConfig,
    models: Sequence[dict[str, Any]],
    metrics: Mapping[str, Intervals],
    comparisons: Sequence[Comparison],
) -> list[Section]:
    """The report: tables, curves over the steps, samples, settings."""
    baseline = comparisons[0].baseline if comparisons else ""
    facts = ("num_prompts", "samples_per_prompt", "num_failed", "mean_tokens", "truncated")
    steps = {model["label"]: model["step"] for model in models if model["is_own"] and model["step"] is not None}
    return [
        Section(
            key="results",
            title="Results",
            note=f"Mean over prompts and {config.confidence:.0%} bootstrap interval. Failed samples enter no metric: a "
            "prompt counts for pass@k if it has k scored samples.",
            table=_table(metrics, {m["label"]: {key: m[key] for key in facts} for m in models}),
        ),
        Section(key="steps", title="Over the steps", figures=_curves(steps, metrics)),
        Section(
            key="differences",
            title="Differences",
            note=f"Against {baseline}: paired bootstrap of the difference over the prompts of both; an interval "
            "without 0 is a difference.",
            table=_table(
                {one.other: one.differences for one in comparisons},
                {one.other: one.counts for one in comparisons},
                form="+.3f",
            )
            if comparisons
            else None,
        ),
        Section(key="samples", title="Samples", has_records=True),
        Section(key="settings", title="Settings", folded={"config.yaml": yaml_without_secrets(config)}),
    ]


def _table(metrics: Mapping[str, Intervals], facts: Mapping[str, Mapping[str, Any]], form: str = ".3f") -> Table:
    names = list(dict.fromkeys(name for own in metrics.values() for name in own))
    titles = [title.removeprefix("num_").replace("_", " ") for title in next(iter(facts.values()), ())]
    rows = [
        (label, [*(interval_text(own.get(name), form) for name in names), *map(_cell, facts[label].values())])
        for label, own in metrics.items()
    ]
    return Table(head=("model", *names, *titles), rows=rows)


def _curves(steps: Mapping[str, int], metrics: Mapping[str, Intervals]) -> list[Figure]:
    """One chart per metric over the models that have steps, if there are several."""
    figures = []
    for name in dict.fromkeys(name for label in steps for name in metrics[label] if len(steps) > 1):
        points = [(step, metrics[label][name]) for label, step in steps.items() if name in metrics[label]]
        xs = [step for step, _ in points]
        lines = [Line(part, xs, [getattr(one, part) for _, one in points]) for part in ("mean", "low", "high")]
        figures.append(Figure(title=name, svg=line_svg(lines, title=name)))
    return figures


def _texts(prompt: PromptResult) -> dict[str, str]:
    return {"prompt_id": prompt.prompt_id, "prompt": prompt.prompt, "ground_truth": prompt.ground_truth}
