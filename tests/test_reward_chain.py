"""Pairs, a reward model, PPO: the policy learns the task from the reward model alone."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.thorough, pytest.mark.timeout(1500)]


def accuracy(output: str) -> tuple[float, float]:
    """Held-out accuracy before and after."""
    printed = re.search(r"held-out accuracy +([\d.]+) before, ([\d.]+) after", output)
    assert printed is not None, output
    return float(printed[1]), float(printed[2])


def test_a_policy_learns_the_task_from_a_reward_model_of_pairs(tmp_path: Path, start_app: Callable[..., Any]) -> None:
    """The documented commands with half of the steps; a function that is not part of the reward measures accuracy."""
    app = start_app(tmp_path / "reward", "preset=demo", "supervised.steps=100", app="reward")
    run = app.succeeded()
    before, after = accuracy(app.output)
    assert after > before + 0.15, "the reward model does not tell the responses of a pair apart"
    measured = ("reward.terms.correct.function=gsm8k", "reward.terms.correct.weight=0")
    policy = start_app(
        tmp_path / "ppo",
        "preset=demo",
        f"reward.model={run / 'model'}",
        *measured,
        "trainer.total_training_steps=20",
        app="ppo",
    )
    assert policy.finish() == 0, policy.output
    before, after = accuracy(policy.output)
    assert after > before + 0.2, policy.output
