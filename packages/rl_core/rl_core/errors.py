"""Errors of this package.

RLCoreError
├── BatchError (also ValueError)   sizes that ranks, micro batches or mini batches cannot divide
└── ShapeError (also ValueError)   tensors whose shapes or lengths do not belong together
"""

__all__ = ["BatchError", "RLCoreError", "ShapeError"]


class RLCoreError(Exception):
    """Root of every error this package raises on purpose."""


class BatchError(RLCoreError, ValueError):
    """A batch size that cannot be divided as asked; the message names sizes that would do."""


class ShapeError(RLCoreError, ValueError):
    """Tensors or sequences whose shapes, lengths or columns do not belong together."""
