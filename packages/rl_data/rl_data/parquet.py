"""Parquet reader for the GSM8K and verl schemas. Errors name file, row, column and remedy.

The columns of each file determine its schema:

- GSM8K: string columns `question` and `answer`, the answer ending in `#### n`; optionally `data_source`.
- verl: `prompt` (chat messages, or plain text), `reward_model` with a field `ground_truth`, `data_source`.

Rows are counted from 0, as in pandas and pyarrow.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from .errors import DataError, UnknownDataSourceError
from .scoring import clean_number, reward_for

GSM8K_DATA_SOURCE = "openai/gsm8k"
Schema = Literal["gsm8k", "verl"]
Message = dict[str, str]

_SCHEMA_HELP = (
    "Expected either `question` and `answer` (GSM8K) or `prompt`, `reward_model` and `data_source` (verl); "
    "rename the columns of the file."
)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One row before tokenization: the conversation, the right answer, and the data source that selects the reward."""

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
    if not path.exists():
        raise DataError(f"{name}: no such file. Check the path; relative paths start at {Path.cwd()}.", file=name)
    if path.is_dir():
        found = sorted(child.name for child in path.glob("*.parquet"))
        hint = f"it contains {', '.join(found[:5])}" if found else "it contains no parquet file"
        raise DataError(f"{name}: is a folder ({hint}). Give the parquet files themselves.", file=name)
    if path.stat().st_size == 0:
        raise DataError(f"{name}: the file is empty (0 bytes). Write or copy it again.", file=name)
    try:
        parquet = pq.ParquetFile(path)
    except (pa.ArrowException, OSError) as error:
        raise DataError(
            f"{name}: cannot be read as parquet ({str(error).splitlines()[0]}). Convert it to parquet, or copy it "
            "again if it is incomplete.",
            file=name,
        ) from error
    if parquet.metadata.num_rows == 0:
        raise DataError(f"{name}: the file has no rows. Give a file with at least one.", file=name)
    return parquet


def require_columns(parquet: Any, file: str | Path, columns: Sequence[str], help_text: str) -> None:
    """Raise DataError, naming the columns found, if one of `columns` is missing."""
    found = parquet.schema_arrow.names
    for column in columns:
        if column not in found:
            raise DataError(
                f"{file}: column {column!r} is missing; the columns found are {', '.join(found)}. {help_text}",
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
    return question_row(file, index, question, ground_truth, row.get("data_source") or GSM8K_DATA_SOURCE)


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
    if ground_truth is None or not str(ground_truth).strip():
        what = "no answer in its field 'ground_truth'"
        raise row_error(file, index, "reward_model", what, "Fill it in or drop the row.")
    if not row["data_source"]:
        raise row_error(file, index, "data_source", "empty", f"Name one, such as {GSM8K_DATA_SOURCE}.")
    return Row(
        file=file,
        row=index,
        messages=tuple(messages),
        ground_truth=str(ground_truth).strip(),
        data_source=row["data_source"],
        is_question=False,
    )


def _shorten(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def iter_rows(file: str | Path) -> Iterator[Row]:
    """The rows of the file in order, read one record batch at a time. Raises DataError at the first unusable row."""
    parquet = open_parquet(file)
    schema = _schema(parquet, file)
    wanted = ("question", "answer", "data_source") if schema == "gsm8k" else ("prompt", "reward_model", "data_source")
    columns = [name for name in wanted if name in parquet.schema_arrow.names]
    parse = _gsm8k_row if schema == "gsm8k" else _verl_row
    index = 0
    for batch in parquet.iter_batches(batch_size=4096, columns=columns):
        for row in batch.to_pylist():
            yield parse(str(file), index, row)
            index += 1


def check_files(files: Sequence[str | Path], *, any_source: bool = False) -> int:
    """Read every file once, without tokenizer or torch, and return the number of rows.

    Call it before any process starts. Raises DataError for a file that is missing, empty or not parquet, for a missing
    column (naming those found), for the first row without a question or an answer, and for the first row whose
    `data_source` has no scoring function (unless `any_source`: the caller scores all sources itself).
    """
    num_rows = 0
    for file in files:
        for row in iter_rows(file):
            try:
                if not any_source:
                    reward_for(row.data_source)
            except UnknownDataSourceError as error:
                raise DataError(
                    f"{file}: row {row.row} (counted from 0): {error}",
                    file=str(file),
                    row=row.row,
                    column="data_source",
                ) from error
            num_rows += 1
    return num_rows
