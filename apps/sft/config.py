"""Configuration of the SFT app."""

from dataclasses import dataclass

from rl_runtime import SupervisedJobConfig


@dataclass(frozen=True, kw_only=True)
class SftConfig(SupervisedJobConfig):
    """Supervised fine-tuning. Without model and data it trains a tiny model on the built-in task."""
