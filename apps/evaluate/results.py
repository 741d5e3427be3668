"""Results of evaluated models: their files, from which the report and a resumed evaluation read them again.

`models/<name>/samples.jsonl` has one line per prompt with all samples; `models/<name>/model.json`, written last, says
what was evaluated.
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
from apps.evaluate.targets import Target
from ckpt import CheckpointError
from rl_core import BootstrapMean, bootstrap_mean
from rl_runtime import InputError, PromptResult, SampleResult, prompt_metrics, sample_counts
from run_kit.config.redaction import yaml_without_secrets
from run_kit.config.yaml import YamlError, parse_typed
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
    """Where the model was: a folder, or the URLs of servers."""
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
        lines = [json.dumps(asdict(prompt), ensure_ascii=False) + "\n" for prompt in self.prompts]
        (own / _MODEL).unlink(missing_ok=True)
        atomic_write(own / _SAMPLES, "".join(lines))
        facts = {name: getattr(self, name) for name in ("name", "step", "source", "digest", "num_samples", "seconds")}
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
    votes = record["votes"]
    return PromptResult(
        **{
            **record,
            "samples": tuple(SampleResult(**sample) for sample in record["samples"]),
            "votes": None if votes is None else tuple(votes),
            "failures": tuple(record["failures"]),
        }
    )


def load_evaluations(folder: Path) -> list[Evaluation]:
    """The evaluated models of a folder, in the order of their steps and names; unfinished ones are left out.

    Raises:
        InputError: a malformed file.
    """
    found = [Evaluation.load(path.parent) for path in (folder / MODELS).glob(f"*/{_MODEL}")]
    return sorted(found, key=_order)


def _order(evaluation: Evaluation) -> tuple[int, str]:
    return evaluation.step or 0, evaluation.name


def load_compared(config: EvaluateConfig) -> dict[str, Evaluation]:
    """Label -> evaluated model, of the folders in `compare`.

    Raises:
        InputError: a folder has no results, or two have the same name.
    """
    found: dict[str, Evaluation] = {}
    for name in config.compare:
        folder = Path(name).resolve()
        evaluations = load_evaluations(folder)
        if not evaluations:
            raise InputError(f"compare has {name}; allowed: the folder of an evaluation with results")
        for evaluation in evaluations:
            label = f"{folder.name}/{evaluation.name}"
            if label in found:
                raise InputError(f"compare has two folders with the model {label}; allowed: each once")
            found[label] = evaluation
    return found


def check_same_settings(config: EvaluateConfig, folder: Path) -> None:
    """Checks that the models of `folder` were evaluated with the settings of `config`.

    Raises:
        InputError: names the key that differs, or the file that cannot be read.
    """
    try:
        before = parse_typed((folder / "config.yaml").read_text(encoding="utf-8"), None)
    except (OSError, YamlError) as error:
        raise InputError(f"resume_from is {folder}, whose config.yaml cannot be read: {error}") from error
    now = parse_typed(yaml_without_secrets(config), None)
    for name in _DECIDE_RESULTS:
        new, old, of = now.get(name), before.get(name), ""
        if new != old:
            if isinstance(new, dict) and isinstance(old, dict):  # the first key that differs
                key = next(key for key in (*new, *old) if new.get(key) != old.get(key))
                new, old, of = new.get(key), old.get(key), f"{key}="
            raise InputError(
                f"{name} is {of}{new}, but {of}{old} in {folder}; allowed with resume=auto: the same. Give the old "
                "value, or start a new table with resume=never"
            )


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


class Table:
    """The evaluated models of a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._found = {evaluation.name: evaluation for evaluation in load_evaluations(folder)}

    @property
    def evaluations(self) -> list[Evaluation]:
        """In the order of their steps."""
        return sorted(self._found.values(), key=_order)

    def lacks(self, target: Target) -> bool:
        """Whether the model has to be evaluated: it is not in the table, or its files have changed since."""
        if target.name not in self._found:
            return True
        try:
            return self._found[target.name].digest != target.digest()
        except CheckpointError:  # which says what is wrong when the model is opened
            return True

    def add(self, evaluation: Evaluation) -> None:
        """Writes a model into the table."""
        evaluation.save(self._folder)
        self._found[evaluation.name] = evaluation
