"""README's pictures: small enough, and drawn from the metrics of a run."""

import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from run_kit import MetricsTable
from scripts.pictures import FOLDER, MAX_BYTES, learning_curve

README = Path(__file__).resolve().parents[1] / "README.md"


def test_readme_shows_the_pictures_on_its_first_screen() -> None:
    first = README.read_text(encoding="utf-8").split("## ")[0]
    shown = {Path(name).name: README.parent / name for name in re.findall(r"!\[[^\]]+\]\(([^)]+)\)", first)}
    assert set(shown) == {path.name for path in FOLDER.iterdir()}
    for path in shown.values():
        assert 0 < path.stat().st_size <= MAX_BYTES
    ElementTree.parse(FOLDER / "learning_curve.svg")
    assert (FOLDER / "report.png").read_bytes().startswith(b"\x89PNG")


def test_the_learning_curve_is_drawn_from_the_metrics(tmp_path: Path) -> None:
    table = MetricsTable(tmp_path / "metrics.tsv")
    table.log(0, {"val/accuracy": 0.25})
    with pytest.raises(ValueError, match="no critic/score/mean"):
        learning_curve(table)
    for step in range(1, 13):
        table.log(step, {"critic/score/mean": step / 12})
    table.log(12, {"val/accuracy": 0.75})
    curve = learning_curve(table)
    ElementTree.fromstring(curve)
    assert "mean score of each step, raw and smoothed; held-out accuracy 0.250 before, 0.750 after" in curve
