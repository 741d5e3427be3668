"""The package's exceptions. All of them pickle, so they cross process borders.

EngineError
├── EngineConfigError   a setting that cannot work (also a ValueError)
├── ModelError          a model folder or architecture the engine cannot train (also a ValueError)
├── BatchError          a malformed batch or loss (also a ValueError)
├── PlanMismatchError   the ranks were given different work; raised on every rank before any gradient collective
├── CheckpointError     a checkpoint that is missing or does not fit (also a ValueError)
├── CollectiveMismatchError   ranks called different collectives
└── RankStalledError          a rank stopped taking part
"""

__all__ = [
    "BatchError",
    "CheckpointError",
    "CollectiveMismatchError",
    "EngineConfigError",
    "EngineError",
    "ModelError",
    "PlanMismatchError",
    "RankStalledError",
]


class EngineError(Exception):
    """Root of everything this package raises on purpose."""


class EngineConfigError(EngineError, ValueError):
    """A setting, or a combination of settings, that cannot work."""


class ModelError(EngineError, ValueError):
    """A model folder or architecture that cannot be loaded or trained exactly."""


class BatchError(EngineError, ValueError):
    """A batch, or a loss returned for one, that is malformed."""


class PlanMismatchError(EngineError):
    """The ranks were handed different work, which would have ended in a hang."""


class CheckpointError(EngineError, ValueError):
    """A checkpoint that is missing or cannot be read."""


class CollectiveMismatchError(EngineError):
    """Ranks called different collectives; the message names ranks, operations, sizes and lines."""


class RankStalledError(EngineError):
    """One rank stopped taking part in collectives; the message says which and where it is."""
