"""The passes of `prepare_data`: rows are read into a spool with their keys, selected, and written.

`datasets` serves for its own folders only: its readers of text files convert texts that look like dates, and their
errors name no row.
"""

import copy
import importlib.util
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..config import DataConfig
from ..errors import BadRowsError, DataConfigError, DataError
from ..files.opening import open_table
from ..files.table import Place, Table
from ..prompts import batches
from ..rendering import Renderer, encode
from ..rows import left_out
from ..tokenizer import load_tokenizer
from . import card
from .card import File, Report
from .config import PrepareConfig, option
from .duplicates import HeldOut, NearDuplicates, digests, normalized, numbers_and_operators, tokens
from .layouts import Layout, Record, find_layout, json_text, prompt_of, read_records, response_of, text_of
from .output import output_folder
from .writing import Spool, fingerprint, write_selection

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
        raise DataConfigError("datasketch is not installed", remedy="pip install plinth-rl-data[prepare]")
    with output_folder(Path(config.out), overwrite=config.overwrite) as folder:
        report = Report(command=command, unit="tokens" if config.tokenizer else "characters")
        reader = _Reader(config, report, Spool(folder / "spool.jsonl"))
        reader.read()
        write_selection(reader.spool, config, report, folder)
        (folder / "card.md").write_text(card.card(report), encoding="utf-8")
    return report


def with_option(error: DataError) -> DataError:
    """The error with an option of the command line instead of a key of the apps' configuration."""
    error = copy.copy(error)
    error.setting = option(error.setting)
    return error


class _Reader:
    """Reads files into a spool. All of them have questions, or all have conversations."""

    def __init__(self, config: PrepareConfig, report: Report, spool: Spool) -> None:
        """Reads the held-out files. Raises DataError, and ModelFolderError for the tokenizer."""
        self._config, self._report, self.spool = config, report, spool
        self._errors: list[DataError] = []
        self._renderer = Renderer(load_tokenizer(config.tokenizer), DataConfig()) if config.tokenizer else None
        self._near = NearDuplicates(config.similarity) if config.duplicates == "near" else None
        self._held_out, self._held_out_places = HeldOut(n=config.ngram, share=config.overlap), list[Place]()
        for file in config.held_out:
            self._read_held_out(open_table(file))

    def read(self) -> None:
        """Reads all files. Raises DataError for one that cannot be used, for bad rows, and if no row is left."""
        if self._near:
            shares = ", ".join(
                f"{self._near.probability(share):.3f} at {share}" for share in (0.5, 0.7, 0.8, 0.9, 0.95)
            )
            self._report.notes.append(f"Probability of a near duplicate by the similarity of two prompts: {shares}.")
        layouts = []
        for file in self._config.files:
            table = open_table(file, self._on_bad)
            layouts.append(layout := find_layout(table, self._config))
            if layout.is_question != layouts[0].is_question:
                problem = "has conversations and other files have questions, or the reverse, and a file has one schema"
                raise DataError(problem, "Prepare them apart; data.train takes several files.", file=file)
            self._note(table, layout)
            num_rows = sum(map(self._add, batches(read_records(table, layout))))
            self._report.files.append(_file("read", file, layout, num_rows))
        if self._errors:
            raise self._refusal(f"{len(self._errors)} rows cannot be used")
        if not self.spool.num_rows:
            reasons = ", ".join(f"{count} {reason}" for reason, count in self._report.counts.items())
            raise DataError(f"no row is left ({reasons})", "Relax the limits.", file=", ".join(self._config.files))

    def _on_bad(self, error: DataError) -> None:
        """Counts an unusable row, or refuses it."""
        if self._config.skip_bad:
            self._report.count(card.UNUSABLE, with_option(error))
        else:
            self._refuse(error)

    def _refuse(self, error: DataError) -> None:
        """Adds the error of a row. Raises BadRowsError if there are enough to show."""
        self._errors.append(with_option(error))
        if len(self._errors) == _MAX_SHOWN:
            raise self._refusal(f"the first {_MAX_SHOWN} rows that cannot be used")

    def _refusal(self, problem: str) -> BadRowsError:
        remedy = "Drop such rows: --skip-bad, and --contaminated drop for those that contain a held-out prompt."
        return BadRowsError(problem, remedy, self._errors)

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

    def _add(self, rows: Sequence[tuple[Place, Record]]) -> int:
        """Spools the rows of a batch that are kept; returns the number of its usable rows."""
        num_usable, kept, texts, words = 0, [], [], []
        for place, record in rows:
            try:
                lengths = self._lengths(place, record)
            except DataError as error:
                self._on_bad(error)
                continue
            num_usable += 1
            text = _compared_text(record)
            split = tokens(text)
            if not self._is_outside(place, record, *lengths) and not self._is_contaminated(place, record, split):
                kept.append((place, record, *lengths))
                texts.append(text)
                words.append(split)
        if kept:
            self._spool(kept, texts, words)
        return num_usable

    def _spool(self, rows: Sequence[tuple[Place, Record, int, int]], texts: list[str], words: list[list[str]]) -> None:
        """Adds rows, their normalized prompts and the tokens of these."""
        records = [record for _, record, *_ in rows]
        contexts = [_context(record) for record in records]
        keys: dict[str, NDArray[Any]] = {
            "content": digests(map(json_text, records)),
            "text": digests(texts),
            "prompt": digests(map("\n".join, zip(texts, contexts, strict=True))),
            "ground_truth": digests(record["ground_truth"] or "" for record in records),
            "prompt_length": np.array([length for *_, length, _ in rows], np.uint32),
            "response_length": np.array([length for *_, length in rows], np.uint32),
        }
        if self._near:
            must_agree = map("\n".join, zip(map(numbers_and_operators, texts), contexts, strict=True))
            keys["bands"] = self._near.keys(words, list(must_agree))
        self.spool.add(records, [place for place, *_ in rows], keys)

    def _lengths(self, place: Place, record: Record) -> tuple[int, int]:
        """Lengths of prompt and response, as the apps count them. Raises DataError for what the template refuses."""
        messages, response = prompt_of(record), response_of(record)
        if self._renderer is None:
            return len(text_of(messages)), len(response)
        prompt = self._renderer(messages, json.loads(record["tools"] or "[]"), place)
        (response_ids,) = encode([response], self._renderer.tokenizer, add_special_tokens=False)
        return len(self._renderer.encode([prompt])[0]), len(response_ids)

    def _is_outside(self, place: Place, record: Record, prompt_length: int, response_length: int) -> bool:
        """Counts a row that is too short or too long; False for others."""
        config = self._config
        for reason, length, shortest, longest in (
            (card.SHORT_PROMPT, prompt_length, config.min_prompt_length, None),
            (card.LONG_PROMPT, prompt_length, 0, config.max_prompt_length),
            (card.LONG_RESPONSE, response_length, 0, config.max_response_length),
        ):
            if length < shortest or (longest is not None and length > longest):
                self._report.count(reason, place, text_of(prompt_of(record)), f"{length} {self._report.unit}")
                return True
        return False

    def _is_contaminated(self, place: Place, record: Record, words: Sequence[str]) -> bool:
        """Counts a row that contains a held-out prompt; True if it is dropped for it."""
        contained = self._held_out.contained(words)
        if contained is None:
            return False
        other = f"{contained[1]:.0%} of {self._held_out_places[contained[0]]}"
        if self._config.contaminated == "refuse":
            self._refuse(place.error(f"contains a held-out prompt: {other}", "Drop the row."))
        is_kept = self._config.contaminated == "keep"
        reason = card.CONTAMINATED_KEPT if is_kept else card.CONTAMINATED
        self._report.count(reason, place, text_of(prompt_of(record)), other)
        return not is_kept


def _compared_text(record: Record) -> str:
    """The normalized prompt without system messages, which many rows share."""
    return normalized(text_of(message for message in prompt_of(record) if message["role"] != "system"))


def _context(record: Record) -> str:
    """System messages and tools; prompts of different contexts are no duplicates."""
    return json_text([message for message in prompt_of(record) if message["role"] == "system"] + [record["tools"]])


def _file(use: str, name: str, layout: Layout, num_rows: int) -> File:
    path = Path(name) if Path(name).exists() else Path(name.rpartition(":")[0])  # folder:split
    return File(use, name, layout.name, num_rows, *fingerprint(path))
