"""The coefficient of the KL term over a run."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rl_core import AdaptiveKL, FixedKL

from .policy import PolicyConfig


class KlCoefficient:
    """The coefficient of the KL term: `kl_coef`, or adapted to `kl_target` after each step and saved in checkpoints."""

    def __init__(self, config: PolicyConfig) -> None:
        start, target, horizon = config.kl_coef or 0.0, config.kl_target, config.kl_horizon
        self._controller: FixedKL | AdaptiveKL = FixedKL(coefficient=start)
        if target is not None:
            self._controller = AdaptiveKL(coefficient=start, target=target, horizon=horizon)

    @property
    def value(self) -> float:
        """Current KL coefficient."""
        return self._controller.coefficient

    def after_step(self, metrics: Mapping[str, float], num_samples: int) -> dict[str, float]:
        """Adapts the coefficient to the step's `actor/ref_kl`; returns the metric of the one that the step used.

        Args:
            metrics: those of `advantages`; without a reference they lack `actor/ref_kl`, and nothing happens.
        """
        if "actor/ref_kl" not in metrics:
            return {}
        used = self.value
        self._controller = self._controller.updated(metrics["actor/ref_kl"], num_samples)
        return {"actor/kl_coef": used}

    def state_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return {"coefficient": self.value}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores an adaptive coefficient from `state_dict`; a fixed one is that of the configuration."""
        if isinstance(self._controller, AdaptiveKL):
            self._controller = replace(self._controller, coefficient=state["coefficient"])
