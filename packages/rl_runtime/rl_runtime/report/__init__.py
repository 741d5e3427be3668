"""The HTML report of a run."""

from pathlib import Path


def write_report(run_folder: Path) -> Path:
    return run_folder / "report.html"
