"""Deprecated command `python -m rl_runtime.report`: use `plinth report`."""

import sys

from run_kit.report.__main__ import main

if __name__ == "__main__":
    print("warning: python -m rl_runtime.report is deprecated: use plinth report", file=sys.stderr)
    sys.exit(main())
