"""First pass: rows become samples of the training schema, which wait in a `Spool` with their keys, or are dropped."""

import hashlib
import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from ..errors import DataError
from ..files.opening import open_table
from ..files.table import Place, Table
from ..rows import left_out
from .config import PrepareConfig, with_options
from .layouts import Layout, Sample, find_layout, read_samples
from .lengths import Measure, Measured
from .minhash import SHINGLE, band_keys, choose_bands
from .overlap import HeldOut
from .report import (
    CONTAMINATED,
    CONTAMINATED_KEPT,
    LONG_PROMPT,
    LONG_RESPONSE,
    SHORT_PROMPT,
    UNUSABLE,
    Example,
    Input,
    Removed,
)
from .spool import Spool
from .text import NGrams, combined, digests, normalized, numbers_and_operators, tokens

_logger = logging.getLogger(__name__)
_BATCH_ROWS, _BATCH_CHARACTERS = 4096, 4 << 20
_MAX_SHOWN = 20
_PROGRESS_S = 10.0
"""Time between two lines about the number of rows read."""


class BadRows:
    """Takes the errors of rows. Raises DataError that lists the first 20 of them, unless they are to be skipped."""

    def __init__(self, removed: Removed, *, skip: bool, remedy: str) -> None:
        self._removed, self._skip, self._remedy = removed, skip, remedy
        self._errors: list[DataError] = []

    def __call__(self, error: DataError) -> None:
        if self._skip:
            self._removed.add(UNUSABLE, Example("", with_options(str(error))))
            return
        self._errors.append(error)
        if len(self._errors) == _MAX_SHOWN:
            raise self._refusal(f"the first {_MAX_SHOWN} rows that cannot be used")

    def finish(self) -> None:
        """Raises DataError if there were any."""
        if self._errors:
            raise self._refusal(f"{len(self._errors)} rows cannot be used" if len(self._errors) > 1 else "")

    def _refusal(self, heading: str) -> DataError:
        first, lines = self._errors[0], [with_options(str(error)) for error in self._errors]
        lines = [f"{heading}:", *(f"  {line}" for line in lines)] if heading else lines
        return DataError("\n".join([*lines, self._remedy]), file=first.file, row=first.row, column=first.column)


class Reader:
    """Reads files into a spool. All of them have questions, or all have conversations."""

    def __init__(self, config: PrepareConfig, spool: Spool) -> None:
        """Reads the held-out files. Raises DataError, and ModelFolderError for the tokenizer."""
        self.spool, self.removed, self.notes = spool, Removed(), list[str]()
        self.measure = Measure(config.tokenizer)
        self.files: list[str] = []
        self._config = config
        self._bad = BadRows(self.removed, skip=config.skip_bad, remedy="Or drop all such rows: --skip-bad.")
        self._leaks = BadRows(self.removed, skip=False, remedy="Or drop them: --contaminated drop.")
        self.bands = choose_bands(config.similarity) if config.duplicates == "near" else None
        self._is_question: bool | None = None
        self._progress_at = time.monotonic()
        self.held_out_inputs = list[Input]()
        self._held_out_places = list[Place]()
        self._held_out = self._read_held_out() if config.held_out else None

    def read(self, file: str) -> Input:
        """Read a file. Raises DataError for one that cannot be used."""
        table = open_table(file, self._bad)
        layout = find_layout(table, self._config)
        if self._is_question not in (None, layout.is_question):
            what = "has conversations and other files have questions, or the reverse, and a file has one schema"
            raise DataError(f"{file}: {what}. Prepare them apart; data.train takes several files.", file=file)
        self._is_question = layout.is_question
        self._note(table, layout)
        self.files.append(file)
        num_rows = 0
        for batch in _batches(read_samples(table, layout)):
            num_rows += self._add(batch)
            if time.monotonic() - self._progress_at >= _PROGRESS_S:
                self._progress_at = time.monotonic()
                _logger.info("%s: %s rows read", file, f"{num_rows:,}")
        return _input(file, layout, num_rows)

    def finish(self) -> None:
        """Raises DataError for the rows that were refused, and if none is left."""
        self._bad.finish()
        self._leaks.finish()
        if not self.spool.num_rows:
            reasons = ", ".join(f"{count} {reason}" for reason, count in self.removed.counts.items())
            raise DataError(f"{', '.join(self.files)}: no row is left ({reasons}). Relax the limits.")

    def _note(self, table: Table, layout: Layout) -> None:
        self.notes.append(f"{table.file}: layout {layout.name}")
        if layout.data_source:
            self.notes.append(f"{table.file}: the data source of rows without one is {layout.data_source}")
        if self._config.extra_columns is None and (reserved := sorted(layout.reserved & {*table.columns})):
            names = ", ".join(map(repr, reserved))
            self.notes.append(f"{table.file}: left out, because the apps would read prompts from them: {names}")
        if line := left_out(table, layout.schema):
            self.notes.append(line.replace("prompt.extra", "the output"))

    def _read_held_out(self) -> HeldOut:
        prompts: list[list[str]] = []
        for file in self._config.held_out:
            table = open_table(file)
            layout = find_layout(table, _for_held_out(self._config, table))
            num_before = len(prompts)
            for sample in read_samples(table, layout):
                prompts.append(tokens(normalized(sample.compared_text)))
                self._held_out_places.append(sample.row.place)
            self.held_out_inputs.append(_input(file, layout, len(prompts) - num_before))
        return HeldOut(prompts, n=self._config.ngram, share=self._config.overlap)

    def _add(self, samples: Sequence[Sample]) -> int:
        """Spool what is left of a batch; return the number of its usable rows."""
        usable = self.measure(samples, self._bad)
        measured = [one for one in usable if not self._is_outside(one)]
        texts = [normalized(sample.compared_text) for sample, _, _ in measured]
        words = list(map(tokens, texts))
        dropped = self._leaking([sample for sample, _, _ in measured], words)
        kept = [index for index in range(len(measured)) if index not in dropped]
        if kept:
            measured = [measured[index] for index in kept]
            self._spool(measured, [texts[index] for index in kept], [words[index] for index in kept])
        return len(usable)

    def _is_outside(self, measured: Measured) -> bool:
        """Whether the row is too short or too long; counts it if so."""
        sample, prompt_length, response_length = measured
        config, limits = self._config, []
        if prompt_length < config.min_prompt_length:
            limits.append((SHORT_PROMPT, prompt_length))
        if config.max_prompt_length is not None and prompt_length > config.max_prompt_length:
            limits.append((LONG_PROMPT, prompt_length))
        if config.max_response_length is not None and response_length > config.max_response_length:
            limits.append((LONG_RESPONSE, response_length))
        for reason, length in limits[:1]:
            other = f"{length} {self.measure.unit}"
            self.removed.add(reason, Example(str(sample.row.place), sample.prompt_text, other))
        return bool(limits)

    def _leaking(self, samples: Sequence[Sample], words: Sequence[list[str]]) -> set[int]:
        """The samples to drop because they contain a held-out prompt."""
        if self._held_out is None or not samples:
            return set()
        found = self._held_out.found_in(words)
        for index, (prompt, share) in found.items():
            place, other = samples[index].row.place, f"{share:.0%} of {self._held_out_places[prompt]}"
            if self._config.contaminated == "refuse":
                self._leaks(place.error(f"contains a held-out prompt: {other}", "Drop the row."))
            reason = CONTAMINATED_KEPT if self._config.contaminated == "keep" else CONTAMINATED
            self.removed.add(reason, Example(str(place), samples[index].prompt_text, other))
        return set() if self._config.contaminated == "keep" else set(found)

    def _spool(self, measured: Sequence[Measured], texts: Sequence[str], words: Sequence[list[str]]) -> None:
        samples = [sample for sample, _, _ in measured]
        text, context = digests(texts), digests([sample.context for sample in samples])
        keys = {
            "content": digests([sample.content for sample in samples]),
            "text": text,
            "prompt": combined([text, context]),
            "ground_truth": digests([sample.row.ground_truth for sample in samples]),
            "prompt_length": np.array([length for _, length, _ in measured], np.uint32),
            "response_length": np.array([length for _, _, length in measured], np.uint32),
            "has_ground_truth": np.array([bool(sample.row.ground_truth) for sample in samples]),
            "has_response": np.array([sample.response is not None for sample in samples]),
            "file": np.full(len(samples), len(self.files) - 1, np.uint32),
            "number": np.array([sample.row.place.number for sample in samples], np.uint64),
            "is_line": np.array([sample.row.place.is_line for sample in samples]),
        }
        if self.bands is not None:
            must_agree = combined([digests(list(map(numbers_and_operators, texts))), context])
            bands = band_keys(NGrams(words, SHINGLE), must_agree, self.bands)
            keys |= {f"band{number}": band for number, band in enumerate(bands)}
        self.spool.add([sample.record for sample in samples], [sample.row.place for sample in samples], keys)


def _for_held_out(config: PrepareConfig, table: Table) -> PrepareConfig:
    """The configuration with the names of columns, if the held-out table has them."""
    if config.prompt_column in table.columns:
        return replace(config, extra_columns=())
    return replace(
        config, layout="auto", prompt_column=None, response_column=None, ground_truth_column=None, extra_columns=()
    )


def _batches(samples: Iterable[Sample]) -> Iterator[list[Sample]]:
    """Batches of at most 4096 rows and not much more than 4 Mi characters."""
    batch: list[Sample] = []
    num_characters = 0
    for sample in samples:
        batch.append(sample)
        num_characters += len(sample.content)
        if len(batch) == _BATCH_ROWS or num_characters >= _BATCH_CHARACTERS:
            yield batch
            batch, num_characters = [], 0
    if batch:
        yield batch


def _input(file: str, layout: Layout, num_rows: int) -> Input:
    num_bytes, sha256 = fingerprint(file)
    return Input(file=file, layout=layout.name, num_rows=num_rows, num_bytes=num_bytes, sha256=sha256)


def fingerprint(file: str) -> tuple[int, str]:
    """Size in bytes and SHA-256 of a file; of a folder, of the names and hashes of its files."""
    path = Path(file)
    if not path.exists():  # folder:split
        path = Path(file.rpartition(":")[0])
    if not path.is_dir():
        with path.open("rb") as stream:
            return path.stat().st_size, hashlib.file_digest(stream, "sha256").hexdigest()
    whole, num_bytes = hashlib.sha256(), 0
    for child in sorted(child for child in path.rglob("*") if child.is_file()):
        size, sha256 = fingerprint(str(child))
        whole.update(f"{child.relative_to(path)} {sha256}\n".encode())
        num_bytes += size
    return num_bytes, whole.hexdigest()
