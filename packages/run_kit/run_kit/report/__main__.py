"""`plinth report RUN_FOLDER... [output=FILE.html]`: writes an HTML page about one run, or comparing several."""

import sys
from collections.abc import Sequence

from ..errors import ConfigError, RunFolderError, TrackingError
from .data import run_labels
from .runs import write_comparison, write_report


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0, or 2 for a user error."""
    arguments = sys.argv[1:] if argv is None else argv
    outputs = [argument.partition("=")[2] for argument in arguments if argument.startswith("output=")]
    folders = [argument for argument in arguments if not argument.startswith("output=")]
    if not folders or any(folder.startswith("-") for folder in folders):
        print(__doc__)
        return 0 if any(folder in ("-h", "--help") for folder in folders) else 2
    try:
        if len(folders) == 1:
            print(write_report(folders[0], *outputs[-1:]))
        else:
            print(write_comparison(run_labels(folders), outputs[-1] if outputs else "comparison.html"))
    except (ConfigError, TrackingError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except (OSError, RunFolderError) as error:  # a folder that may not be read, a file that cannot be written
        path = f"output={outputs[-1]}" if outputs else ", ".join(folders)
        print(f"error: {path}: {error}; give another path", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
