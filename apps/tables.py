"""Rows of results as tab-separated text and as Markdown. Pure."""

import math
from collections.abc import Sequence
from typing import Any

Row = dict[str, Any]


def tsv_text(rows: Sequence[Row]) -> str:
    """Rows with equal keys as a tab-separated table; missing values are empty."""
    lines = ["\t".join(rows[0])] if rows else []
    lines += ["\t".join(cell_text(value) for value in row.values()) for row in rows]
    return "".join(f"{line}\n" for line in lines)


def markdown_table(rows: Sequence[Row]) -> str:
    """The columns with any value as a Markdown table."""
    columns = [name for name in (rows[0] if rows else ()) if any(cell_text(row[name]) for row in rows)]
    lines = [f"| {' | '.join(columns)} |", f"|{' --- |' * len(columns)}"]
    lines += [f"| {' | '.join(cell_text(row[name], digits=4) for name in columns)} |" for row in rows]
    return "\n".join(lines)


def cell_text(value: Any, digits: int = 6) -> str:
    """A value on one line; empty for None and nan."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    return f"{value:.{digits}g}" if isinstance(value, float) else " ".join(str(value).split())
