"""The passes of `prepare_data`: rows and their hashes go into a `datasets.Dataset` on the disk, are selected, written.

A row is JSON text there, so that the columns have the same types whatever the values. The files are read by our own
readers, because those of `datasets` convert texts that look like dates, and their errors name no row.
"""

import importlib.util
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from ..errors import DataConfigError, DataError
from ..files.opening import open_table
from ..files.table import first_line, refuse
from .card import DUPLICATE, HELD_OUT, MAX_EXAMPLES, UNUSABLE, File, Report, card
from .config import PrepareConfig
from .duplicates import HeldOut, NearDuplicates, digest, firsts, normalized, numbers_and_operators, tokens
from .layouts import MEANINGFUL, Record, find_layout, json_text, prompt_of, read_records, text_of

_TEXTS = ("question", "answer", "ground_truth", "data_source")


def prepare_data(config: PrepareConfig, *, command: str = "") -> Report:
    """Write training and validation files and their data card to `config.out`; return the report that the card shows.

    The card gives `command` to repeat this. Raises DataConfigError if datasketch is not installed; DataError for files,
    or without `skip_bad` rows, that cannot be used, without rows for training or validation, and if `out` exists.
    """
    if importlib.util.find_spec("datasketch") is None:
        raise DataConfigError("datasketch is not installed", remedy="pip install 'datasketch>=2'")
    out, report = Path(config.out), Report()
    if not config.overwrite and (out.is_file() or (out.is_dir() and any(out.iterdir()))):
        raise DataError("exists", "Give another --out, or replace its files: --overwrite.", file=str(out))
    out.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as temporary:
        rows = _stored_rows(config, report, temporary)
        masks = _selection(rows, config, report)
        schema = _schema(rows, sum(masks.values()), report)
        for name, mask in masks.items():
            _write(rows.select(np.flatnonzero(mask)), schema, Path(temporary, name), report)
        Path(temporary, "card.md").write_text(card(report, command), encoding="utf-8")
        out.mkdir(exist_ok=True)
        (out / "val.parquet").unlink(missing_ok=True)
        for name in (*masks, "card.md"):
            Path(temporary, name).rename(out / name)
    return report


# --------------------------------------------------------------------- reading


def _stored_rows(config: PrepareConfig, report: Report, folder: str) -> Any:
    """A `datasets.Dataset` of all rows and their hashes, in a folder. Raises what `_rows` raises."""
    from datasets import Dataset, Features, List, Value
    from datasets.exceptions import DatasetGenerationError

    text = Value("large_string")
    features = Features({"place": text, "record": text, "hashes": List(Value("int64"))})
    try:
        arguments = {"config": config, "report": report}
        return Dataset.from_generator(_rows, features, folder, gen_kwargs=arguments, fingerprint="rows")
    except DatasetGenerationError as error:
        raise (error.__cause__ or error) from None


def _rows(config: PrepareConfig, report: Report) -> Iterator[dict[str, Any]]:
    """The rows to select from, with the hashes of the row, of its side, of its prompt and of its near duplicates."""
    on_bad = (lambda error: report.drop(UNUSABLE, error)) if config.skip_bad else refuse
    near = NearDuplicates() if config.duplicates == "near" else None
    held_out, is_question = _read_held_out(config, report), set[bool]()
    for file in config.files:
        table = open_table(file, on_bad)
        layout = find_layout(table, config)
        names = [repr(one) for one in table.columns if one in MEANINGFUL - layout.read or one in table.unusable]
        report.notes.append(f"{file}: layout {layout.name}{'; left out: ' * bool(names)}{', '.join(names)}")
        num_usable = 0
        for place, record in read_records(table, layout):
            num_usable += 1
            text, context = _compared(record)
            words = tokens(text)
            other, share = held_out.contained(words)
            if other:
                report.drop(HELD_OUT, place, text_of(prompt_of(record)), f"{share:.0%} of {other}")
                continue
            is_question.add("question" in record)
            hashes = [digest(json_text(record)), digest(str(config.seed), text), digest(text, context)]
            hashes += near.hashes(words, f"{numbers_and_operators(text)}\n{context}") if near else []
            yield {"place": str(place), "record": json.dumps(record), "hashes": hashes}
        report.files.append(File("read", file, num_usable))
    if len(is_question) != 1:
        files = ", ".join(config.files)
        problem = "questions and conversations, and a file has one schema" if is_question else "no row is left"
        raise DataError(problem, "Prepare them apart; data.train takes several files." * len(is_question), file=files)


def _read_held_out(config: PrepareConfig, report: Report) -> HeldOut:
    held_out = HeldOut()
    for table in map(open_table, config.held_out):
        config = replace(config, extra_columns=())
        if config.prompt_column not in table.columns:
            config = replace(config, prompt_column=None, response_column=None, ground_truth_column=None)
        num_rows = 0
        for num_rows, (place, record) in enumerate(read_records(table, find_layout(table, config)), 1):  # noqa: B007
            held_out.add(str(place), tokens(_compared(record)[0]))
        report.files.append(File("held out", table.file, num_rows))
    return held_out


def _compared(record: Record) -> tuple[str, str]:
    """The normalized prompt without system messages, which many rows share; and these with the tools and images."""
    system = [message for message in prompt_of(record) if message["role"] == "system"]
    text = text_of(message for message in prompt_of(record) if message["role"] != "system")
    return normalized(text), json_text([*system, record["tools"], *record.get("images", ())])


# --------------------------------------------------------------------- writing


def _selection(rows: Any, config: PrepareConfig, report: Report) -> dict[str, Any]:
    """The rows of each file as masks; duplicates are counted and in none. Raises DataError for a file without rows.

    The hash of the normalized prompt splits the rows, so equal prompts are on one side. System messages and tools
    distinguish duplicates, but not the sides.
    """
    hashes = rows.data.column("hashes").combine_chunks().flatten().to_numpy().reshape(len(rows), -1)
    contents, sides, keys = hashes[:, 0], hashes[:, 1], hashes[:, 2:]
    numbers = np.arange(len(rows))
    first = numbers if config.duplicates == "keep" else firsts(keys, contents)
    is_kept, validation = first == numbers, sides.view(np.uint64) < config.validation * 2.0**64
    for row in np.flatnonzero(~is_kept)[:MAX_EXAMPLES].tolist():
        report.drop(DUPLICATE, *_shown(rows[row]), "against:", *_shown(rows[int(first[row])]))
    report.counts[DUPLICATE] = int((~is_kept).sum())
    masks = {"train.parquet": is_kept & ~validation}
    masks |= {"val.parquet": is_kept & validation} if config.validation else {}
    for name, mask in masks.items():
        if not mask.any():
            problem = f"{name} would have none of the {is_kept.sum()} rows with --validation={config.validation}"
            remedy = "Give another share or --seed, more rows, or --validation 0, which writes train.parquet alone."
            raise DataError(problem, remedy, file=config.out)
    return masks


def _shown(row: dict[str, Any]) -> tuple[str, str]:
    return row["place"], text_of(prompt_of(json.loads(row["record"])))


def _records(rows: Any) -> Iterator[list[Record]]:
    for batch in rows.iter(4096):
        yield list(map(json.loads, batch["record"]))


def _schema(rows: Any, mask: Any, report: Report) -> Any:
    """The `pyarrow.Schema` of the rows of a mask. Raises DataError for a column with values of different types."""
    import pyarrow as pa

    schema = pa.schema([])
    for records in _records(rows.select(np.flatnonzero(mask))):
        for name in dict.fromkeys(name for record in records for name in record):
            try:
                type_ = pa.string() if name in _TEXTS else pa.array([record.get(name) for record in records]).type
                schema = pa.unify_schemas([schema, pa.schema([(name, type_)])], promote_options="permissive")
            except (pa.ArrowException, OverflowError, ValueError, TypeError) as error:
                problem = f"column {name!r} has values of different types ({first_line(error)}), as parquet cannot"
                remedy = "Write them as text, or leave the column out: --extra-columns names those to keep."
                raise DataError(problem, remedy, column=name) from error
    stored = [field for field in schema if field.type != pa.null() and "struct<>" not in str(field.type)]
    empty = sorted({*schema.names} - {field.name for field in stored} - MEANINGFUL)
    report.notes += [f"left out, because it is empty in every row: {name!r}" for name in empty]
    return pa.schema(stored)


def _write(rows: Any, schema: Any, path: Path, report: Report) -> None:
    """Write a parquet file, and add it to the report."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    with pq.ParquetWriter(path, schema, compression="zstd") as file:
        for records in _records(rows):
            file.write_table(pa.Table.from_pylist(records, schema=schema))
            report.num_ground_truths += sum(record["ground_truth"] is not None for record in records)
            report.num_responses += sum(bool(record.get("answer") or record.get("messages")) for record in records)
            report.data_sources.update(record["data_source"] or "(none)" for record in records)
    report.files.append(File("written", path.name, len(rows)))
