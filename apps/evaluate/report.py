"""Writes the results of an evaluation: `results.tsv`, `summary.json` and `report.html`."""

import csv
import io
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np

from apps.evaluate.comparison import Comparison, Pair, compare_all, share_right
from apps.evaluate.config import EvaluateConfig
from apps.evaluate.results import Evaluation, intervals
from ckpt import package_versions
from rl_core import BootstrapMean
from rl_runtime import PromptResult
from run_kit.cli import INVOKED_AS
from run_kit.config.redaction import tree_without_secrets, yaml_without_secrets
from run_kit.report.data import MAX_ROLLOUTS, fitting
from run_kit.report.page import Color, Figure, Section, Sides, Table, render
from run_kit.tracking.curves import Line, line_svg
from run_kit.tracking.metrics_table import atomic_write

Intervals = dict[str, BootstrapMean]
_MOST_FLIPS = 200
"""Prompts that the page shows side by side, over all comparisons."""
_MOST_RESPONSES = 3
"""Responses of a model that the page shows for a prompt."""


def write_results(
    folder: Path, config: EvaluateConfig, own: Sequence[Evaluation], others: Mapping[str, Evaluation]
) -> dict[str, Intervals]:
    """Writes all three files; returns label -> metric -> interval.

    Args:
        own: the models of this evaluation.
        others: those of `compare`, by label; the first one is the baseline, else the first of `own`.
    """
    evaluations = dict(others) | {evaluation.name: evaluation for evaluation in own}
    found = {label: intervals(one.columns(config.pass_at), config) for label, one in evaluations.items()}
    comparisons = compare_all(evaluations, config)
    atomic_write(folder / "results.tsv", results_tsv(own, config))
    summary = summary_tree(config, own, evaluations, found, comparisons)
    atomic_write(folder / "summary.json", json.dumps(summary, indent=2, allow_nan=False) + "\n")
    atomic_write(folder / "report.html", page(folder.name, config, evaluations, found, comparisons))
    return found


def interval_text(interval: BootstrapMean, *, sign: bool = False) -> str:
    """`0.512 [0.470, 0.553]`."""
    form = "{:+.3f}" if sign else "{:.3f}"
    return f"{form} [{form}, {form}]".format(interval.mean, interval.low, interval.high)


# ---------------------------------------------------------------- tables


def results_tsv(evaluations: Sequence[Evaluation], config: EvaluateConfig) -> str:
    """One row for each model, prompt and k of pass@k; a value that a prompt does not have is empty."""
    text = io.StringIO()
    columns = ["model", "step", "prompt_id", "data_source", "k", "pass_at_k"]
    columns += ["num_samples", "num_right", "num_failed", "score_mean", "majority"]
    table = csv.writer(text, delimiter="\t", lineterminator="\n")
    table.writerow(columns)
    for evaluation in evaluations:
        table.writerows(_rows(evaluation, config))
    return text.getvalue()


def _rows(evaluation: Evaluation, config: EvaluateConfig) -> Iterator[list[Any]]:
    passed = {name: values for name, values in evaluation.columns(config.pass_at).items() if name.startswith("pass@")}
    for row, prompt in enumerate(evaluation.prompts):
        for name, values in passed.items():
            yield [
                *(evaluation.name, evaluation.step, prompt.prompt_id, prompt.data_source, name.removeprefix("pass@")),
                *(_cell(values[row]), len(prompt.samples), prompt.num_right),
                *(evaluation.num_samples - len(prompt.samples), _cell(prompt.score_mean), _cell(prompt.majority)),
            ]


def _cell(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.6g}"


def summary_tree(
    config: EvaluateConfig,
    own: Sequence[Evaluation],
    evaluations: Mapping[str, Evaluation],
    found: Mapping[str, Intervals],
    comparisons: Sequence[Comparison],
) -> dict[str, Any]:
    """The content of summary.json."""
    return {
        "command": INVOKED_AS.get(),
        "written_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "settings": tree_without_secrets(config),
        "versions": package_versions(),
        "models": [
            {"label": label, "is_own": any(one is mine for mine in own), **_facts(one), "metrics": _plain(found[label])}
            for label, one in evaluations.items()
        ],
        "comparisons": [
            {
                **{name: getattr(one, name) for name in ("baseline", "other", "num_prompts", "num_unmatched")},
                **{name: getattr(one, name) for name in ("num_other_text", "num_unscored")},
                "num_gains": len(one.gains),
                "num_losses": len(one.losses),
                "differences": _plain(one.differences),
            }
            for one in comparisons
        ],
    }


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


def _plain(found: Intervals) -> dict[str, Any]:
    return {name: asdict(interval) for name, interval in found.items()}


# ---------------------------------------------------------------- page


def page(
    name: str,
    config: EvaluateConfig,
    evaluations: Mapping[str, Evaluation],
    found: Mapping[str, Intervals],
    comparisons: Sequence[Comparison],
) -> str:
    """The report: one HTML page that loads nothing."""
    num_samples = sum(one.num_scored for one in evaluations.values())
    records = chain.from_iterable(_records(label, one) for label, one in evaluations.items())
    shown = [fitting(record) for record in islice(records, 0, None, max(1, -(-num_samples // MAX_ROLLOUTS)))]
    most = max(1, _MOST_FLIPS // max(1, 2 * len(comparisons)))
    flips = {title: pairs for one in comparisons for title, pairs in _flips(one, most)}
    baseline = comparisons[0].baseline if comparisons else ""
    sections = [
        Section(
            key="results",
            title="Results",
            note=f"Mean over prompts and {config.confidence:.0%} bootstrap interval. Failed samples enter no metric: a "
            "prompt counts for pass@k if it has k scored samples.",
            table=_results(evaluations, found),
        ),
        Section(key="steps", title="Over the steps", figures=_curves(evaluations, found)),
        Section(
            key="differences",
            title="Differences",
            note=f"Against {baseline}: paired bootstrap of the difference over the prompts of both; an interval "
            "without 0 is a difference.",
            table=_differences(comparisons) if comparisons else None,
        ),
        Section(key="flips", title="Where they disagree", folded=flips),
        Section(key="samples", title="Samples", note=f"{len(shown)} of {num_samples} samples", has_records=bool(shown)),
        Section(key="settings", title="Settings", folded={"config.yaml": yaml_without_secrets(config)}),
    ]
    return render(name, sections, note=f"{len(evaluations)} models, {num_samples} samples", records=shown)


def _results(evaluations: Mapping[str, Evaluation], found: Mapping[str, Intervals]) -> Table:
    names = list(dict.fromkeys(name for metrics in found.values() for name in metrics))
    facts = {label: _facts(one) for label, one in evaluations.items()}
    rows = [
        (
            label,
            [
                *(interval_text(found[label][name]) if name in found[label] else "" for name in names),
                *(str(facts[label][key]) for key in ("num_prompts", "samples_per_prompt", "num_failed")),
                *(
                    "" if facts[label][key] is None else f"{facts[label][key]:.3g}"
                    for key in ("mean_tokens", "truncated")
                ),
                (evaluations[label].digest or "unknown")[:12],
            ],
        )
        for label in evaluations
    ]
    titles = ("model", *names, "prompts", "n", "failed", "tokens", "truncated", "digest")
    return Table(head=titles, rows=rows)


def _curves(evaluations: Mapping[str, Evaluation], found: Mapping[str, Intervals]) -> list[Figure]:
    """One chart per metric over the models that have steps."""
    steps = {label: one.step for label, one in evaluations.items() if one.step is not None and "/" not in label}
    if len(steps) < 2:
        return []
    figures = []
    for name in dict.fromkeys(name for label in steps for name in found[label]):
        points = [(step, found[label][name]) for label, step in steps.items() if name in found[label]]
        lines = [
            Line(part, [step for step, _ in points], [getattr(one, part) for _, one in points])
            for part in ("mean", "low", "high")
        ]
        figures.append(Figure(title=name, svg=line_svg(lines, title=name)))
    return figures


def _differences(comparisons: Sequence[Comparison]) -> Table:
    names = list(dict.fromkeys(name for one in comparisons for name in one.differences))
    rows = [
        (
            one.other,
            [
                *(interval_text(one.differences[name], sign=True) if name in one.differences else "" for name in names),
                *(str(len(flips)) for flips in (one.gains, one.losses)),
                *(str(number) for number in (one.num_prompts, one.num_unmatched, one.num_other_text, one.num_unscored)),
            ],
        )
        for one in comparisons
    ]
    counts = ("prompts better", "worse", "in both", "in one only", "with other text", "unscored")
    return Table(head=("model", *names, *counts), rows=rows)


def _flips(comparison: Comparison, most: int) -> Iterator[tuple[str, list[Sides]]]:
    for title, pairs in (("better", comparison.gains), ("worse", comparison.losses)):
        if pairs:
            head = f"{comparison.other} is {title} than {comparison.baseline} on {len(pairs)} prompts"
            head += f" (the largest {most})" if len(pairs) > most else ""
            yield head, [_pair(pair, comparison) for pair in pairs[:most]]


def _pair(pair: Pair, comparison: Comparison) -> Sides:
    one = pair.baseline
    sides = dict([_side(comparison.baseline, pair.baseline), _side(comparison.other, pair.other)])
    note = f"ground truth {fitting(one.ground_truth)}"
    return Sides(title=one.prompt_id, note=note, prompt=fitting(one.prompt), sides=sides)


def _side(label: str, result: PromptResult) -> tuple[str, list[tuple[str, Color, str]]]:
    title = f"{label}: {result.num_right} of {len(result.samples)} right ({share_right(result):.0%})"
    return title, [
        (
            f"{'right' if sample.is_right else 'wrong'}, {sample.score:g}",
            "up" if sample.is_right else "down",
            fitting(sample.response),
        )
        for sample in result.samples[:_MOST_RESPONSES]
    ]


def _records(label: str, evaluation: Evaluation) -> Iterator[dict[str, Any]]:
    """Samples for the search of the page."""
    for prompt in evaluation.prompts:
        for sample in prompt.samples:
            yield {
                "step": evaluation.step or 0,
                "run": label,
                "prompt_id": prompt.prompt_id,
                "prompt": prompt.prompt,
                "response": sample.response,
                "reward": sample.score,
                "right": sample.is_right,
                "ground_truth": prompt.ground_truth,
                "finish_reason": sample.finish_reason,
                "num_tokens": sample.num_tokens,
            }
