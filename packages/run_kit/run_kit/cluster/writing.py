"""Writes a job's file for its user only, and says how to submit it."""

import os
import shlex
import sys
from collections.abc import Sequence

from ..config.redaction import secrets_in
from ..errors import ConfigError
from .app import App


def write_job(file: str, text: str, app: App, notes: Sequence[str], *, submit: str) -> None:
    """Writes `text` to `file` (`-`: to stdout) and prints `notes`.

    Args:
        submit: the command that submits a file.

    Raises:
        ConfigError: the file cannot be written.
    """
    secrets = secrets_in(list(app.arguments))
    notes = [*(f"warning: everybody who can read the job can read {key}" for key in secrets), *notes]
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
