"""Exceptions of this package.

CheckpointError
├── ArchitectureMismatchError (also ValueError) the checkpoint was written from another model
├── CheckpointDamagedError                      a published checkpoint is torn or altered; names the files
├── CheckpointNotFoundError (also ValueError)   the checkpoint does not exist
├── CheckpointExistsError (also ValueError)     the step is already published
├── CheckpointLockedError (also ValueError)     another process is writing in the folder; names it
├── CheckpointSpaceError                        the disk is full; names the file and the free space
├── CheckpointStateError (also ValueError)      the state cannot be stored or restored
├── CheckpointUsageError (also ValueError)      calls out of order, or an argument out of range
├── ExportError (also ValueError)               a Hugging Face export failed
├── ShardError (also ValueError)                a DeepSpeed checkpoint cannot be read; names the file
├── UnsupportedFormatError (also ValueError)    another version of this package wrote the checkpoint's format
├── UntrustedFileError (also ValueError)        a file holds more than tensors and plain values
└── UploadError                                 checkpoints could not be uploaded; names them

All of them are PlinthErrors: errors about a setting or argument carry `field`, `value`, `allowed` and `remedy`, and all
pickle with their attributes.
"""

from typing import Any

from plinth_base.errors import PlinthError


class CheckpointError(PlinthError):
    """Base class of this package's exceptions."""


class ArchitectureMismatchError(CheckpointError, ValueError):
    """The checkpoint was written from a model with other parameter names or shapes.

    Attributes: `only_in_checkpoint`, `only_here` and `reshaped` (names of parameters).
    """

    def __init__(
        self,
        problem: str,
        *,
        only_in_checkpoint: tuple[str, ...] = (),
        only_here: tuple[str, ...] = (),
        reshaped: tuple[str, ...] = (),
        **fields: Any,
    ) -> None:
        super().__init__(problem, **fields)
        self.only_in_checkpoint = only_in_checkpoint
        self.only_here = only_here
        self.reshaped = reshaped


class CheckpointDamagedError(CheckpointError):
    """A published checkpoint is torn or altered.

    Attributes: `step`, `files` (names of the damaged files, relative to the checkpoint), `newest_good` (the newest
    step that verifies, or None).
    """

    def __init__(
        self,
        problem: str,
        *,
        step: int | None = None,
        files: tuple[str, ...] = (),
        newest_good: int | None = None,
        **fields: Any,
    ) -> None:
        super().__init__(problem, **fields)
        self.step = step
        self.files = files
        self.newest_good = newest_good


class CheckpointNotFoundError(CheckpointError, ValueError):
    """The checkpoint does not exist."""


class CheckpointExistsError(CheckpointError, ValueError):
    """The step is already published."""


class CheckpointLockedError(CheckpointError, ValueError):
    """Another process is writing checkpoints in the folder."""


class CheckpointSpaceError(CheckpointError):
    """The disk has no room for the checkpoint; its unpublished files are deleted."""


class CheckpointStateError(CheckpointError, ValueError):
    """A state cannot be stored as JSON or safetensors, or cannot be restored."""


class CheckpointUsageError(CheckpointError, ValueError):
    """Calls out of order, or an argument out of range."""


class ExportError(CheckpointError, ValueError):
    """A Hugging Face export failed."""


class ShardError(CheckpointError, ValueError):
    """A DeepSpeed checkpoint is missing, torn, of another kind, or inconsistent."""


class UnsupportedFormatError(CheckpointError, ValueError):
    """The checkpoint has a format that this version does not read."""


class UntrustedFileError(CheckpointError, ValueError):
    """A file holds more than tensors and plain values; nothing in it was executed."""


class UploadError(CheckpointError):
    """Published checkpoints could not be uploaded.

    Attributes: `steps` (the published steps that the storage lacks).
    """

    def __init__(self, problem: str, *, steps: tuple[int, ...] = (), **fields: Any) -> None:
        super().__init__(problem, **fields)
        self.steps = steps
