"""Parquet reader for the GSM8K and verl schemas. Errors name file, row, column and remedy.

The columns of each file determine its schema:

- GSM8K: string columns `question` and `answer`, the answer ending in `#### n`; optionally `data_source`.
- verl: `prompt` (chat messages, or plain text), `reward_model` with a field `ground_truth`, `data_source`.

Rows are counted from 0, as in pandas and pyarrow.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from stat import S_ISDIR, S_ISREG
from typing import Any, Literal

from .errors import DataError, UnknownDataSourceError
from .rewards.gsm8k import clean_number
from .rewards.registry import reward_for

GSM8K_DATA_SOURCE = "openai/gsm8k"
Schema = Literal["gsm8k", "verl"]
Message = dict[str, str]

_SCHEMA_HELP = (
    "Expected either `question` and `answer` (GSM8K) or `prompt`, `reward_model` and `data_source` (verl); "
    "rename the columns of the file."
)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One row before tokenization: the conversation, the right answer, and the data source that selects the reward.

    `ground_truth` is text; of a list (accepted answers) or a struct it is the JSON text.
    """

    file: str
    row: int
    messages: tuple[Message, ...]
    ground_truth: str
    data_source: str
    #: True for GSM8K rows, whose only message is the question without a template.
    is_question: bool


def open_parquet(file: str | Path) -> Any:
    """Open a parquet file (a `pyarrow.parquet.ParquetFile`). Raises DataError if it cannot be read or has no rows."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    path, name = Path(file), str(file)
    try:
        status = path.stat()
    except (OSError, ValueError) as error:
        why = "no such file" if isinstance(error, FileNotFoundError) else getattr(error, "strerror", "") or error
        what = f"{name}: {why}. Check the path; relative paths start at {Path.cwd()}."
        raise DataError(what, file=name) from None
    if not name:
        raise DataError("an empty file name was given. Name a parquet file, or give an empty list: [].", file=name)
    if S_ISDIR(status.st_mode):
        found = sorted(child.name for child in path.glob("*.parquet"))
        hint = f"it contains {', '.join(found[:5])}" if found else "it contains no parquet file"
        raise DataError(f"{name}: is a folder ({hint}). Give the parquet files themselves.", file=name)
    if not S_ISREG(status.st_mode):
        raise DataError(f"{name}: is a device, pipe or socket. Give a regular file.", file=name)
    if status.st_size == 0:
        raise DataError(f"{name}: the file is empty (0 bytes). Write or copy it again.", file=name)
    try:
        parquet = pq.ParquetFile(path)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise DataError(
            f"{name}: cannot be read as parquet ({_first_line(error)}). Convert it to parquet, or copy it "
            "again if it is incomplete.",
            file=name,
        ) from error
    if parquet.metadata.num_rows == 0:
        raise DataError(f"{name}: the file has no rows. Give a file with at least one.", file=name)
    return parquet


def require_columns(parquet: Any, file: str | Path, columns: Sequence[str], help_text: str) -> None:
    """Raise DataError, naming the columns found, if one of `columns` is missing or occurs twice."""
    found = parquet.schema_arrow.names
    for column in columns:
        if found.count(column) > 1:
            what = f"{file}: column {column!r} occurs {found.count(column)} times. Rename or drop all but one."
            raise DataError(what, file=str(file), column=column)
        if column not in found:
            raise DataError(
                f"{file}: column {column!r} is missing; the columns found are {', '.join(found)[:1000]}. {help_text}",
                file=str(file),
                column=column,
            )


def _schema(parquet: Any, file: str | Path) -> Schema:
    """The schema of the file. Raises DataError if it has neither."""
    import pyarrow as pa

    names = parquet.schema_arrow.names
    if "question" in names and not {"prompt", "reward_model"} <= set(names):
        require_columns(parquet, file, ("question", "answer"), _SCHEMA_HELP)
        return "gsm8k"
    if "prompt" not in names and "answer" in names:
        require_columns(parquet, file, ("question",), _SCHEMA_HELP)
    require_columns(parquet, file, ("prompt", "reward_model", "data_source"), _SCHEMA_HELP)
    reward_model = parquet.schema_arrow.field("reward_model").type
    if not pa.types.is_struct(reward_model) or reward_model.get_field_index("ground_truth") < 0:
        raise DataError(
            f"{file}: column 'reward_model' is {reward_model}; it must be a struct with a field 'ground_truth'.",
            file=str(file),
            column="reward_model",
        )
    return "verl"


def _gsm8k_ground_truth(answer: object) -> str | None:
    """The text after the last `####` without commas and $; None if there is none."""
    if not isinstance(answer, str):
        return None
    _, marker, text = answer.rpartition("####")
    return clean_number(text).strip() or None if marker else None


def row_error(file: str, row: int, column: str, what: str, remedy: str) -> DataError:
    """A DataError for one column of one row."""
    message = f"{file}: row {row} (counted from 0), column {column!r}: {what}. {remedy}"
    return DataError(message, file=file, row=row, column=column)


def _gsm8k_row(file: str, index: int, row: Mapping[str, Any]) -> Row:
    question = row["question"]
    if not isinstance(question, str) or not question.strip():
        raise row_error(file, index, "question", "no question", "Fill it in or drop the row.")
    ground_truth = _gsm8k_ground_truth(row["answer"])
    if ground_truth is None:
        what = f"no answer; found {_shorten(row['answer'])}"
        raise row_error(file, index, "answer", what, "It must end in '#### n'; fill it in or drop the row.")
    data_source = row.get("data_source")
    source = GSM8K_DATA_SOURCE if data_source is None else _data_source(file, index, data_source)
    return question_row(file, index, question, ground_truth, source)


def question_row(
    file: str, index: int, question: str, ground_truth: str = "", data_source: str = GSM8K_DATA_SOURCE
) -> Row:
    """A row whose only message is a question without a template."""
    messages = ({"role": "user", "content": question},)
    return Row(
        file=file, row=index, messages=messages, ground_truth=ground_truth, data_source=data_source, is_question=True
    )


def _verl_row(file: str, index: int, row: Mapping[str, Any]) -> Row:
    prompt = row["prompt"]
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    if prompt and not isinstance(prompt, list):
        what = f"neither text nor a list of messages: {_shorten(prompt)}"
        raise row_error(file, index, "prompt", what, "Give text, or messages with 'role' and 'content'.")
    if not prompt:
        raise row_error(file, index, "prompt", "no messages", "Fill it in or drop the row.")
    messages = []
    for message in prompt:
        if not isinstance(message, Mapping) or not all(
            isinstance(message.get(key), str) for key in ("role", "content")
        ):
            what = f"a message without text in 'role' or 'content': {_shorten(message)}"
            raise row_error(file, index, "prompt", what, "Each message needs both.")
        messages.append({"role": message["role"], "content": message["content"]})
    ground_truth = (row["reward_model"] or {}).get("ground_truth")
    text = _ground_truth_text(ground_truth)
    if text is None:
        what = f"its field 'ground_truth' is {_shorten(ground_truth)}"
        remedy = "Give text, a finite number, or a list or struct of these; or drop the row."
        raise row_error(file, index, "reward_model", what, remedy)
    if not text:
        what = "no answer in its field 'ground_truth'"
        raise row_error(file, index, "reward_model", what, "Fill it in or drop the row.")
    return Row(
        file=file,
        row=index,
        messages=tuple(messages),
        ground_truth=text,
        data_source=_data_source(file, index, row["data_source"]),
        is_question=False,
    )


def _ground_truth_text(value: Any) -> str | None:
    """The answer as text, empty if there is none; JSON for a list or struct. None for a value that has no text."""
    if value is None or isinstance(value, str):
        return (value or "").strip()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, (int, float, Decimal)):
        return str(value)
    if not isinstance(value, (list, dict)):
        return None
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, default=_json_number) if value else ""
    except (TypeError, ValueError):  # bytes, dates, nan
        return None


def _json_number(value: Any) -> str:
    if isinstance(value, Decimal):
        return str(value)
    raise TypeError(f"{type(value).__name__} has no JSON text")


def _data_source(file: str, index: int, value: Any) -> str:
    if not isinstance(value, str) or not value:
        what = f"no text: {_shorten(value)}" if value else "empty"
        raise row_error(file, index, "data_source", what, f"Name one, such as {GSM8K_DATA_SOURCE}.")
    return value


def _shorten(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)[:200]


def iter_rows(file: str | Path) -> Iterator[Row]:
    """The rows of the file in order, read one record batch at a time. Raises DataError at the first unusable row."""
    parquet = open_parquet(file)
    schema = _schema(parquet, file)
    wanted = ("question", "answer", "data_source") if schema == "gsm8k" else ("prompt", "reward_model", "data_source")
    columns = [name for name in wanted if name in parquet.schema_arrow.names]
    require_columns(parquet, file, columns, _SCHEMA_HELP)
    parse = _gsm8k_row if schema == "gsm8k" else _verl_row
    for index, row in enumerate(records(parquet, file, columns)):
        yield parse(str(file), index, row)


def records(parquet: Any, file: str | Path, columns: Sequence[str]) -> Iterator[dict[str, Any]]:
    """The rows as Python values, read one record batch at a time.

    Raises DataError for a damaged file, and with row and column for a value that Python cannot hold, such as text that
    is not UTF-8.
    """
    num_read = 0
    batches = parquet.iter_batches(batch_size=4096, columns=list(columns))
    while True:
        try:
            batch = next(batches, None)
        except Exception as error:  # pyarrow raises many kinds for damaged, encrypted and unsupported data
            what = f"{file}: cannot be read after row {num_read} ({_first_line(error)}). Copy it again."
            raise DataError(what, file=str(file)) from error
        if batch is None:
            return
        try:
            rows = batch.to_pylist()
        except Exception as error:
            raise _unreadable_value(batch, str(file), num_read) from error
        yield from rows
        num_read += len(rows)


def _unreadable_value(batch: Any, file: str, first_row: int) -> DataError:
    """The error of the first value of a batch that cannot be converted to Python."""
    for index in range(batch.num_rows):
        for name in batch.schema.names:
            try:
                batch.column(name)[index].as_py()
            except Exception as error:
                what = "text that is not UTF-8" if isinstance(error, UnicodeDecodeError) else _first_line(error)
                return row_error(file, first_row + index, name, what, "Mend the value or drop the row.")
    return DataError(f"{file}: its rows cannot be read. Write the file again.", file=file)


def check_files(files: Sequence[str | Path], *, any_source: bool = False) -> int:
    """Read every file once, without tokenizer or torch, and return the number of rows.

    Call it before any process starts. Raises DataError for a file that is missing, empty or not parquet, for a missing
    column (naming those found), for the first row without a question or an answer, and for the first row whose
    `data_source` has no scoring function or whose answer that function can never score (unless `any_source`: the caller
    scores all sources itself).
    """
    num_rows = 0
    for file in files:
        for row in iter_rows(file):
            try:
                rule = None if any_source else reward_for(row.data_source)
            except UnknownDataSourceError as error:
                what, _, remedy = str(error).partition(". ")
                raise row_error(row.file, row.row, "data_source", what, remedy) from error
            if rule is not None and (what := rule.problem(row.ground_truth, {})):
                column = "answer" if row.is_question else "reward_model"
                remedy = "Mend the answer, drop the row, or score with another reward or a function of your own."
                raise row_error(row.file, row.row, column, what, remedy)
            num_rows += 1
    return num_rows
