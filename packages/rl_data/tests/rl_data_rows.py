"""Reads the rows of a file as `load_prompts` and `check_files` do."""

from collections.abc import Iterator
from pathlib import Path

from rl_data import DataConfig
from rl_data.files.opening import open_table
from rl_data.rows import Row, find_schema, read_rows


def iter_rows(file: str | Path, config: DataConfig) -> Iterator[Row]:
    """The rows of a file in order."""
    table = open_table(file)
    return read_rows(table, find_schema(table, config))
