"""Configuration of the SFT app."""

from dataclasses import dataclass

from rl_runtime import SupervisedJobConfig


@dataclass(frozen=True, kw_only=True)
class SftConfig(SupervisedJobConfig):
    """The SFT app."""
