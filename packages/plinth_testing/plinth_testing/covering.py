"""Pairwise test tables: every pair of values of two parameters occurs, in far fewer rows than the full product.

Most faults need one or two values to meet (Kuhn, Wallace and Gallo, "Software Fault Interactions and Implications for
Software Testing", IEEE TSE 30(6), 2004): a covering table finds what a product finds where no fault needs three.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations, product
from typing import Any

Row = dict[str, Any]


def covering_table(
    values: Mapping[str, Sequence[Any]], *, allowed: Callable[[Row], bool] = lambda _: True
) -> list[Row]:
    """Rows that together hold every allowed pair of values, chosen greedily from the full product.

    Deterministic: of rows that add as many pairs, the first of the product is taken.

    Args:
        values: by parameter, the values it takes (hashable).
        allowed: rows for which this is false do not occur.
    """
    rows = [row for row in (dict(zip(values, row, strict=True)) for row in product(*values.values())) if allowed(row)]
    missing = {pair for row in rows for pair in _pairs(row)}
    table = []
    while missing:
        best = max(rows, key=lambda row: len(_pairs(row) & missing))
        table.append(best)
        missing -= _pairs(best)
    return table


def _pairs(row: Row) -> set[frozenset[tuple[str, Any]]]:
    return {frozenset(pair) for pair in combinations(row.items(), 2)}
