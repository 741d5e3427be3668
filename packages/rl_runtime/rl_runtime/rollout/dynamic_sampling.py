"""Dynamic sampling: groups whose scores do not differ are replaced by groups of fresh prompts.

Source: Yu et al. 2025, DAPO, arXiv:2503.14476, section 3.2.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from rl_core import DynamicSelection, select_groups
from rl_data import Prompt
from rollout_vllm import Sample

from ..errors import RolloutFailed
from ..samples import group_numbers
from .config import DynamicSamplingConfig
from .groups import Collected, mean_score

DrawPrompts = Callable[[int], Sequence[Prompt]]
"""Number of groups that a round shall complete -> the next prompts of the step."""


class DynamicSampling:
    """The rounds of generation of one step, and the choice of its `num_groups` groups.

    A group is informative if its scores differ. A further round draws as many prompts as the earlier rounds needed for
    the number of informative groups that is missing. Informative groups beyond `num_groups` are dropped, those of the
    last prompts first: kept for the next step, they would be samples of an older policy.
    """

    def __init__(self, config: DynamicSamplingConfig, num_groups: int, draw: DrawPrompts) -> None:
        self._config, self._num_groups, self._draw = config, num_groups, draw
        self._num_rounds = 1

    def more(self, samples: Sequence[Sample]) -> Sequence[Prompt]:
        """The prompts of the next round; none if enough groups are informative or no round is left."""
        selection = _selection(samples, self._config, self._num_groups)
        if not selection.num_missing or self._num_rounds > self._config.max_rounds:
            return ()
        self._num_rounds += 1
        return self._draw(num_replacements(selection))

    def select(self, collected: Collected, *, step: int) -> Collected:
        """See `select_informative`."""
        return select_informative(
            collected, self._config, num_groups=self._num_groups, num_rounds=self._num_rounds, step=step
        )


def select_informative(
    collected: Collected, config: DynamicSamplingConfig, *, num_groups: int, num_rounds: int, step: int
) -> Collected:
    """Splits the batch into the informative groups to train on, `num_groups` at most, and the others; adds metrics.

    Raises:
        RolloutFailed: no group is informative.
    """
    samples = collected.samples
    selection, score_mean = _selection(samples, config, num_groups), mean_score(samples)
    outcome = (
        f"{selection.num_groups} of {num_groups} groups have scores that differ: {selection.num_dropped} "
        f"groups were dropped in {num_rounds} rounds (mean score of all samples {score_mean:.4g})"
    )
    if not selection.num_groups:
        raise RolloutFailed(
            f"step {step}: {outcome}; nothing is left to train on. Use prompts of other difficulty, a larger "
            "sampling.n, or dynamic_sampling.max_rounds=0 to train on such groups"
        )
    chosen = set(selection.index.tolist())
    train = tuple(sample for i, sample in enumerate(samples) if i in chosen)
    metrics = {
        "rollout/num_sampling_rounds": float(num_rounds),
        "rollout/num_dropped_groups": float(selection.num_dropped),
        "rollout/num_surplus_groups": float(selection.num_surplus),
        "rollout/num_generated_samples": float(len(samples)),
        "rollout/trained_score_mean": mean_score(train),
    }
    return replace(
        collected,
        samples=train,
        dropped=tuple(sample for i, sample in enumerate(samples) if i not in chosen),
        metrics=collected.metrics | metrics,
        note=outcome if selection.num_missing else "",
    )


def is_informative(group: Sequence[Sample], config: DynamicSamplingConfig) -> bool:
    """True if the scores of the samples of one group differ."""
    return bool(group) and _selection(group, config, 1).num_groups == 1


def _selection(samples: Sequence[Sample], config: DynamicSamplingConfig, num_groups: int) -> DynamicSelection:
    scores_N = torch.tensor([sample.score for sample in samples], dtype=torch.float64)
    group_ids_N = torch.tensor(group_numbers(samples), dtype=torch.int64)
    return select_groups(scores_N, group_ids_N, num_groups, min_spread=config.min_spread)


def num_replacements(selection: DynamicSelection) -> int:
    """Number of groups to generate for the missing ones, at most as many as the step trains on.

    `num_missing` divided by the share of informative groups so far, rounded up.
    """
    num_informative, wanted = selection.num_groups, selection.num_groups + selection.num_missing
    num_scored = max(1, num_informative + selection.num_dropped)
    return min(wanted, -(-selection.num_missing * num_scored // max(1, num_informative)))
