"""Makes ckpt_ranks.py importable, which the tests and the scripts that they run share."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
