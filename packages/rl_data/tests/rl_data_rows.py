"""Rows for tests: some of GSM8K's kind, and what `load_prompts` and `check_files` read of a file."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rl_data import DataConfig
from rl_data.files.opening import open_table
from rl_data.rows import Row, find_schema, read_rows

Rows = list[dict[str, Any]]
NAMES = ("Tom", "Ann", "Ben", "Cleo", "Dan", "Eve", "Fay", "Gus", "Hal", "Ida")
GSM8K: Rows = [
    {"question": f"{name} has {number} apples. How many?", "answer": f"There are\n#### {number}", "level": number % 3}
    for name in NAMES
    for number in (1200, 7)
]


def write_lines(path: Path, rows: Rows) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def iter_rows(file: str | Path, config: DataConfig) -> Iterator[Row]:
    """The rows of a file in order."""
    table = open_table(file)
    return read_rows(table, find_schema(table, config))
