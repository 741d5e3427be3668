"""Errors of this package.

RlDataError
├── DataError (also ValueError)              a data file cannot be used: names file, row, column and the remedy
│   └── ModelFolderError                     a model folder lacks what is needed (config, tokenizer, weights)
├── UnknownDataSourceError (also ValueError) no reward is registered for a data source
└── SamplerStateError (also ValueError)      a saved sampler state belongs to other data or settings

All of them survive pickling, attributes included, because they cross process borders.
"""

from typing import Any


class RlDataError(Exception):
    """Root of this package's errors."""


class DataError(RlDataError, ValueError):
    """A data file cannot be used.

    Attributes: `file` (path as given), `row` (counted from 0, None when it concerns the whole file), `column`.
    """

    def __init__(self, message: str, *, file: str | None = None, row: int | None = None, column: str | None = None):
        super().__init__(message)
        self.file = file
        self.row = row
        self.column = column

    def __reduce__(self) -> tuple[Any, ...]:
        # Exceptions pickle by calling the class with `args`; the keyword attributes travel as state.
        return (type(self), self.args, self.__dict__)


class ModelFolderError(DataError):
    """A model folder lacks its configuration, tokenizer or weights."""


class UnknownDataSourceError(RlDataError, ValueError):
    """No reward is registered for a data source."""


class SamplerStateError(RlDataError, ValueError):
    """A saved sampler state does not belong to this sampler."""
