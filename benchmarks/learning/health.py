"""Draws the curves that tell a healthy run from a sick one.

`python -m benchmarks.learning.health PICTURE.svg NAME=RUN_FOLDER ...`: score, entropy, KL, mismatch of log-probs and
response length of each run over its steps, from `metrics.tsv`.
"""

import argparse
import csv
from pathlib import Path

from benchmarks.learning.curves import plotting, save

PANELS = {
    "critic/score/mean": "mean score",
    "actor/entropy": "entropy per token",
    "actor/kl_old": "KL of the updates",
    "rollout/log_prob_mismatch": "mismatch per token",
    "response_length/mean": "response tokens",
}
"""Metrics drawn, and their titles."""


def draw(picture: Path, runs: dict[str, Path]) -> None:
    """Writes the picture, one panel a metric."""
    figure, axes = plotting().subplots(1, len(PANELS), figsize=(10, 2.6), layout="constrained")
    for name, run in runs.items():
        with (run / "metrics.tsv").open(newline="") as file:
            rows = [row for row in csv.DictReader(file, delimiter="\t") if row["actor/entropy"]]
        for panel, metric in zip(axes, PANELS, strict=True):
            points = [(int(row["step"]), float(row[metric])) for row in rows if row[metric]]
            panel.plot(*zip(*points, strict=True), linewidth=1.2, label=name)
    for panel, title in zip(axes, PANELS.values(), strict=True):
        panel.set_title(title, fontsize=9)
        panel.set(xlabel="step", ylim=(0, None))
        panel.grid(alpha=0.3)
    axes[0].legend(loc="best", fontsize=8)
    save(figure, picture)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("picture", type=Path)
    parser.add_argument("runs", nargs="+", metavar="NAME=RUN_FOLDER")
    args = parser.parse_args()
    draw(args.picture, {name: Path(run) for name, _, run in (text.partition("=") for text in args.runs)})


if __name__ == "__main__":
    main()
