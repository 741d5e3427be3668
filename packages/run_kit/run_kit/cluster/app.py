"""The app that a job runs: its arguments, checked before the job is queued, and the keys that the job sets."""

import contextvars
import difflib
import io
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from typing import Any

import yaml

from .. import commands
from ..errors import ConfigError

ADDRESS = "trainer.ray_address"
SAVE_FREQ = "trainer.save_freq"
_RESUME = ("trainer.resume", "resume")
_NAME = ("trainer.experiment", "experiment", "run_tag")
_OUTPUT = ("trainer.output_dir", "output_dir")
MODELS = ("model.path", "reward.model", "teacher.model")
FILES = (
    *("data.train", "data.val", "supervised.files", "supervised.val_files", "warm_start.files"),
    *("checkpoints.folder", "compare"),
)


@dataclass(frozen=True, kw_only=True)
class App:
    """A `plinth` command with its arguments, and the configuration that they give."""

    arguments: tuple[str, ...]
    """The command's name and its arguments."""
    config: Mapping[str, Any]

    def value(self, key: str) -> Any:
        """The value of a dotted key; None if the app has no such key."""
        found: Any = self.config
        for part in key.split("."):
            found = found.get(part) if isinstance(found, dict) else None
        return found

    def has(self, key: str) -> bool:
        """Whether the app has a dotted key."""
        section, _, name = key.rpartition(".")
        return name in ((self.value(section) if section else self.config) or ())

    @property
    def resumes(self) -> bool:
        """Whether the app resumes its own earlier work."""
        return any(map(self.has, _RESUME))

    def given(self, key: str) -> str | None:
        """The value of the last argument `key=value`."""
        values = [argument.partition("=")[2] for argument in self.arguments if argument.startswith(f"{key}=")]
        return values[-1] if values else None

    def name_key(self) -> str | None:
        """The key of the experiment's name, by which `resume=auto` finds earlier work."""
        return next(filter(self.has, _NAME), None)

    def output_key(self) -> str | None:
        """The key of the folder that holds the app's runs."""
        return next(filter(self.has, _OUTPUT), None)

    def missing_inputs(self) -> list[str]:
        """KEY=PATH of each model folder and data file that this host lacks; other names of models are not looked up."""
        found = [(key, self.value(key)) for key in (*MODELS, *FILES)]
        pairs = [(key, path) for key, value in found for path in ([value] if isinstance(value, str) else value or ())]
        return [f"{key}={path}" for key, path in pairs if (key in FILES or _is_path(path)) and not os.path.exists(path)]

    def job_arguments(self, *, num_nodes: int) -> tuple[str, ...]:
        """The command and its arguments with `resume=auto`; the caller adds the name and Ray's address.

        Raises:
            ConfigError: an argument that the job sets itself, or several nodes for an app of one node.
        """
        if num_nodes > 1 and not self.has(ADDRESS):
            raise ConfigError(
                f"nodes is {num_nodes}, but {self.arguments[0]} runs on one node (it has no {ADDRESS}); allowed: 1"
            )
        if self.value(ADDRESS) is not None:
            raise ConfigError(f"{ADDRESS} is {self.value(ADDRESS)}, but the job starts Ray and sets it; remove it")
        resume = next(filter(self.has, _RESUME), None)
        if resume is None:
            return self.arguments
        if self.given(resume) not in (None, "auto"):
            raise ConfigError(f"{resume} is {self.given(resume)}; allowed: auto, because the job resumes its own run")
        if (start := self.value(f"{resume}_from")) is not None:
            raise ConfigError(
                f"{resume}_from is {start}, from which the job would start again each time that it is queued again; "
                f"give {self.name_key()} of that run instead, and its output_dir"
            )
        return (*self.arguments, *([] if self.given(resume) else [f"{resume}=auto"]))


def _is_path(model: str) -> bool:
    """Whether a model can only be a folder: not OWNER/NAME, and not one of the names that an app knows."""
    return model.startswith(("/", ".")) or model.count("/") > 1


def read_app(arguments: Sequence[str], *, job_keys: Sequence[str] = ()) -> App:
    """The app and its configuration, from `plinth NAME argument ... --print-config`.

    Args:
        job_keys: keys of the job, of which a refused argument may be a misspelled one.

    Raises:
        SystemExit: the app refuses the arguments; it has said why.
        ConfigError: no app is named, or the command has no configuration.
    """
    if not arguments or "=" in arguments[0] or arguments[0].startswith("-"):
        raise ConfigError("no app is named; write its command before the keys, such as grpo preset=gsm8k nodes=2")
    printed = io.StringIO()
    try:
        with redirect_stdout(printed):
            code: object = contextvars.copy_context().run(commands.main, [*arguments, "--print-config"])
    except SystemExit as ended:
        code = ended.code
    if code not in (0, None):
        print(printed.getvalue(), end="", file=sys.stderr)
        for key in (argument.partition("=")[0] for argument in arguments[1:] if "=" in argument):
            if near := difflib.get_close_matches(key, job_keys, n=1):
                print(f"{key}: the nearest key of the job is {near[0]}", file=sys.stderr)
        raise SystemExit(code)
    config = yaml.safe_load(printed.getvalue())
    if not isinstance(config, dict):
        raise ConfigError(f"{arguments[0]} is a command without a configuration; name an app, such as grpo")
    return App(arguments=tuple(arguments), config=config)


def default_cores(num_gpus: int) -> int:
    """CPU cores for the processes of a node: a rank and a server for each GPU, and the driver with its rewards."""
    return 8 * num_gpus + 4


def split_arguments(arguments: Sequence[str], own: Sequence[str]) -> tuple[list[str], list[str]]:
    """The arguments of the app, and those whose key is in `own` or that ask for help."""
    mine = [a for a in arguments if a.partition("=")[0] in own or a in ("--help", "-h", "help")]
    return [a for a in arguments if a not in mine], mine
