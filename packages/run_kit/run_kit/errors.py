"""Errors of this package.

RunKitError
├── ConfigError (ValueError)    the configuration holds one or more problems
├── TrackingError (ValueError)  a run folder, metric or tracker cannot be used as asked
├── ReportError (ValueError)    a report cannot be written from a run folder
└── DiskFullError               a file of the run folder cannot be written

Errors that are also ValueErrors are user errors: `run_cli` prints them as one `error: …` and exits with code 2.
"""

from dataclasses import dataclass

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


@dataclass(frozen=True, kw_only=True)
class ConfigProblem:
    """One thing wrong with a configuration."""

    path: str
    """Dotted path of the key; empty for the configuration as a whole."""
    message: str
    """What is wrong, what is allowed, and the nearest key."""
    source: str = ""
    """Where the value came from: a file, `command line`; empty when it is a default."""

    def __str__(self) -> str:
        message = self.message
        if len(message) > _MAX_MESSAGE:
            message = f"{message[: _MAX_MESSAGE // 2]} … {message[-_MAX_MESSAGE // 2 :]}"
        head = f"{self.path[:_MAX_MESSAGE]}: " if self.path else ""
        tail = f" (from {self.source})" if self.source else ""
        return f"{head}{message}{tail}"


class ConfigError(RunKitError, ValueError):
    """The configuration is invalid; `problems` lists every problem, not only the first."""

    def __init__(self, problems: ConfigProblem | str | tuple[ConfigProblem, ...] | list[ConfigProblem]) -> None:
        if isinstance(problems, str):
            problems = ConfigProblem(path="", message=problems)
        if isinstance(problems, ConfigProblem):
            problems = (problems,)
        super().__init__()
        self.problems: tuple[ConfigProblem, ...] = tuple(problems)

    def __str__(self) -> str:
        if len(self.problems) == 1:
            return str(self.problems[0])
        lines = "\n".join(f"  {problem}" for problem in self.problems)
        return f"{len(self.problems)} problems in the configuration\n{lines}"


class TrackingError(RunKitError, ValueError):
    """A run folder, metric or tracker cannot be used as asked."""


class ReportError(RunKitError, ValueError):
    """A report cannot be written from a run folder."""


class DiskFullError(RunKitError):
    """A file cannot be written: the disk is full, or a quota or size limit is reached. Names it and the free space."""
