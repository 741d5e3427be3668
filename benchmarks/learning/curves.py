"""Draws learning curves of runs of the app and of TRL, over steps and over wall time, and prints their table.

`python -m benchmarks.learning.curves PICTURE.svg --ours RUN_FOLDER ... --trl LOG ...`: run folders of
`plinth grpo preset=smollm2 trainer.seed=N` and logs of `benchmarks.learning.trl_learn`. A point is the mean score of a
step's samples, averaged over the last five steps; the clock starts with the process.
"""

import argparse
import csv
import json
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np

AVERAGED = 5
"""Steps of which a point is the mean."""


@dataclass(frozen=True)
class Curve:
    """One run."""

    scores: list[float]
    """Mean score of each step."""
    seconds: list[float]
    """End of each step since the process started."""


def read_app(run: Path) -> Curve:
    """The curve of a run folder. The start is the line `ready after` of its log, the steps are `timing_s/step`."""
    ready = re.search(r"ready after ([\d.]+) s", (run / "train.log").read_text())
    assert ready is not None, run
    with (run / "metrics.tsv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file, delimiter="\t") if row["critic/score/mean"]]
    seconds = float(ready[1]) + np.cumsum([float(row["timing_s/step"]) for row in rows])
    return Curve([float(row["critic/score/mean"]) for row in rows], seconds.tolist())


def read_trl(log: Path) -> Curve:
    """The curve of a log: a score is known when its rollout ends, the step ends with the next one."""
    rows = [json.loads(line) for line in log.read_text().splitlines() if line.startswith('{"seconds"')]
    ends = [row["seconds"] for row in rows[1:]]
    return Curve([row["score"] for row in rows[: len(ends)]], ends)


def averaged(values: list[float]) -> list[float]:
    """The mean of each value and the up to four before it."""
    return [float(np.mean(values[max(0, end - AVERAGED) : end])) for end in range(1, len(values) + 1)]


def draw(picture: Path, curves: dict[str, list[Curve]]) -> None:
    """Writes the picture with both axes."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "plinth"  # the same runs give the same file
    from matplotlib import pyplot

    figure, (by_step, by_time) = pyplot.subplots(1, 2, figsize=(9, 3.2), sharey=True, layout="constrained")
    for (name, runs), color in zip(curves.items(), ("tab:blue", "tab:orange"), strict=True):
        for index, run in enumerate(runs):
            style = {"color": color, "linewidth": 1.2, "label": None if index else name}
            by_step.plot(range(1, len(run.scores) + 1), averaged(run.scores), **style)
            by_time.plot(run.seconds, averaged(run.scores), **style)
    by_step.set(xlabel="step", ylabel="mean score", ylim=(0, 1))
    by_time.set(xlabel="seconds since the command", xlim=(0, None))
    for axes in (by_step, by_time):
        axes.grid(alpha=0.3)
        axes.legend(loc="lower right")
    figure.savefig(picture, metadata={"Date": None})


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--ours", type=Path, nargs="+", required=True)
    parser.add_argument("--trl", type=Path, nargs="+", required=True)
    args = parser.parse_args()
    curves = {"Plinth": [read_app(run) for run in args.ours], "TRL": [read_trl(log) for log in args.trl]}
    for name, runs in curves.items():
        for run in runs:
            steps = np.diff(run.seconds)
            print(
                f"{name}: mean score {np.mean(run.scores[:5]):.3f} in the first five steps, "
                f"{np.mean(run.scores[-5:]):.3f} in the last five; first step ended after {run.seconds[0]:.0f} s, "
                f"last after {run.seconds[-1]:.0f} s; median step {np.median(steps):.2f} s"
            )
    draw(args.picture, curves)


if __name__ == "__main__":
    main()
