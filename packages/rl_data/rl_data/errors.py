"""Exceptions of this package.

RlDataError
├── DataError (also ValueError)              a data file cannot be used; names file, row, column and the remedy
├── UnknownDataSourceError (also ValueError) no reward is registered for a data source
└── SamplerStateError (also ValueError)      a saved sampler state belongs to other data or settings

ModelFolderError (a model folder has no tokenizer, or one that cannot be loaded) is plinth_base's.

All of them are PlinthErrors: errors about a setting or argument carry `field`, `value`, `allowed` and `remedy`, and all
pickle with their attributes.
"""

from typing import Any

from plinth_base.errors import PlinthError
from plinth_base.model_folder import ModelFolderError as ModelFolderError


class RlDataError(PlinthError):
    """Base class of this package's exceptions."""


class DataError(RlDataError, ValueError):
    """A data file cannot be used.

    Attributes: `file` (path as given), `row` (the line, counted from 1, in JSON lines and CSV, else counted
    from 0; None for the whole file), `column`.
    """

    def __init__(
        self,
        problem: str = "",
        *,
        file: str | None = None,
        row: int | None = None,
        column: str | None = None,
        **fields: Any,
    ) -> None:
        super().__init__(problem, **fields)
        self.file = file
        self.row = row
        self.column = column


class UnknownDataSourceError(RlDataError, ValueError):
    """No reward is registered for a data source."""


class SamplerStateError(RlDataError, ValueError):
    """A saved sampler state belongs to another sampler."""
