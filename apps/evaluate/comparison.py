"""Differences of two evaluated models: paired bootstrap of the metrics. Pure."""

from dataclasses import dataclass

import numpy as np

from apps.evaluate.config import EvaluateConfig
from apps.evaluate.results import Evaluation, intervals
from rl_core import BootstrapMean
from rl_runtime import PromptResult


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A model against the baseline, on the prompts that both have."""

    baseline: str
    other: str
    differences: dict[str, BootstrapMean]
    """Metric -> paired difference, other less baseline, over the prompts where both have a value."""
    counts: dict[str, int]
    """`num_gains` and `num_losses`: prompts with a larger and with a smaller share of right samples. `num_prompts`: of
    both models; `num_unmatched`: of one only; `num_other_text`: of both, with another text, as another chat template
    makes it; `num_unscored`: of both, in no difference, since one has no scored sample."""


def _share_right(result: PromptResult) -> float:
    """Share of right samples; NaN without samples."""
    return result.num_right / len(result.samples) if result.samples else float("nan")


def compare_all(evaluations: dict[str, Evaluation], config: EvaluateConfig) -> list[Comparison]:
    """Each model against the first one, on the prompts with the same id and ground truth."""
    names = list(evaluations)
    return [_compare(names[0], evaluations[names[0]], name, evaluations[name], config) for name in names[1:]]


def _compare(first: str, baseline: Evaluation, name: str, other: Evaluation, config: EvaluateConfig) -> Comparison:
    rows_of = {(prompt.prompt_id, prompt.ground_truth): row for row, prompt in enumerate(baseline.prompts)}
    keys = [(prompt.prompt_id, prompt.ground_truth) for prompt in other.prompts]
    left = [rows_of[key] for key in keys if key in rows_of]
    right = [row for row, key in enumerate(keys) if key in rows_of]
    prompts = [(baseline.prompts[i], other.prompts[j]) for i, j in zip(left, right, strict=True)]
    changes = np.array([_share_right(b) - _share_right(a) for a, b in prompts])
    before, after = baseline.columns(config.pass_at), other.columns(config.pass_at)
    return Comparison(
        baseline=first,
        other=name,
        differences=intervals({key: after[key][right] - before[key][left] for key in before if key in after}, config),
        counts={
            "num_gains": int((changes > 0).sum()),
            "num_losses": int((changes < 0).sum()),
            "num_prompts": len(prompts),
            "num_unmatched": len(baseline.prompts) + len(other.prompts) - 2 * len(prompts),
            "num_other_text": sum(a.prompt != b.prompt for a, b in prompts),
            "num_unscored": int(np.isnan(changes).sum()),
        },
    )
