"""Prompts that several runs sampled, with their responses at the same step. Pure."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

Record = Mapping[str, Any]
"""A rollout: `step`, `prompt`, `response`, `reward` (None if it is not finite) and more."""


@dataclass(frozen=True, kw_only=True)
class SharedPrompt:
    """A prompt that two runs or more sampled."""

    prompt: str
    records: dict[str, list[Record]]
    """Run -> its rollouts of the prompt at one step: the newest step of all these runs, else each run's newest."""

    @property
    def mean_rewards(self) -> list[float]:
        """Mean of each run's finite rewards; a run without one is left out."""
        rewards = [_rewards(records) for records in self.records.values()]
        return [fmean(found) for found in rewards if found]

    @property
    def difference(self) -> float:
        """The largest difference between the mean rewards of two runs."""
        means = self.mean_rewards
        return max(means) - min(means) if means else 0.0

    @property
    def step(self) -> int:
        """The newest step of the rollouts."""
        return max(int(record["step"]) for records in self.records.values() for record in records)


def shared_prompts(rollouts: Mapping[str, Sequence[Record]]) -> list[SharedPrompt]:
    """The prompts that two runs or more sampled: largest difference in reward first, then the newest.

    Args:
        rollouts: run -> its rollouts.
    """
    found: dict[str, dict[str, dict[int, list[Record]]]] = {}
    for run, records in rollouts.items():
        for record in records:
            steps = found.setdefault(record["prompt"], {}).setdefault(run, {})
            steps.setdefault(record["step"], []).append(record)
    shared = [
        SharedPrompt(prompt=prompt, records=_at_one_step(runs)) for prompt, runs in found.items() if len(runs) > 1
    ]
    return sorted(shared, key=lambda one: (-one.difference, -one.step))


def _at_one_step(runs: Mapping[str, Mapping[int, list[Record]]]) -> dict[str, list[Record]]:
    common = set.intersection(*(set(steps) for steps in runs.values()))
    return {run: steps[max(common or steps)] for run, steps in runs.items()}


def _rewards(records: Sequence[Record]) -> list[float]:
    rewards = [record["reward"] for record in records]
    return [reward for reward in rewards if reward is not None and math.isfinite(reward)]
