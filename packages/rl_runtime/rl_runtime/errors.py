"""Errors of this package.

RlRuntimeError
├── ConfigError (ValueError)    the configuration holds one or more problems
├── TrackingError (ValueError)  a run folder, metric or tracker cannot be used as asked
├── ReportError (ValueError)    a run folder from which no report can be written
├── InputError (ValueError)     model, data and settings that do not fit together
├── PlacementError (ValueError) more devices asked for than there are
├── RankError                   a trainer rank failed, died or did not answer
└── RolloutFailed               a step without a single sample to train on

Errors that are also ValueErrors are a user's mistake: `run_cli` prints them as one `error: …` and exits with code 2.
"""

from dataclasses import dataclass
from typing import Any


class RlRuntimeError(Exception):
    """Root of every error this package raises on purpose."""


@dataclass(frozen=True, kw_only=True)
class ConfigProblem:
    """One thing wrong with a configuration."""

    path: str
    """Dotted path of the key; empty for the configuration as a whole."""
    message: str
    """What is wrong, what is allowed, what is nearest."""
    source: str = ""
    """Where the value came from: a file, `command line`; empty when it is a default."""

    def __str__(self) -> str:
        head = f"{self.path}: " if self.path else ""
        tail = f" (from {self.source})" if self.source else ""
        return f"{head}{self.message}{tail}"


class ConfigError(RlRuntimeError, ValueError):
    """The configuration is wrong; `problems` lists everything found, not only the first."""

    def __init__(self, problems: ConfigProblem | str | tuple[ConfigProblem, ...] | list[ConfigProblem]) -> None:
        if isinstance(problems, str):
            problems = ConfigProblem(path="", message=problems)
        if isinstance(problems, ConfigProblem):
            problems = (problems,)
        self.problems: tuple[ConfigProblem, ...] = tuple(problems)
        super().__init__(self.problems)

    def __str__(self) -> str:
        if len(self.problems) == 1:
            return str(self.problems[0])
        lines = "\n".join(f"  {problem}" for problem in self.problems)
        return f"{len(self.problems)} problems in the configuration\n{lines}"

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), (self.problems,))


class TrackingError(RlRuntimeError, ValueError):
    """A run folder, metric or tracker cannot be used as asked."""


class ReportError(RlRuntimeError, ValueError):
    """A run folder from which no report can be written."""


class InputError(RlRuntimeError, ValueError):
    """Model, data and settings that do not fit together."""


class PlacementError(RlRuntimeError, ValueError):
    """More devices asked for than there are."""


class RankError(RlRuntimeError):
    """A trainer rank failed, died or did not answer in time; the message names the rank and what it was doing.

    `cause` is what the rank raised, if it raised: a user's mistake found on a rank is reported as one.
    """

    def __init__(self, message: str, cause: BaseException | None = None) -> None:
        super().__init__(message, cause)
        self.cause = cause

    def __str__(self) -> str:
        return str(self.args[0])


class RolloutFailed(RlRuntimeError):
    """A step without a single sample to train on."""
