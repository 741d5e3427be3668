"""Tests start groups of ranks through ckpt_ranks.py, which the scripts they run import as well."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
