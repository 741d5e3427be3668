"""Errors of this package.

RlRuntimeError
├── InputError (ValueError)     model, data and settings that do not fit together
├── PlacementError (ValueError) more devices asked for than there are
├── RankError                   a trainer rank failed, died or did not answer
└── RolloutFailed               a step without a single sample to train on

Errors that are also ValueErrors are a user's mistake: `run_cli` prints them as one `error: …` and exits with code 2.
"""


class RlRuntimeError(Exception):
    """Root of every error this package raises on purpose."""


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
