"""Exceptions of this package.

RlDataError
├── DataError (also ValueError)              a data file cannot be used; names file, row, column and the remedy
│   └── ModelFolderError                     a model folder has no config, tokenizer or weights
├── UnknownDataSourceError (also ValueError) no reward is registered for a data source
└── SamplerStateError (also ValueError)      a saved sampler state belongs to other data or settings

All of them pickle with their attributes, because they cross process boundaries.
"""

from typing import Any


class RlDataError(Exception):
    """Base class of this package's exceptions."""


class DataError(RlDataError, ValueError):
    """A data file cannot be used.

    Attributes: `file` (path as given), `row` (the line, counted from 1, in JSON lines and CSV, else counted
    from 0; None for the whole file), `column`.
    """

    def __init__(self, message: str, *, file: str | None = None, row: int | None = None, column: str | None = None):
        super().__init__(message)
        self.file = file
        self.row = row
        self.column = column

    def __reduce__(self) -> tuple[Any, ...]:
        # pickle calls the class with `args`; the keyword attributes are restored from the state
        return (type(self), self.args, self.__dict__)


class ModelFolderError(DataError):
    """A model folder has no config, tokenizer or weights."""


class UnknownDataSourceError(RlDataError, ValueError):
    """No reward is registered for a data source."""


class SamplerStateError(RlDataError, ValueError):
    """A saved sampler state belongs to another sampler."""
