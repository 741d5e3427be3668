"""Results of evaluated models: their files, from which the report and a resumed evaluation read them again.

`models/<name>/samples.jsonl` has one line per prompt with all samples; `models/<name>/model.json`, written last, the
facts about the model.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from apps.evaluate.config import EvaluateConfig
from rl_core import BootstrapMean, bootstrap_mean
from rl_runtime import InputError, PromptResult, SampleResult, prompt_metrics, sample_counts
from run_kit import ConfigError
from run_kit.config.differences import config_differences
from run_kit.config.redaction import yaml_without_secrets
from run_kit.tracking.metrics_table import atomic_write

MODELS = "models"
_SAMPLES, _MODEL = "samples.jsonl", "model.json"
_DECIDE_RESULTS = ("data", "task", "reward", "episode", "sampling", "seed")
"""Sections on which results depend: one table has one value of each."""


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The samples of one model."""

    name: str
    step: int | None
    source: str
    """The model's folder, or the kind of one without a folder."""
    digest: str | None
    """Of the model's files (`Target.digest`); None for servers."""
    num_samples: int
    """Samples that were requested for each prompt."""
    seconds: float
    """Wall time of generation and scoring."""
    prompts: tuple[PromptResult, ...] = field(repr=False)

    @property
    def num_scored(self) -> int:
        """Number of scored samples."""
        return sum(len(prompt.samples) for prompt in self.prompts)

    @property
    def num_failed(self) -> int:
        """Samples that could not be generated or scored. They enter no metric."""
        return len(self.prompts) * self.num_samples - self.num_scored

    def columns(self, pass_at: Sequence[int] = ()) -> dict[str, npt.NDArray[np.float64]]:
        """Metric -> one value for each prompt; NaN where it has none. `pass_at`: default as in `sample_counts`."""
        counts = [k for k in pass_at if k <= self.num_samples] or sample_counts(self.num_samples)
        return prompt_metrics(self.prompts, num_samples=self.num_samples, pass_at=counts)

    def save(self, folder: Path) -> None:
        """Writes it below `folder`, the folder of the whole evaluation."""
        own = folder / MODELS / self.name
        own.mkdir(parents=True, exist_ok=True)
        facts = asdict(self)
        lines = [json.dumps(prompt, ensure_ascii=False) + "\n" for prompt in facts.pop("prompts")]
        (own / _MODEL).unlink(missing_ok=True)
        atomic_write(own / _SAMPLES, "".join(lines))
        atomic_write(own / _MODEL, json.dumps(facts, indent=2) + "\n")

    @classmethod
    def load(cls, own: Path) -> "Evaluation":
        """Reads `models/<name>`.

        Raises:
            InputError: a file is missing or malformed.
        """
        try:
            facts = json.loads((own / _MODEL).read_text(encoding="utf-8"))
            with (own / _SAMPLES).open(encoding="utf-8") as file:
                return cls(**facts, prompts=tuple(_prompt(json.loads(line)) for line in file))
        except (OSError, ValueError, TypeError, LookupError, RecursionError) as error:
            raise InputError(f"{own}: no results of an evaluation: {type(error).__name__}: {error}") from error


def _prompt(record: dict[str, Any]) -> PromptResult:
    record["samples"] = tuple(SampleResult(**sample) for sample in record["samples"])
    record["votes"] = None if record["votes"] is None else tuple(record["votes"])
    return PromptResult(**{**record, "failures": tuple(record["failures"])})


def load_evaluations(folder: Path) -> dict[str, Evaluation]:
    """Name -> evaluated model of a folder, in the order of their steps; unfinished ones are left out.

    Raises:
        InputError: a malformed file.
    """
    return in_order([Evaluation.load(path.parent) for path in (folder / MODELS).glob(f"*/{_MODEL}")])


def in_order(evaluations: Sequence[Evaluation]) -> dict[str, Evaluation]:
    """Name -> evaluation, by step and name."""
    return {one.name: one for one in sorted(evaluations, key=lambda one: (one.step or 0, one.name))}


def load_compared(config: EvaluateConfig) -> dict[str, Evaluation]:
    """Label -> evaluated model, of the folders in `compare`.

    Raises:
        InputError: a folder has no results, or is there twice.
    """
    compared: dict[str, Evaluation] = {}
    for name in config.compare:
        folder = Path(name).resolve()
        evaluations = {f"{folder.name}/{own}": one for own, one in load_evaluations(folder).items()}
        if not evaluations or evaluations.keys() & compared.keys():
            allowed = "folders of evaluations with results, each name once"
            raise InputError(field="compare", value=name, allowed=allowed)
        compared |= evaluations
    return compared


def check_same_settings(config: EvaluateConfig, folder: Path) -> None:
    """Checks that the models of `folder` were evaluated with the settings of `config`.

    Raises:
        InputError: names the key that differs, or the file that cannot be read.
    """
    try:
        before = (folder / "config.yaml").read_text(encoding="utf-8")
        differences = config_differences({"now": yaml_without_secrets(config), str(folder): before})
    except (OSError, ConfigError) as error:
        raise InputError(f"config.yaml cannot be read: {error}", field="resume_from", value=str(folder)) from error
    for key, (now, earlier) in differences.items():
        if key.partition(".")[0] in _DECIDE_RESULTS:
            allowed = f"{earlier} with resume=auto, as in {folder}; or a new table with resume=never"
            raise InputError(field=key, value=now, allowed=allowed)


def intervals(columns: dict[str, npt.NDArray[np.float64]], config: EvaluateConfig) -> dict[str, BootstrapMean]:
    """Mean and bootstrap interval of each metric over the prompts that have a value; leaves out metrics without any."""
    return {
        name: _interval(values[np.isfinite(values)].tobytes(), config.num_resamples, config.confidence, config.seed)
        for name, values in columns.items()
        if np.isfinite(values).any()
    }


@cache  # the report is written again after each model
def _interval(values: bytes, num_resamples: int, confidence: float, seed: int) -> BootstrapMean:
    return bootstrap_mean(np.frombuffer(values), num_resamples=num_resamples, confidence=confidence, seed=seed)
