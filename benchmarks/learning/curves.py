"""Draws learning curves of runs of the app and of TRL, over steps and over wall time, and prints their table.

`python -m benchmarks.learning.curves PICTURE.svg --ours LOG ... --trl LOG ...`: the terminal's output of
`plinth grpo preset=smollm2` with the seconds since the command in front of each line (`| ts -s %.s`), and of
`benchmarks.learning.trl_learn`. A point is the mean score of a step's samples, averaged over the last five steps. It
lies at the end of the step, and for TRL, which prints a score as soon as it knows it, at the end of the rollout.
"""

import argparse
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

AVERAGED = 5
"""Steps of which a point is the mean."""
STEP = re.compile(r"^ *([\d.]+) step +\d+/\d+ +score +([\d.]+)", re.MULTILINE)
"""A line of the app: the seconds, and the score."""


@dataclass(frozen=True)
class Curve:
    """One run."""

    scores: list[float]
    """Mean score of each step."""
    seconds: list[float]
    """Seconds from the command to each score."""


def read_app(log: Path) -> Curve:
    """The curve of the app's terminal."""
    lines = STEP.findall(log.read_text())
    return Curve([float(score) for _, score in lines], [float(seconds) for seconds, _ in lines])


def read_trl(log: Path) -> Curve:
    """The curve of TRL's terminal."""
    rows = [json.loads(line) for line in log.read_text().splitlines() if line.startswith('{"seconds"')]
    return Curve([row["score"] for row in rows], [row["seconds"] for row in rows])


def averaged(values: list[float]) -> list[float]:
    """The mean of each value and the up to four before it."""
    return [float(np.mean(values[max(0, end - AVERAGED) : end])) for end in range(1, len(values) + 1)]


def draw(picture: Path, curves: dict[str, list[Curve]]) -> None:
    """Writes the picture with both axes."""
    pyplot = plotting()
    figure, (by_step, by_time) = pyplot.subplots(1, 2, figsize=(8, 3), sharey=True, layout="constrained")
    for (name, runs), color in zip(curves.items(), ("tab:blue", "tab:orange"), strict=True):
        for index, run in enumerate(runs):
            style = {"color": color, "linewidth": 1.0, "alpha": 0.8, "label": None if index else name}
            by_step.plot(range(1, len(run.scores) + 1), averaged(run.scores), **style)
            by_time.plot(run.seconds, averaged(run.scores), **style)
    by_step.set(xlabel="step", ylabel="mean score", ylim=(0, 1))
    by_time.set(xlabel="seconds since the command", xlim=(0, None))
    for axes in (by_step, by_time):
        axes.grid(alpha=0.3)
        axes.legend(loc="lower right")
    save(figure, picture)


def plotting() -> Any:
    """`matplotlib.pyplot`, for small files that are the same each time."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams |= {"svg.hashsalt": "plinth", "svg.fonttype": "none"}
    from matplotlib import pyplot

    return pyplot


def save(figure: Any, picture: Path) -> None:
    """Writes an SVG with coordinates of two decimals, a third of the size."""
    figure.savefig(picture, format="svg", metadata={"Date": None})
    picture.write_text(re.sub(r"(\.\d\d)\d+", r"\1", picture.read_text()))


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--ours", type=Path, nargs="+", required=True)
    parser.add_argument("--trl", type=Path, nargs="+", required=True)
    args = parser.parse_args()
    curves = {"Plinth": [read_app(log) for log in args.ours], "TRL": [read_trl(log) for log in args.trl]}
    for name, runs in curves.items():
        for run in runs:
            step = np.median(np.diff(run.seconds))
            print(
                f"{name}: mean score {np.mean(run.scores[:10]):.3f} in the first ten steps, "
                f"{np.mean(run.scores[-10:]):.3f} in the last ten; first score after {run.seconds[0]:.0f} s, "
                f"score {len(run.scores)} after {run.seconds[-1]:.0f} s; median step {step:.2f} s"
            )
    draw(args.picture, curves)


if __name__ == "__main__":
    main()
