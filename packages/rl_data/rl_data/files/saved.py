"""Data sets that `datasets` saved with `save_to_disk`: memory-mapped; nothing is downloaded or executed."""

import json
from pathlib import Path
from typing import Any

from ..errors import DataError
from .arrow import BATCH_SIZE, ArrowTable, arrow_table
from .table import OnBad, first_line, refuse

_OF_A_SET, _OF_SPLITS = "state.json", "dataset_dict.json"


def is_saved(folder: Path) -> bool:
    """Whether `save_to_disk` wrote the folder."""
    return any((folder / name).is_file() for name in (_OF_A_SET, _OF_SPLITS))


def open_saved(folder: Path, file: str, split: str | None, on_bad: OnBad = refuse) -> ArrowTable:
    """The table of a saved data set, or of one split of a saved `DatasetDict`.

    Raises DataError if the split is missing, unnecessary or unknown, if the data set cannot be read, or if it is empty.
    """
    split_folder = folder / _known_split(folder, file, split) if (folder / _OF_SPLITS).is_file() else folder
    if split_folder == folder and split is not None:
        raise DataError(f"{file}: the data set in {folder} has no splits. Give {folder}.", file=file)
    data: Any
    try:
        from datasets import load_from_disk

        data = load_from_disk(str(split_folder), keep_in_memory=False).with_format("arrow")
        schema = data.features.arrow_schema
    except Exception as error:  # datasets raises many kinds for damaged and missing files
        raise _unreadable(file, error) from error
    if len(data) == 0:
        raise DataError(f"{file}: the data set has no rows. Give one with at least one.", file=file)
    return arrow_table(
        file, schema, lambda columns: data.select_columns(list(columns)).iter(batch_size=BATCH_SIZE), on_bad
    )


def _known_split(folder: Path, file: str, split: str | None) -> str:
    """The split, if the folder has it."""
    try:
        splits = json.loads((folder / _OF_SPLITS).read_text(encoding="utf-8"))["splits"]
    except (OSError, ValueError, TypeError, LookupError) as error:
        raise _unreadable(file, error) from error
    if split not in splits:
        allowed = " or ".join(f"{folder}:{name}" for name in splits)
        what = "which of its splits" if split is None else f"no split {split!r}"
        raise DataError(f"{file}: {'say ' if split is None else 'it has '}{what}. Give {allowed}.", file=file)
    return str(split)


def _unreadable(file: str, error: Exception) -> DataError:
    what = f"{file}: cannot be read as a saved data set ({type(error).__name__}: {first_line(error)}). Save it again."
    return DataError(what, file=file)
