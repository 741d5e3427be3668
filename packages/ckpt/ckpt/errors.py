"""Errors of this package.

CheckpointError
├── ArchitectureMismatchError (also ValueError) the checkpoint was written from another model
├── CheckpointDamagedError                      a published checkpoint is torn or altered: names the files
├── CheckpointNotFoundError (also ValueError)   there is no such checkpoint
├── CheckpointExistsError (also ValueError)     the step is published already
├── CheckpointLockedError (also ValueError)     another process is writing in the folder: names it
├── CheckpointSpaceError (also ValueError)      the disk has not enough room
├── CheckpointStateError (also ValueError)      the state cannot be written as JSON
├── CheckpointUsageError (also ValueError)      calls out of order, or an argument out of range
├── ExportError (also ValueError)               a Hugging Face export cannot be made
├── ShardError (also ValueError)                a DeepSpeed checkpoint cannot be read: names the file
├── UnsupportedFormatError (also ValueError)    the checkpoint's format is newer than this package
└── UntrustedFileError (also ValueError)        a file holds more than tensors and plain values

All of them survive pickling, attributes included, because they cross process borders.
"""

from typing import Any


class CheckpointError(Exception):
    """Root of this package's errors."""

    def __reduce__(self) -> tuple[Any, ...]:
        # Exceptions pickle by calling the class with `args`; attributes travel as state.
        return (type(self), self.args, self.__dict__)


class ArchitectureMismatchError(CheckpointError, ValueError):
    """The checkpoint was written from a model of other parameter names or shapes."""


class CheckpointDamagedError(CheckpointError):
    """A published checkpoint is torn or altered.

    Attributes: `step`, `files` (names of the damaged files, relative to the checkpoint), `newest_good` (the newest
    step that verifies, None when there is none).
    """

    def __init__(
        self, message: str, *, step: int | None = None, files: tuple[str, ...] = (), newest_good: int | None = None
    ):
        super().__init__(message)
        self.step = step
        self.files = files
        self.newest_good = newest_good


class CheckpointNotFoundError(CheckpointError, ValueError):
    """There is no such checkpoint."""


class CheckpointExistsError(CheckpointError, ValueError):
    """The step is published already."""


class CheckpointLockedError(CheckpointError, ValueError):
    """Another process is writing checkpoints in the folder."""


class CheckpointSpaceError(CheckpointError, ValueError):
    """The disk has not enough room for the checkpoint; what was written of it is gone."""


class CheckpointStateError(CheckpointError, ValueError):
    """The state cannot be written as JSON."""


class CheckpointUsageError(CheckpointError, ValueError):
    """A call out of order, or an argument out of range."""


class ExportError(CheckpointError, ValueError):
    """A Hugging Face export cannot be made."""


class ShardError(CheckpointError, ValueError):
    """A DeepSpeed checkpoint that is missing, torn, foreign, or does not add up."""


class UnsupportedFormatError(CheckpointError, ValueError):
    """The checkpoint was written in a format this version does not read."""


class UntrustedFileError(CheckpointError, ValueError):
    """A file holds more than tensors and plain values; nothing of it was executed."""
