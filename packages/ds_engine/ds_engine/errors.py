"""Exceptions of this package.

All of them are PlinthErrors: errors about a setting or argument carry `field`, `value`, `allowed` and `remedy`, and all
pickle with their attributes, so that they can be raised across processes.
"""

from plinth_base.errors import PlinthError


class EngineError(PlinthError):
    """Base class of this package's exceptions."""


class EngineConfigError(EngineError, ValueError):
    """A setting, or a combination of settings, that cannot work."""


class ModelError(EngineError, ValueError):
    """A model folder or architecture that the engine cannot load or train correctly."""


class UntriedModelError(ModelError):
    """A model of whose architecture no small copy can be computed on this machine, see `check_model`."""


class BatchError(EngineError, ValueError):
    """A malformed batch, or a malformed loss returned for one."""


class PlanMismatchError(EngineError):
    """Ranks called different methods or have different micro batches; raised before any gradient collective."""


class CheckpointError(EngineError, ValueError):
    """A checkpoint that is missing, unreadable or does not match the engine."""


class CollectiveMismatchError(EngineError):
    """Ranks called different collectives; the message contains ranks, operations, sizes and source lines."""


class RankStalledError(EngineError):
    """A rank stopped issuing collectives; the message contains the rank and its current source line."""
