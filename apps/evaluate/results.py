"""Evaluated models: their samples, the metrics of each prompt with bootstrap intervals, and paired differences.

`samples.jsonl` of an evaluation has one line per model and prompt, with all samples.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from apps.evaluate.config import EvaluateConfig
from rl_core import BootstrapMean, bootstrap_mean
from rl_runtime import PromptResult, prompt_metrics, sample_counts
from run_kit.tracking.metrics_table import naming_file

SAMPLES = "samples.jsonl"
Intervals = dict[str, BootstrapMean]
"""Metric -> mean with its interval."""


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The samples of one model."""

    name: str
    step: int | None
    num_samples: int
    """Samples that were requested for each prompt."""
    seconds: float
    """Wall time of generation and scoring."""
    prompts: tuple[PromptResult, ...] = field(repr=False)

    def columns(self, pass_at: Sequence[int] = ()) -> dict[str, npt.NDArray[np.float64]]:
        """Metric -> one value for each prompt; NaN where it has none. `pass_at`: default as in `sample_counts`."""
        counts = [k for k in pass_at if k <= self.num_samples] or sample_counts(self.num_samples)
        return prompt_metrics(self.prompts, num_samples=self.num_samples, pass_at=counts)

    def append_to(self, folder: Path) -> None:
        """Adds its lines to the file of samples in `folder`."""
        facts, path = asdict(self), folder / SAMPLES
        prompts = facts.pop("prompts")
        with naming_file(path), path.open("a", encoding="utf-8", errors="backslashreplace") as file:
            file.writelines(json.dumps({**facts, **prompt}, ensure_ascii=False) + "\n" for prompt in prompts)


def intervals(columns: Mapping[str, npt.NDArray[np.float64]], config: EvaluateConfig) -> Intervals:
    """Mean and bootstrap interval of each metric over the prompts that have a value; leaves out metrics without any."""
    resample = partial(
        bootstrap_mean, num_resamples=config.num_resamples, confidence=config.confidence, seed=config.seed
    )
    finite = {name: values[np.isfinite(values)] for name, values in columns.items()}
    return {name: resample(values) for name, values in finite.items() if len(values)}


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A model against the baseline, the first one, on the same prompts."""

    baseline: str
    other: str
    num_gains: int
    """Prompts with a larger share of right samples."""
    num_losses: int
    """Prompts with a smaller share."""
    differences: Intervals
    """Metric -> paired difference, other less baseline, over the prompts where both have a value."""


def compare_all(evaluations: Sequence[Evaluation], config: EvaluateConfig) -> list[Comparison]:
    """Each model against the first one."""
    comparisons = []
    baseline, *others = evaluations
    before, right_before = baseline.columns(config.pass_at), _shares_right(baseline)
    for other in others:
        after, changes = other.columns(config.pass_at), _shares_right(other) - right_before
        differences = intervals({key: after[key] - before[key] for key in before if key in after}, config)
        gains, losses = int((changes > 0).sum()), int((changes < 0).sum())
        comparisons.append(
            Comparison(
                baseline=baseline.name, other=other.name, num_gains=gains, num_losses=losses, differences=differences
            )
        )
    return comparisons


def _shares_right(one: Evaluation) -> npt.NDArray[np.float64]:
    """Share of right samples of each prompt; NaN without samples."""
    return np.array([row.num_right / len(row.samples) if row.samples else np.nan for row in one.prompts])
