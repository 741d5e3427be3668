"""Exceptions of this package.

RLCoreError
├── BatchError (also ValueError)   sizes that do not divide into ranks, micro batches or mini batches
└── ShapeError (also ValueError)   tensors or sequences whose shapes, lengths or columns do not match
"""

__all__ = ["BatchError", "RLCoreError", "ShapeError"]


class RLCoreError(Exception):
    """Base class of this package's exceptions."""


class BatchError(RLCoreError, ValueError):
    """A batch cannot be divided as requested; the message names sizes that work."""


class ShapeError(RLCoreError, ValueError):
    """Shapes, lengths or columns of tensors or sequences do not match."""
