"""Errors of this package.

RlRuntimeError
├── InputError (ValueError)     model, data and settings that do not match
│   └── NodeError               a node of the cluster that cannot take part
├── PlacementError (ValueError) more devices requested than available
├── RankError                   a trainer rank failed
│   └── RankLost                a trainer rank died or does not answer; new ranks can continue from a checkpoint
├── DivergedError               the gradients of a model are no longer finite
└── RolloutFailed               a step without any sample to train on

Errors that are also ValueErrors are a user's mistake: `run_cli` prints them as one `error: …` and exits with code 2.
All of them are PlinthErrors: errors about a setting carry `field`, `value`, `allowed` and `remedy`, and all pickle.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from plinth_base.errors import PlinthError
from plinth_base.model_folder import ModelFolderError
from rl_data import DataError


class RlRuntimeError(PlinthError):
    """Base class of the errors of this package."""


class InputError(RlRuntimeError, ValueError):
    """Model, data and settings that do not match."""

    @classmethod
    def of(cls, error: Exception, *, under: str = "", remedy: str = "") -> "InputError":
        """The same mistake, with its field below a configuration section or key, and with a further remedy."""
        if not isinstance(error, PlinthError):
            return cls(str(error), field=under or None, remedy=remedy or None)
        own = error.under(under)
        remedy = "; ".join(filter(None, (own.remedy, remedy)))
        return cls(own.problem, field=own.field, value=own.value, allowed=own.allowed, remedy=remedy or None)


class NodeError(InputError):
    """A node of the cluster that cannot take part; `node` is its address."""

    def __init__(self, problem: str, *, node: str, **fields: Any) -> None:
        super().__init__(f"Ray node {node}: {problem}", **fields)
        self.node = node


class PlacementError(RlRuntimeError, ValueError):
    """More devices requested than available."""


class RankError(RlRuntimeError):
    """A trainer rank failed, died or did not answer in time; the message names the rank and the method.

    `cause` is the exception of the rank, if it raised one: a user's mistake found on a rank is reported as such.
    """

    def __init__(self, problem: str, cause: BaseException | None = None, **fields: Any) -> None:
        super().__init__(problem, **fields)
        self.cause = cause


class RankLost(RankError):
    """A trainer rank died, hangs or did not answer in time: not an error of what it computed."""


class DivergedError(RlRuntimeError):
    """The gradients of a model are no longer finite."""


class RolloutFailed(RlRuntimeError):
    """A step without any sample to train on."""


@contextmanager
def naming_key(key: str) -> Iterator[None]:
    """Errors about a file or folder name the configuration key that gave it.

    Raises InputError for rl_data.DataError, ModelFolderError and OSError.
    """
    try:
        yield
    except DataError as error:
        raise InputError(error.explanation, field=key) from error
    except ModelFolderError as error:
        raise InputError.of(error, under=key) from error
    except OSError as error:  # a name that is too long, a folder that may not be read
        raise InputError(error.strerror or str(error), field=key, value=str(error.filename)) from error
