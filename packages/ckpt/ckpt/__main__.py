"""`python -m ckpt`: see `tools.command_line`."""

import sys

from .tools.command_line import main

if __name__ == "__main__":
    sys.exit(main())
