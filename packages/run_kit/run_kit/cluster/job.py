"""The command of a job: divides its arguments, writes its file for its user only, and says how to submit it."""

import os
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import NoReturn, TypeVar

from ..cli import run_cli
from ..config.redaction import secrets_in
from ..errors import ConfigError
from .app import App, read_app, split_arguments

JobT = TypeVar("JobT")


def run_job(
    cls: type[JobT],
    write: Callable[[JobT, App], None],
    *,
    name: str,
    doc: str | None,
    example: str,
    argv: Sequence[str] | None,
) -> NoReturn:
    """Runs `plinth NAME APP`: keys of `cls` are those of the job, all others are checked by the app.

    Exits with 2 if the app or the job refuses a key.
    """
    keys = [field.name for field in fields(cls)]  # type: ignore[arg-type]  # a config dataclass
    app_arguments, own = split_arguments(sys.argv[1:] if argv is None else argv, keys)

    def run(config: JobT) -> None:
        write(config, read_app(app_arguments, job_keys=keys))

    first = (doc or "").partition("\n")[0]
    run_cli(cls, run, app_name=f"plinth {name} APP", argv=own, doc=first, examples=(example,))


def require_at_least(minimum: float, config: object, *names: str, or_null: bool = False) -> None:
    """Raises ValueError, which names the key, for a value below `minimum`; None passes."""
    for name in names:
        value = getattr(config, name)
        if value is not None and value < minimum:
            allowed = f"{minimum:g} or more{', or null' if or_null else ''}"
            raise ValueError(f"{name} is {value}; allowed: {allowed}")


def write_job(
    file: str, text: str, app: App, notes: Sequence[str], *, submit: str, warnings: Sequence[str] = ()
) -> None:
    """Writes `text` to `file` (`-`: to stdout) and prints `notes`; `warnings` go to stderr.

    Args:
        submit: the command that submits a file.

    Raises:
        ConfigError: the file cannot be written.
    """
    secrets = secrets_in(list(app.arguments))
    for warning in (*(f"everybody who can read the job can read {key}" for key in secrets), *warnings):
        print(f"warning: {warning}", file=sys.stderr)
    if file == "-":
        print(text, end="")
        print("".join(f"{note}\n" for note in notes), end="", file=sys.stderr)
        return
    try:
        with open(file, "w", encoding="utf-8", opener=_private) as stream:
            stream.write(text)
    except OSError as error:
        raise ConfigError(f"file is {file}, which cannot be written: {error.strerror}") from None
    print(*notes, f"{file}: submit it with {submit} {shlex.quote(file)}", sep="\n")


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, mode=0o600)
