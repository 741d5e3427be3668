"""Learning curves of the algorithms: one small SVG picture a preset, a line a seed."""

from pathlib import Path

from apps.bench.config import AlgorithmsConfig
from apps.bench.plan import algorithm_name
from run_kit import MetricsTable

SCORE = "critic/score/mean"


def write_learning_curves(config: AlgorithmsConfig, folder: Path) -> None:
    """Write `curves/<preset>.svg`: the mean score of the samples of each step."""
    (folder / "curves").mkdir(exist_ok=True)
    for preset in config.presets:
        _write_curve(config, preset, folder)


def _write_curve(config: AlgorithmsConfig, preset: str, folder: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    # Text as text keeps the files small; a salt makes equal curves equal files.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": preset, "font.size": 8}):
        figure, axes = pyplot.subplots(figsize=(3.6, 2.1), layout="constrained")
        for seed in config.seeds:
            steps, scores = MetricsTable(folder / algorithm_name(preset, seed) / "metrics.tsv").series(SCORE)
            axes.plot(steps, scores, linewidth=1.2, label=f"seed {seed}")
        axes.set(xlabel="step", ylabel="mean score", title=preset)
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
        figure.savefig(folder / "curves" / f"{preset}.svg", metadata={"Date": None})
        pyplot.close(figure)
