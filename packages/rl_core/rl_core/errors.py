"""Exceptions of this package."""


class RLCoreError(Exception):
    """Base class of this package's exceptions."""


class BatchError(RLCoreError, ValueError):
    """A batch cannot be divided into mini batches, ranks and micro batches; the message names sizes that work."""


class ShapeError(RLCoreError, ValueError):
    """Shapes, lengths or columns of tensors or sequences do not match."""
