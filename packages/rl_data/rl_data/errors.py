"""The errors of this package.

```
PlinthError
└── RlDataError
    ├── DataError (also ValueError)              a data file cannot be used; has file, row, column and remedy
    ├── DataConfigError (also ValueError)        a setting or an option has a value that is not allowed
    ├── UnknownDataSourceError (also ValueError) no reward is registered for a data source
    └── SamplerStateError (also ValueError)      a saved sampler state belongs to other data or settings
```

A model folder without a config, a tokenizer or weights raises `plinth_base.ModelFolderError`.
"""

from plinth_base.errors import PlinthError


class RlDataError(PlinthError):
    """Base class of this package's exceptions."""


class DataError(RlDataError, ValueError):
    """A data file cannot be used.

    Args:
        problem: what is wrong, a clause without a period.
        remedy: a sentence, with its period.
        file: the path as given.
        row: the line, counted from 1, in JSON lines and CSV (`is_line`); the row, counted from 0, in other files.
        column: the column that is wrong.
        setting: a configuration key, or `key=value`, that mends it too.
    """

    # No defaults in the class: Ray raises an error of a remote task as a subclass that looks up missing attributes.
    file: str | None
    row: int | None
    is_line: bool
    column: str | None
    setting: str | None

    def __init__(
        self,
        problem: str,
        remedy: str = "",
        *,
        file: str | None = None,
        row: int | None = None,
        is_line: bool = False,
        column: str | None = None,
        setting: str | None = None,
    ) -> None:
        super().__init__(problem, remedy=remedy)
        self.file, self.row, self.is_line, self.column, self.setting = file, row, is_line, column, setting

    @property
    def place(self) -> str:
        """File, row and column; empty if the error has none."""
        if self.row is None:
            return self.file or ""
        number = f"line {self.row}" if self.is_line else f"row {self.row} (counted from 0)"
        return f"{self.file}: {number}" + (f", column {self.column!r}" if self.column else "")

    @property
    def explanation(self) -> str:
        place = f"{self.place}: " if self.place else ""
        setting = f"Or set {self.setting}." if self.setting else ""
        return " ".join(filter(None, (f"{place}{self.problem}.", self.remedy, setting)))


class DataConfigError(RlDataError, ValueError):
    """A setting, or an option of a reward or of `prepare`, has a value that is not allowed."""


class UnknownDataSourceError(RlDataError, ValueError):
    """No reward is registered for a data source. `value` is the data source."""


class SamplerStateError(RlDataError, ValueError):
    """A saved sampler state belongs to another sampler. `field` is the entry of the state."""
