"""Where two evaluated models differ: paired bootstrap of the difference, and the prompts that flip. Pure."""

from dataclasses import dataclass

import numpy as np

from apps.evaluate.config import EvaluateConfig
from apps.evaluate.results import Evaluation, intervals
from rl_core import BootstrapMean
from rl_runtime import PromptResult


@dataclass(frozen=True, kw_only=True)
class Pair:
    """The results of two models on the same prompt."""

    baseline: PromptResult
    other: PromptResult

    @property
    def change(self) -> float:
        """Share of right samples of the other model less that of the baseline."""
        return share_right(self.other) - share_right(self.baseline)


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A model against the baseline, on the prompts that both have."""

    baseline: str
    other: str
    differences: dict[str, BootstrapMean]
    """Metric -> paired difference, other less baseline, over the prompts where both have a value."""
    gains: tuple[Pair, ...]
    """Prompts with a larger share of right samples, the largest change first."""
    losses: tuple[Pair, ...]
    num_prompts: int
    num_unmatched: int
    """Prompts that only one of them has."""
    num_other_text: int
    """Prompts of the same row and ground truth with another text, as another chat template makes it."""
    num_unscored: int
    """Prompts of which one of them has no scored sample; they are in no difference."""


def share_right(result: PromptResult) -> float:
    """Share of right samples; NaN without samples."""
    return result.num_right / len(result.samples) if result.samples else float("nan")


def compare(names: tuple[str, str], baseline: Evaluation, other: Evaluation, config: EvaluateConfig) -> Comparison:
    """Compares two models on the prompts with the same id and ground truth. `names`: their labels."""
    rows_of = {_key(prompt): row for row, prompt in enumerate(baseline.prompts)}
    rows = [(rows_of[_key(prompt)], row) for row, prompt in enumerate(other.prompts) if _key(prompt) in rows_of]
    pairs = [Pair(baseline=baseline.prompts[i], other=other.prompts[j]) for i, j in rows]
    before, after = baseline.columns(config.pass_at), other.columns(config.pass_at)
    left, right = [i for i, _ in rows], [j for _, j in rows]
    differences = {name: after[name][right] - before[name][left] for name in before if name in after}
    scored = [pair for pair in pairs if np.isfinite(pair.change)]
    return Comparison(
        baseline=names[0],
        other=names[1],
        differences=intervals(differences, config),
        gains=_flips([pair for pair in scored if pair.change > 0]),
        losses=_flips([pair for pair in scored if pair.change < 0]),
        num_prompts=len(pairs),
        num_unmatched=len(baseline.prompts) + len(other.prompts) - 2 * len(pairs),
        num_other_text=sum(pair.baseline.prompt != pair.other.prompt for pair in pairs),
        num_unscored=len(pairs) - len(scored),
    )


def compare_all(evaluations: dict[str, Evaluation], config: EvaluateConfig) -> list[Comparison]:
    """Each model against the first one."""
    names = list(evaluations)
    return [compare((names[0], name), evaluations[names[0]], evaluations[name], config) for name in names[1:]]


def _key(prompt: PromptResult) -> tuple[str, str]:
    return prompt.prompt_id, prompt.ground_truth


def _flips(pairs: list[Pair]) -> tuple[Pair, ...]:
    return tuple(sorted(pairs, key=lambda pair: (-abs(pair.change), pair.baseline.prompt_id)))
