"""Standard streams that cannot end a run: the terminal may be ASCII, be closed, or be a full disk."""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO


def encodable(text: str, stream: TextIO) -> str:
    """`text` with escapes for the characters that the stream's encoding lacks."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)


class Terminal:
    """A stream that escapes what its encoding lacks, and drops everything after the first error.

    Other attributes come from the stream.

    Args:
        stream: None for a process that was started without it.
    """

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream if stream is not None else open(os.devnull, "w")  # noqa: SIM115 - as long as the process
        self.lost: OSError | ValueError | None = None
        """The first error, such as BrokenPipeError after `| head`; ValueError of a closed file."""
        self.is_logged = False
        """The text is in a log as well, so that its loss is no error."""

    def write(self, text: str) -> int:
        """Write what the stream takes."""
        if self.lost is None:
            try:
                self._stream.write(encodable(text, self._stream))
            except (OSError, ValueError) as error:
                self._lose(error)
        return len(text)

    def writelines(self, lines: list[str]) -> None:
        """Write several texts."""
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """Flush the stream."""
        if self.lost is None:
            try:
                self._stream.flush()
            except (OSError, ValueError) as error:
                self._lose(error)

    def log(self) -> None:
        """From now on the text is logged as well."""
        self.is_logged = True
        if isinstance(self._stream, Terminal):
            self._stream.log()

    def end(self) -> None:
        """Ends the program with 128 + SIGPIPE, or with 1 and the reason, if text was lost that no log has."""
        self.flush()
        if self.lost is not None and not self.is_logged:
            if isinstance(self.lost, BrokenPipeError):
                raise SystemExit(128 + signal.SIGPIPE)
            print(f"error: standard output: {self.lost}", file=sys.stderr)
            raise SystemExit(1)

    def _lose(self, error: OSError | ValueError) -> None:
        self.lost = error
        with suppress(OSError, ValueError):  # else Python fails again when it flushes the stream at its end
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def lasting_streams() -> Iterator[None]:
    """Context in which standard streams are Terminals; at its end `stdout.end` may end the program with an error."""
    stdout, stderr = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = out, err = Terminal(stdout), Terminal(stderr)
    try:
        yield
        out.end()
    except SystemExit as ended:
        if ended.code in (0, None):
            out.end()
        raise
    finally:
        # If other code wrapped the streams later, leave its wrappers in place; these still pass text through.
        sys.stdout = stdout if sys.stdout is out else sys.stdout
        sys.stderr = stderr if sys.stderr is err else sys.stderr
