"""The passes of `prepare_data`: rows and their keys go into one `datasets.Dataset` on the disk, are selected, written.

A row is JSON text there, so that the columns have the same types whatever the values. The files are read by our own
readers, because those of `datasets` convert texts that look like dates, and their errors name no row.
"""

import copy
import importlib.util
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..config import DataConfig
from ..errors import BadRowsError, DataConfigError, DataError
from ..files.opening import open_table
from ..files.table import Place, Table
from ..rendering import Renderer, encode
from ..rows import left_out
from ..tokenizer import load_tokenizer
from . import card
from .card import File, Report
from .config import PrepareConfig, option
from .duplicates import HeldOut, NearDuplicates, digest, normalized, numbers_and_operators, tokens
from .layouts import Layout, Record, find_layout, json_text, prompt_of, read_records, response_of, text_of
from .writing import fingerprint, output_folder, write_selection

_MAX_SHOWN = 20


def prepare_data(config: PrepareConfig, *, command: str = "") -> Report:
    """Write training and validation files and their data card to `config.out`; return the report that the card shows.

    The same configuration and files give the same bytes. The rows kept do not depend on their order.

    Args:
        command: the command that the data card gives to repeat this.

    Raises:
        DataError: a file, or without `skip_bad` a row, cannot be used; no row is left for training or validation;
            `config.out` exists.
        ModelFolderError: no tokenizer in `config.tokenizer`.
        DataConfigError: datasketch is not installed.
    """
    if importlib.util.find_spec("datasketch") is None:
        raise DataConfigError("datasketch is not installed", remedy="pip install 'datasketch>=2'")
    with output_folder(Path(config.out), overwrite=config.overwrite) as (folder, temporary):
        report = Report(command=command)
        rows = _stored_rows(_Reader(config, report), temporary)
        write_selection(rows, config, report, folder)
        (folder / "card.md").write_text(card.card(report), encoding="utf-8")
    return report


def _stored_rows(reader: "_Reader", folder: str) -> Any:
    """A `datasets.Dataset` of all rows and their keys, in a folder. Raises what `reader.rows` raises."""
    from datasets import Dataset, Features, List, Value
    from datasets.exceptions import DatasetGenerationError

    texts, hashes = ("place", "record"), ("content", "text", "prompt", "ground_truth")
    types = dict.fromkeys(texts, Value("large_string")) | dict.fromkeys(hashes, Value("int64"))
    features = Features(types | {"bands": List(Value("int64"))})
    try:
        return Dataset.from_generator(reader.rows, features=features, cache_dir=folder, fingerprint="rows")
    except DatasetGenerationError as error:
        raise (error.__cause__ or error) from None


def with_option(error: DataError) -> DataError:
    """The error with an option of the command line instead of a key of the apps' configuration."""
    error = copy.copy(error)
    error.setting = option(error.setting)
    return error


class _Reader:
    """Reads the rows of all files. All files have questions, or all have conversations."""

    def __init__(self, config: PrepareConfig, report: Report) -> None:
        """Reads the held-out files. Raises DataError, and ModelFolderError for the tokenizer."""
        self._config, self._report = config, report
        self._errors: list[DataError] = []
        self._renderer = Renderer(load_tokenizer(config.tokenizer), DataConfig()) if config.tokenizer else None
        self._near = NearDuplicates(config.similarity) if config.duplicates == "near" else None
        self._held_out, self._held_out_places = HeldOut(), list[Place]()
        for file in config.held_out:
            self._read_held_out(open_table(file))

    def rows(self) -> Iterator[dict[str, Any]]:
        """The rows to select from, with their keys.

        Raises DataError for a file that cannot be used, for bad rows, and if no row is left.
        """
        layouts, num_left = [], 0
        for file in self._config.files:
            table = open_table(file, self._on_bad)
            layouts.append(layout := find_layout(table, self._config))
            if layout.is_question != layouts[0].is_question:
                problem = "has conversations and other files have questions, or the reverse, and a file has one schema"
                raise DataError(problem, "Prepare them apart; data.train takes several files.", file=file)
            self._note(table, layout)
            num_usable = 0
            for place, record in read_records(table, layout):
                try:
                    lengths = self._lengths(place, record)
                except DataError as error:
                    self._on_bad(error)
                    continue
                num_usable += 1
                text = _compared_text(record)
                words = tokens(text)
                if not self._is_outside(place, record, *lengths) and not self._is_contaminated(place, record, words):
                    num_left += 1
                    yield self._stored(place, record, text, words)
            self._report.files.append(_file("read", file, layout, num_usable))
        if self._errors:
            raise self._refusal(f"{len(self._errors)} rows cannot be used")
        if not num_left:
            reasons = ", ".join(f"{count} {reason}" for reason, count in self._report.counts.items())
            raise DataError(f"no row is left ({reasons})", "Relax the limits.", file=", ".join(self._config.files))

    def _stored(self, place: Place, record: Record, text: str, words: Sequence[str]) -> dict[str, Any]:
        """A row with the keys that select it."""
        context = _context(record)
        must_agree = f"{numbers_and_operators(text)}\n{context}"
        return {
            "place": str(place),
            "record": json.dumps(record),
            "content": digest(json_text(record)),
            "text": digest(text),
            "prompt": digest(f"{text}\n{context}"),
            "ground_truth": digest(record["ground_truth"] or ""),
            "bands": self._near.keys(words, must_agree) if self._near else [],
        }

    def _on_bad(self, error: DataError) -> None:
        """Counts an unusable row, or refuses it."""
        if self._config.skip_bad:
            self._report.count(card.UNUSABLE, with_option(error))
            return
        self._errors.append(with_option(error))
        if len(self._errors) == _MAX_SHOWN:
            raise self._refusal(f"the first {_MAX_SHOWN} rows that cannot be used")

    def _refusal(self, problem: str) -> BadRowsError:
        return BadRowsError(problem, "Drop such rows: --skip-bad.", self._errors)

    def _note(self, table: Table, layout: Layout) -> None:
        notes = [f"layout {layout.name}"]
        if layout.data_source:
            notes.append(f"the data source of rows without one is {layout.data_source}")
        if self._config.extra_columns is None and (reserved := sorted(layout.reserved & {*table.columns})):
            notes.append(f"left out, because the apps would read prompts from them: {', '.join(map(repr, reserved))}")
        if columns := left_out(table, layout.schema):
            notes.append(f"left out, because JSON cannot hold them: {columns}")
        self._report.notes += [f"{table.file}: {note}" for note in notes]

    def _read_held_out(self, table: Table) -> None:
        config = self._config
        if config.prompt_column not in table.columns:
            config = replace(config, layout="auto", prompt_column=None, response_column=None, ground_truth_column=None)
        layout = find_layout(table, replace(config, extra_columns=()))
        num_before = len(self._held_out_places)
        for place, record in read_records(table, layout):
            self._held_out.add(tokens(_compared_text(record)))
            self._held_out_places.append(place)
        num_rows = len(self._held_out_places) - num_before
        self._report.files.append(_file("held out", table.file, layout, num_rows))

    def _lengths(self, place: Place, record: Record) -> tuple[int, int]:
        """Lengths of prompt and response, as the apps count them. Raises DataError for what the template refuses."""
        messages, response = prompt_of(record), response_of(record)
        if self._renderer is None:
            return len(text_of(messages)), len(response)
        prompt = self._renderer(messages, json.loads(record["tools"] or "[]"), place)
        (response_ids,) = encode([response], self._renderer.tokenizer, add_special_tokens=False)
        return len(self._renderer.encode([prompt])[0]), len(response_ids)

    def _is_outside(self, place: Place, record: Record, prompt_length: int, response_length: int) -> bool:
        """Counts a row that is too long; False for others."""
        unit = "tokens" if self._renderer else "characters"
        for reason, length, longest in (
            (card.LONG_PROMPT, prompt_length, self._config.max_prompt_length),
            (card.LONG_RESPONSE, response_length, self._config.max_response_length),
        ):
            if longest is not None and length > longest:
                self._report.count(reason, place, text_of(prompt_of(record)), f"{length} {unit}")
                return True
        return False

    def _is_contaminated(self, place: Place, record: Record, words: Sequence[str]) -> bool:
        """Counts a row that contains a held-out prompt; False for others."""
        contained = self._held_out.contained(words)
        if contained is None:
            return False
        other = f"{contained[1]:.0%} of {self._held_out_places[contained[0]]}"
        self._report.count(card.CONTAMINATED, place, text_of(prompt_of(record)), other)
        return True


def _compared_text(record: Record) -> str:
    """The normalized prompt without system messages, which many rows share."""
    return normalized(text_of(message for message in prompt_of(record) if message["role"] != "system"))


def _context(record: Record) -> str:
    """System messages and tools; prompts of different contexts are no duplicates."""
    return json_text([message for message in prompt_of(record) if message["role"] == "system"] + [record["tools"]])


def _file(use: str, name: str, layout: Layout, num_rows: int) -> File:
    path = Path(name) if Path(name).exists() else Path(name.rpartition(":")[0])  # folder:split
    return File(use, name, layout.name, num_rows, *fingerprint(path))
