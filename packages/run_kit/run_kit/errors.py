"""Errors of this package.

RunKitError
├── ConfigError (ValueError)    the configuration holds one or more problems
├── TrackingError (ValueError)  a run folder, metric or tracker cannot be used as asked
└── RunFolderError              a file of the run folder cannot be written: it is gone, read-only, or on a full disk

Errors that are also ValueErrors are user errors: `run_cli` prints them as one `error: …` and exits with code 2.
"""

from collections.abc import Sequence
from typing import Any

from plinth_base.errors import PlinthError

OWN_PACKAGES = (
    "plinth_base",
    "rl_core",
    "ds_engine",
    "rollout_vllm",
    "weight_sync",
    "ckpt",
    "rl_data",
    "run_kit",
    "rl_runtime",
    "apps",
)
"""Packages whose ValueErrors are user errors and whose loggers log from INFO up."""


_MAX_MESSAGE = 1_000  # a message that repeats a value of any length is still readable


class RunKitError(PlinthError):
    """Base class of this package's errors."""


class ConfigError(RunKitError, ValueError):
    """The configuration is invalid: one problem with its fields, or several that are reported together.

    Args:
        problem: what is wrong, if `allowed` does not say it.
        source: origin of the value: a file, `command line`; empty for a default.
        problems: the errors that this one reports.
        **fields: those of PlinthError; `field` is the dotted path of the key, None for the configuration as a whole.
    """

    def __init__(
        self, problem: str = "", *, source: str = "", problems: Sequence["ConfigError"] = (), **fields: Any
    ) -> None:
        super().__init__(problem, **fields)
        self.source = source
        self._parts = tuple(problems)

    @classmethod
    def of(cls, problems: Sequence["ConfigError"]) -> "ConfigError":
        """The only problem, or an error that reports all of them."""
        return problems[0] if len(problems) == 1 else cls(problems=problems)

    @property
    def problems(self) -> tuple["ConfigError", ...]:
        """Every problem, not only the first."""
        return self._parts or (self,)

    def __str__(self) -> str:
        if self._parts:
            lines = "\n".join(f"  {problem}" for problem in self._parts)
            return f"{len(self._parts)} problems in the configuration\n{lines}"
        text = super().__str__()
        if len(text) > _MAX_MESSAGE:
            text = f"{text[: _MAX_MESSAGE // 2]} … {text[-_MAX_MESSAGE // 2 :]}"
        return f"{text} (from {self.source})" if self.source else text


class TrackingError(RunKitError, ValueError):
    """A run folder, metric or tracker cannot be used as asked."""


class RunFolderError(RunKitError):
    """A file of the run folder cannot be written, for example because the folder was removed. Names the file, and the
    free space if the disk is full, or a quota or size limit is reached."""
