"""Controllers of the KL penalty coefficient. They are immutable; `coefficient` is their whole state."""

from dataclasses import dataclass, replace

from ..errors import require


@dataclass(frozen=True, kw_only=True)
class FixedKL:
    """Constant coefficient, at least 0."""

    coefficient: float

    def __post_init__(self) -> None:
        require(self.coefficient >= 0.0, "coefficient", self.coefficient, "0 or more")

    def updated(self, kl: float, num_samples: int) -> "FixedKL":
        """The same controller."""
        return self


@dataclass(frozen=True, kw_only=True)
class AdaptiveKL:
    """Proportional control of the coefficient toward a target KL.

        e = clip(kl / target - 1, -0.2, 0.2)
        coefficient <- coefficient * (1 + e * num_samples / horizon)

    Source: Ziegler et al. 2019, arXiv:1909.08593, section 2.2.
    """

    coefficient: float
    """Current coefficient, at least 0 (0 stays 0)."""
    target: float
    """Target KL in nats, above 0; per token or per sequence, like the `kl` passed to `updated`."""
    horizon: float = 10_000.0
    """Sequences over which a full error of 0.2 acts, above 0."""

    def __post_init__(self) -> None:
        require(self.coefficient >= 0.0, "coefficient", self.coefficient, "0 or more")
        for name in ("target", "horizon"):
            require(getattr(self, name) > 0.0, name, getattr(self, name), "above 0")

    def updated(self, kl: float, num_samples: int) -> "AdaptiveKL":
        """The controller after a batch of `num_samples` sequences with this mean KL. Raises `ValueError` for NaN."""
        require(kl == kl, "kl", kl, "a number (check the log-probs of the batch)")
        error = min(max(kl / self.target - 1.0, -0.2), 0.2)
        factor = 1.0 + error * num_samples / self.horizon
        # a batch larger than the horizon must not turn the coefficient negative
        return replace(self, coefficient=self.coefficient * max(factor, 0.0))
