"""Evaluated models: their samples, the metrics of each prompt with bootstrap intervals, and paired differences.

`samples.jsonl` of an evaluation has one line per model and prompt, with all samples; later evaluations compare with it.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from apps.evaluate.config import EvaluateConfig
from rl_core import BootstrapMean, bootstrap_mean
from rl_runtime import InputError, PromptResult, SampleResult, prompt_metrics, sample_counts
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


def load_evaluations(folder: Path) -> list[Evaluation]:
    """The evaluated models of an earlier evaluation, in its order. Raises InputError if it has no readable samples."""
    try:
        with (folder / SAMPLES).open(encoding="utf-8") as file:
            models = groupby(map(json.loads, file), key=itemgetter("name"))
            return [_evaluation(list(records)) for _, records in models]
    except (OSError, ValueError, TypeError, LookupError, RecursionError) as error:
        problem = f"no samples of an evaluation can be read: {type(error).__name__}: {error}"
        raise InputError(problem, field="compare", value=str(folder)) from error


def _evaluation(records: Sequence[dict[str, Any]]) -> Evaluation:
    facts = {key: records[0][key] for key in ("name", "step", "num_samples", "seconds")}
    prompts = [{key: value for key, value in record.items() if key not in facts} for record in records]
    return Evaluation(**facts, prompts=tuple(map(_prompt, prompts)))


def _prompt(record: dict[str, Any]) -> PromptResult:
    samples = tuple(SampleResult(**sample) for sample in record.pop("samples"))
    votes, failures = record.pop("votes"), tuple(record.pop("failures"))
    return PromptResult(**record, samples=samples, votes=None if votes is None else tuple(votes), failures=failures)


def load_compared(config: EvaluateConfig) -> dict[str, Evaluation]:
    """Label -> evaluated model, of the folders in `compare`. Raises InputError for a folder that is there twice."""
    compared: dict[str, Evaluation] = {}
    for folder in (Path(name).resolve() for name in config.compare):
        evaluations = {f"{folder.name}/{one.name}": one for one in load_evaluations(folder)}
        if not evaluations or evaluations.keys() & compared.keys():
            allowed = "folders of evaluations with results, each name once"
            raise InputError(field="compare", value=str(folder), allowed=allowed)
        compared |= evaluations
    return compared


def intervals(columns: Mapping[str, npt.NDArray[np.float64]], config: EvaluateConfig) -> Intervals:
    """Mean and bootstrap interval of each metric over the prompts that have a value; leaves out metrics without any."""
    resample = partial(
        bootstrap_mean, num_resamples=config.num_resamples, confidence=config.confidence, seed=config.seed
    )
    finite = {name: values[np.isfinite(values)] for name, values in columns.items()}
    return {name: resample(values) for name, values in finite.items() if len(values)}


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A model against the baseline, on the prompts that both have."""

    baseline: str
    other: str
    num_gains: int
    """Prompts with a larger share of right samples."""
    num_losses: int
    """Prompts with a smaller share."""
    num_prompts: int
    """Prompts of both, with the same id and ground truth."""
    num_unmatched: int
    """Prompts of one only."""
    num_other_text: int
    """Prompts of both, with another text, as another chat template makes it."""
    differences: Intervals
    """Metric -> paired difference, other less baseline, over the prompts where both have a value."""


def compare_all(evaluations: Mapping[str, Evaluation], config: EvaluateConfig) -> list[Comparison]:
    """Each model against the first one."""
    (first, baseline), *others = evaluations.items()
    return [_compare(first, baseline, name, other, config) for name, other in others]


def _compare(first: str, baseline: Evaluation, name: str, other: Evaluation, config: EvaluateConfig) -> Comparison:
    rows_of = {(prompt.prompt_id, prompt.ground_truth): row for row, prompt in enumerate(baseline.prompts)}
    matches = [rows_of.get((prompt.prompt_id, prompt.ground_truth)) for prompt in other.prompts]
    left = [row for row in matches if row is not None]
    right = [row for row, match in enumerate(matches) if match is not None]
    prompts = [(baseline.prompts[i], other.prompts[j]) for i, j in zip(left, right, strict=True)]
    changes = np.array([_share_right(after) - _share_right(before) for before, after in prompts])
    before, after = baseline.columns(config.pass_at), other.columns(config.pass_at)
    return Comparison(
        baseline=first,
        other=name,
        num_gains=int((changes > 0).sum()),
        num_losses=int((changes < 0).sum()),
        num_prompts=len(prompts),
        num_unmatched=len(baseline.prompts) + len(other.prompts) - 2 * len(prompts),
        num_other_text=sum(a.prompt != b.prompt for a, b in prompts),
        differences=intervals({key: after[key][right] - before[key][left] for key in before if key in after}, config),
    )


def _share_right(result: PromptResult) -> float:
    """Share of right samples; NaN without samples."""
    return result.num_right / len(result.samples) if result.samples else float("nan")
