"""`plinth runs compare RUN RUN...` and `plinth runs open RUN`: compares runs on the terminal, opens a report."""

import json
import os
import sys
import webbrowser
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from difflib import get_close_matches
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NoReturn

from .cli import run_cli
from .config.differences import config_differences
from .errors import ConfigError, TrackingError
from .report.data import RunData, read_run, run_labels
from .report.runs import write_report
from .tracking.metrics_table import columns_of
from .tracking.run_folder import RunFolder
from .tracking.summary import Measure, overview, tail_mean


@dataclass(frozen=True, kw_only=True)
class CompareConfig:
    """Metrics of several runs side by side, and the configuration keys in which the runs differ."""

    runs: tuple[str, ...] = ()
    """Run folders, or names of runs in `output_dir`; `plinth runs compare A B` is the same as `runs=[A, B]`."""
    output_dir: str = "outputs"
    """Parent of the run folders."""
    metrics: tuple[str, ...] = ()
    """Further metrics, as names or patterns such as actor/*: the mean of each run's last five steps."""

    def __post_init__(self) -> None:
        if len(self.runs) < 2:
            raise ConfigError(field="runs", value=self.runs, allowed="two or more, such as `compare RUN RUN`")


@dataclass(frozen=True, kw_only=True)
class OpenConfig:
    """Opens the report of a run in the browser and prints its path; writes the report if it is missing or older."""

    run: str
    """Run folder, or name of a run in `output_dir`; `plinth runs open RUN` is the same as `run=RUN`."""
    output_dir: str = "outputs"
    """Parent of the run folders."""
    browser: bool = True
    """Open the browser; false: write the report and print its path only."""


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table whose columns are as wide as their longest cell, two spaces apart. Rows have equal lengths."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


def find_run(run: str, output_dir: str) -> Path:
    """The folder of a run that is given by its path, or by its name in `output_dir`.

    Raises:
        TrackingError: there is no such folder; names the nearest run.
    """
    for path in (Path(output_dir) / run, Path(run)):
        if run and os.path.isdir(path):  # Path.is_dir raises for a name that is too long
            return path
    parent = Path(output_dir)
    names = sorted(path.name for path in parent.iterdir() if path.is_dir()) if os.path.isdir(parent) else []
    near = get_close_matches(run, names, n=1, cutoff=0.4)
    hint = f"nearest: {near[0]}" if near else "`plinth runs` lists them"
    raise TrackingError(f"neither a folder nor a run in output_dir={output_dir}", field="run", value=run, remedy=hint)


def compare(config: CompareConfig) -> None:
    """Prints the comparison."""
    folders = run_labels([find_run(run, config.output_dir) for run in config.runs])
    if len(folders) < len(config.runs):
        raise TrackingError(field="runs", value=config.runs, allowed="different runs")
    data = {label: read_run(Path(folder)) for label, folder in folders.items()}
    measures = [*overview([run.table for run in data.values()]), *_further(data, config.metrics)]
    differences = config_differences({label: run.config_text for label, run in data.items()})
    print(comparison_text(list(data), measures, differences))


def _further(data: Mapping[str, RunData], patterns: Sequence[str]) -> list[Measure]:
    tables = [run.table for run in data.values()]
    columns = columns_of(tables)
    unknown = [pattern for pattern in patterns if not any(fnmatchcase(name, pattern) for name in columns)]
    if unknown:
        near = get_close_matches(unknown[0], columns, n=1)
        hint = f"nearest: {near[0]}" if near else None
        raise TrackingError("matches no metric of these runs", field="metrics", value=unknown[0], remedy=hint)
    names = [name for name in columns if any(fnmatchcase(name, pattern) for pattern in patterns)]
    means = {name: tuple(tail_mean(table.series(name)[1]) for table in tables) for name in names}
    return [Measure(metric=name, title=name, form="{:.5g}", values=values) for name, values in means.items()]


def comparison_text(
    labels: Sequence[str], measures: Sequence[Measure], differences: Mapping[str, Sequence[str]]
) -> str:
    """Two tables with a column for each run: the measures, and the configuration keys that differ."""
    lines = aligned([("", *labels), *((measure.title, *measure.texts) for measure in measures)])
    if not differences:
        return "\n".join([*lines, "", "the configurations differ in nothing but the names of the runs"])
    rows = [(key, *(value or "-" for value in values)) for key, values in differences.items()]
    return "\n".join([*lines, "", *aligned([("keys that differ", *labels), *rows])])


def open_report(config: OpenConfig) -> None:
    """Writes the report where it is missing or older than the metrics, prints its path and opens the browser."""
    run = RunFolder(find_run(config.run, config.output_dir))
    page, metrics = run.report_file, run.metrics_file
    is_old = page.is_file() and metrics.is_file() and page.stat().st_mtime_ns < metrics.stat().st_mtime_ns
    if is_old or not page.is_file():
        write_report(run.path)
    print(page)
    if config.browser and not webbrowser.open(page.as_uri()):
        print("no browser was found here; copy the file, which needs no other file, to a machine that has one")


ACTIONS: dict[str, tuple[type[Any], Callable[[Any], None], str, str]] = {
    "compare": (CompareConfig, compare, "runs", "grpo_a_20260101_120000 grpo_b_20260101_130000 metrics=actor/*"),
    "open": (OpenConfig, open_report, "run", "grpo_a_20260101_120000 browser=false"),
}
"""Action -> its configuration, its function, the key of its runs, and an example."""


def run_action(name: str, arguments: Sequence[str]) -> NoReturn:
    """`plinth runs NAME`; exits with 2 for runs that do not exist or cannot be read."""
    config_cls, action, key, example = ACTIONS[name]
    keys = {field.name for field in fields(config_cls)}
    # The name of a run may hold `=`: only an argument `key=value` is a setting.
    settings = [a for a in arguments if a.startswith("-") or a == "help" or ("=" in a and a.partition("=")[0] in keys)]
    runs = [argument for argument in arguments if argument not in settings]
    if len(runs) > 1 and key == "run":
        print(
            f"error: {name} takes one run, got {', '.join(runs)}; compare several with plinth report", file=sys.stderr
        )
        raise SystemExit(2)
    settings += [f"{key}={json.dumps(runs if key == 'runs' else runs[0])}"] if runs else []
    run_cli(config_cls, action, app_name=f"plinth runs {name}", argv=settings, examples=(example,))
