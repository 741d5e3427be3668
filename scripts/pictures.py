"""Pictures of README.md from a finished run: `python scripts/pictures.py RUN_FOLDER [--browser PYTHON]`.

Writes into docs/pictures: `learning_curve.svg`, the score of each step, and `report.png`, the first screen of the
report. The second needs PyQt6-WebEngine (scripts/screenshot.py): `--browser` is the Python of an environment
that has it.
"""

import argparse
import io
import subprocess
import sys
import tempfile
from pathlib import Path

from matplotlib.figure import Figure
from PIL import Image

from run_kit import MetricsTable, RunFolder, write_report
from run_kit.tracking.curves import Line, draw_lines

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "pictures"
MAX_BYTES = 150_000
WIDTH, HEIGHT = 640, 350
_NUM_COLORS = 128


def learning_curve(table: MetricsTable) -> str:
    """The mean score of each step, raw and smoothed, as the text of an SVG file; held-out accuracies in its legend.

    Raises:
        ValueError: a run without scores.
    """
    steps, scores = table.series("critic/score/mean")
    if not steps:
        raise ValueError(f"{table.path} has no critic/score/mean; give a run of plinth grpo or plinth ppo")
    accuracies = table.series("val/accuracy")[1]
    label = "mean score of each step, raw and smoothed"
    if len(accuracies) > 1:
        label += f"; held-out accuracy {accuracies[0]:.3f} before, {accuracies[-1]:.3f} after"
    figure = Figure(figsize=(WIDTH / 72, HEIGHT / 72), layout="constrained")
    axes = figure.subplots()
    axes.set_title(label, fontsize=10)
    axes.set_xlabel("step", fontsize=10)
    axes.grid(True, linewidth=0.6)
    draw_lines(axes, [Line(label, steps, scores)])
    picture = io.StringIO()
    figure.savefig(picture, format="svg")
    return picture.getvalue()


def report_page(run: RunFolder, browser: str, size: tuple[int, int]) -> bytes:
    """The first screen of a run's report as a PNG file of few colors.

    Args:
        browser: the Python that has PyQt6-WebEngine.
        size: width and height of the window in CSS pixels.

    Raises:
        subprocess.CalledProcessError: the picture could not be taken; its stderr is shown.
    """
    with tempfile.TemporaryDirectory() as folder:
        page, picture = write_report(run.path, Path(folder) / "report.html"), Path(folder) / "report.png"
        script = str(Path(__file__).with_name("screenshot.py"))
        options = [
            "--width",
            str(size[0]),
            "--height",
            str(size[1]),
            "--script",
            "document.body.style.overflow='hidden'",
        ]
        subprocess.run([browser, script, str(page), str(picture), *options], check=True)
        compressed = io.BytesIO()
        with Image.open(picture) as image:
            image.convert("RGB").quantize(_NUM_COLORS, dither=Image.Dither.NONE).save(compressed, "PNG", optimize=True)
    return compressed.getvalue()


def main() -> int:
    """Writes the pictures; returns 1 if one of them is too large for a README."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=RunFolder.open, metavar="RUN_FOLDER")
    parser.add_argument("--browser", default=sys.executable, help="Python with PyQt6-WebEngine (default: this one)")
    arguments = parser.parse_args()
    run: RunFolder = arguments.run
    curve = learning_curve(MetricsTable(run.metrics_file)).encode()
    pictures = {"learning_curve.svg": curve, "report.png": report_page(run, arguments.browser, (1180, 760))}
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, content in pictures.items():
        (FOLDER / name).write_bytes(content)
        print(f"{FOLDER / name}: {len(content):,} bytes" + (" (too large)" if len(content) > MAX_BYTES else ""))
    return int(any(len(content) > MAX_BYTES for content in pictures.values()))


if __name__ == "__main__":
    sys.exit(main())
