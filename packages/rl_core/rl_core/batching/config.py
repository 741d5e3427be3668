"""Configuration of the batch; standard library only, so that an app can read it before torch is imported."""

from dataclasses import dataclass

__all__ = ["BatchConfig"]


@dataclass(frozen=True, kw_only=True)
class BatchConfig:
    """How a train batch is cut into optimizer steps and forward/backward passes."""

    train_batch_size: int = 32
    """Prompts a step (one rollout). At least 1, a multiple of `mini_batch_size`."""
    mini_batch_size: int = 32
    """Prompts per optimizer step. At least 1, divides `train_batch_size`."""
    micro_batch_size: int | None = None
    """Sequences per forward/backward on one GPU. None packs by `token_budget` instead."""
    token_budget: int = 16384
    """Most packed tokens (prompt + response) per micro batch; a single longer sequence gets its own. At least 1."""

    def __post_init__(self) -> None:
        for name in ("train_batch_size", "mini_batch_size", "micro_batch_size", "token_budget"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}={value}: must be an integer of at least 1")
        if self.train_batch_size % self.mini_batch_size:
            fits = [d for d in range(1, self.train_batch_size + 1) if self.train_batch_size % d == 0]
            nearest = sorted(fits, key=lambda d: (abs(d - self.mini_batch_size), d))[:4]
            raise ValueError(
                f"mini_batch_size={self.mini_batch_size}: must divide train_batch_size={self.train_batch_size};"
                f" sizes that would do: {', '.join(map(str, sorted(nearest)))}"
            )
