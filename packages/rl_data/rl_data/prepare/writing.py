"""Third pass: the kept rows become parquet files, in the order of the input."""

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import DataError
from ..files.table import Place
from .config import PrepareConfig
from .output import ParquetFile
from .reading import Reader, fingerprint
from .report import CONFLICT, EXACT, MAX_EXAMPLES, NEAR, Example, Input, Output, Report, summarize
from .selection import Mask, Selection
from .spool import storable

_NUM_SAMPLES = 3


class Writer:
    """Writes what a selection keeps, and collects what the report says about it."""

    def __init__(self, config: PrepareConfig, reader: Reader, selection: Selection, folder: Path) -> None:
        self._config, self._reader, self._selection, self._folder = config, reader, selection, folder
        self._spool = reader.spool
        self._data_sources: Counter[str] = Counter()
        self._samples: list[str] = []
        self._texts: dict[int, str] = {}
        """Prompts of the rows in `_examples`."""
        self._pairs = {
            EXACT: selection.is_exact,
            NEAR: selection.is_near,
            CONFLICT: selection.is_conflict,
        }
        self._wanted = np.unique(
            [row for mask in self._pairs.values() for first in _first(mask) for row in (first, selection.keeper[first])]
        ).astype(np.int64)

    def write(self, command: str, inputs: Sequence[Input]) -> Report:
        """Write the files. Raises DataError if one of them would have no rows."""
        schema = storable(self._spool.schema)
        is_kept, is_validation = self._selection.is_kept, self._selection.is_validation
        masks = {"train.parquet": is_kept & ~is_validation}
        if self._config.validation:
            masks["val.parquet"] = is_kept & is_validation
        for name, mask in masks.items():
            if not mask.any():
                other = "smaller" if name == "train.parquet" else "larger"
                raise DataError(
                    f"{name} would have none of the {is_kept.sum()} rows: --validation={self._config.validation} is "
                    f"the probability with which each row is drawn for val.parquet. Give a {other} one, another "
                    "--seed, more rows, or --validation 0, which writes train.parquet alone."
                )
        files = {name: ParquetFile(self._folder / name, schema) for name in masks}
        start = 0
        for table in self._spool.tables(schema):
            self._add(table, start, masks, files)
            start += len(table)
        for file in files.values():
            file.close()
        self._count_duplicates()
        outputs = []
        for name, file in files.items():
            num_bytes, sha256 = fingerprint(str(file.path))
            outputs.append(Output(name=name, num_rows=file.num_rows, num_bytes=num_bytes, sha256=sha256))
        return self._report(command, inputs, schema, outputs)

    def _add(self, table: Any, start: int, masks: dict[str, Mask], files: dict[str, ParquetFile]) -> None:
        import pyarrow as pa

        rows = slice(start, start + len(table))
        first, last = np.searchsorted(self._wanted, (rows.start, rows.stop))
        for row in self._wanted[first:last]:
            self._texts[int(row)] = _prompt_text(table.slice(row - start, 1).to_pylist()[0])
        for name, mask in masks.items():
            part = table.filter(pa.array(mask[rows]))
            if len(part):
                files[name].add(part)
                self._count(part, name)

    def _count(self, table: Any, name: str) -> None:
        for count in table["data_source"].value_counts().to_pylist():
            self._data_sources[count["values"] or "(none)"] += count["counts"]
        if name == "train.parquet" and (missing := _NUM_SAMPLES - len(self._samples)) > 0:
            self._samples += [
                json.dumps(row, indent=2, ensure_ascii=False) for row in table.slice(0, missing).to_pylist()
            ]

    def _count_duplicates(self) -> None:
        """Count the duplicates, and show the first of each kind beside the row that is kept."""
        removed, keeper = self._reader.removed, self._selection.keeper
        files, numbers, is_line = (self._spool.keys(name) for name in ("file", "number", "is_line"))

        def place(row: int) -> str:
            return str(Place(file=self._reader.files[files[row]], number=int(numbers[row]), is_line=bool(is_line[row])))

        for reason, mask in self._pairs.items():
            if num := int(mask.sum()):
                removed.counts[reason] = num
                removed.examples[reason] = [
                    Example(place(row), self._texts[row], f"{place(keeper[row])}\n{self._texts[int(keeper[row])]}")
                    for row in _first(mask)
                ]

    def _report(self, command: str, inputs: Sequence[Input], schema: Any, outputs: Sequence[Output]) -> Report:
        reader, spool, is_kept = self._reader, self._spool, self._selection.is_kept
        has_response = spool.keys("has_response") & is_kept
        dropped = [name for name in spool.schema.names if name not in schema.names and name not in _OPTIONAL]
        notes = [*reader.notes, *(f"the column {name!r} is empty in every row and is left out" for name in dropped)]
        return Report(
            command=command,
            inputs=inputs,
            held_out=reader.held_out_inputs,
            outputs=outputs,
            removed=reader.removed,
            notes=notes,
            bands=reader.bands,
            unit=reader.measure.unit,
            prompt_lengths=summarize(spool.keys("prompt_length")[is_kept]),
            response_lengths=summarize(spool.keys("response_length")[has_response]) if has_response.any() else None,
            num_responses=int(has_response.sum()),
            num_ground_truths=int((spool.keys("has_ground_truth") & is_kept).sum()),
            data_sources=dict(sorted(self._data_sources.items())),
            columns={field.name: str(field.type) for field in schema},
            samples=self._samples,
        )


_OPTIONAL = ("messages", "tools")
"""Columns of the training schema that are written only if a row has them."""


def _first(mask: Mask) -> list[int]:
    return [int(row) for row in np.flatnonzero(mask)[:MAX_EXAMPLES]]


def _prompt_text(record: dict[str, Any]) -> str:
    if "question" in record:
        return str(record["question"])
    return "\n".join(str(message["content"]) for message in record["prompt"])
