"""`python -m rl_data prepare`: prepares data sets for training; the same as `plinth prepare`."""

import sys

from .prepare.command import main as prepare


def main(argv: list[str]) -> int:
    """Run the command that `argv` names; return its exit code."""
    if argv[:1] == ["prepare"]:
        return prepare(argv[1:])
    print("usage: python -m rl_data prepare FILE [FILE ...] --out FOLDER; prepare --help describes it", file=sys.stderr)
    return 0 if argv in (["--help"], ["-h"]) else 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
