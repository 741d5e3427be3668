"""The learning rate as a pure function of the step."""

import math

from ..config import OptimConfig
from ..errors import EngineConfigError

__all__ = ["check_schedule", "learning_rate"]


def check_schedule(config: OptimConfig, total_steps: int | None) -> None:
    """Raise EngineConfigError when the schedule lacks the number of steps it needs."""
    if config.schedule == "constant":
        return
    if total_steps is None:
        raise EngineConfigError(
            f"optim.schedule={config.schedule!r} needs the number of optimizer steps: set optim.total_steps"
        )
    if total_steps <= config.warmup_steps:
        raise EngineConfigError(
            f"optim.warmup_steps={config.warmup_steps} must be smaller than the run's {total_steps} optimizer steps"
        )


def learning_rate(step: int, config: OptimConfig, total_steps: int | None) -> float:
    """Learning rate of optimizer step `step` (the first is 0).

    warm-up   s < W:   lr * (s + 1) / W, so the first step already moves and step W - 1 is at full rate
    constant           lr
    linear             lr * (1 - (1 - r) * p)                       p = min(1, (s - W) / (N - W))
    cosine             lr * (r + (1 - r) * (1 + cos(pi * p)) / 2)   r = min_lr_ratio, N = total_steps
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    assert total_steps is not None, "check_schedule ran before"
    progress = min(1.0, (step - config.warmup_steps) / (total_steps - config.warmup_steps))
    floor = config.min_lr_ratio
    if config.schedule == "linear":
        return config.lr * (1.0 - (1.0 - floor) * progress)
    return config.lr * (floor + (1.0 - floor) * 0.5 * (1.0 + math.cos(math.pi * progress)))
