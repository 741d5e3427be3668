"""Rows of a data file before tokenization: conversation, tools, ground truth, data source and other columns.

The columns of each file determine its schema:

- GSM8K: text columns `question` and `answer`, the answer ending in `#### n`; optionally `data_source`. With a column
  `ground_truth`, that is the answer, taken as it is; `python -m rl_data prepare` writes such files.
- verl: `prompt` (chat messages, or text), `reward_model` with a field `ground_truth`, `data_source`.
- any other: `prompt` or `messages`, and `ground_truth` if there is one; or the names in `DataConfig.columns`.
"""

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from functools import cached_property
from typing import Any

from plinth_base.errors import listed, shown

from .config import DataConfig
from .errors import DataError
from .files.table import Place, Table, first_line, parse_json, why_not_json
from .images import content_of, take_images

GSM8K_DATA_SOURCE = "openai/gsm8k"
Message = Mapping[str, Any]
"""A chat message as templates take it: `role`, `content`, and fields of its role such as `tool_calls`."""
Tool = Mapping[str, Any]
"""The JSON schema of a function, as templates take it."""

IMAGES = "images"
MEDIA_COLUMNS = ("videos", "audios")
COLUMNS_HELP = (
    "Expected either `question` and `answer` (GSM8K) or `prompt`, `reward_model` and `data_source` (verl); rename the "
    "columns of the file."
)
_FILL_IN = "Fill it in or drop the row."


@dataclass(frozen=True, kw_only=True)
class Row:
    """One row. `ground_truth` is text, JSON text of a list or struct, and empty if the row has none."""

    place: Place
    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    ground_truth: str = ""
    data_source: str = ""
    extra: Mapping[str, Any] = field(default_factory=dict)
    images: tuple[str, ...] = ()
    """Files, in the order of their places in the messages."""
    is_question: bool
    """True for a text that `DataConfig.question_template` applies to."""


@dataclass(frozen=True, kw_only=True)
class Schema:
    """The columns of a table that hold the parts of a row."""

    prompt: str
    is_question: bool
    """Texts in `prompt` are questions without a template."""
    ground_truth: tuple[str, ...]
    """A column and the fields in it; the column may be missing from the table."""
    is_solution: bool
    """The ground truth is what follows the last "####"."""
    data_source: str | None
    tools: str | None
    images: str
    """The table may lack it."""
    extra: tuple[str, ...] | None
    """None: every column that no other field names."""

    @cached_property
    def used(self) -> set[str]:
        """The columns that are not extra unless they are named."""
        optional = filter(None, (self.data_source, self.tools))
        return {self.prompt, self.ground_truth[0], self.images, *optional}

    def column_of(self, _: Collection[str]) -> str:
        """The column of all characters of a prompt."""
        return self.prompt


def find_schema(table: Table, config: DataConfig) -> Schema:
    """The schema of a table. Raises DataError for a column that is missing, occurs twice, or cannot be extra."""
    columns, names = config.columns, table.columns
    prompt = columns.prompt or _prompt_column(names)
    is_gsm8k = prompt == "question" and columns.ground_truth is None and "ground_truth" not in names
    named = filter(None, (columns.data_source, columns.tools, columns.images))
    required = [prompt, *named, *(config.extra_columns or ())]
    if columns.ground_truth is not None:
        path = columns.ground_truth
        truth = (path,) if path in names else tuple(path.split("."))  # a column of this whole name comes first
        required.append(truth[0])
    elif is_gsm8k:
        truth = ("answer",)
    else:
        truth = ("ground_truth",) if "ground_truth" in names and "reward_model" not in names else _VERL_GROUND_TRUTH
    schema = Schema(
        prompt=prompt,
        is_question=prompt == "question" or columns.prompt is not None,
        ground_truth=truth,
        is_solution=is_gsm8k,
        data_source=columns.data_source or ("data_source" if "data_source" in names else None),
        tools=columns.tools or ("tools" if "tools" in names else None),
        images=columns.images or IMAGES,
        extra=config.extra_columns,
    )
    table.require([*required, *(schema.used & set(names))], COLUMNS_HELP, setting="data.columns")
    for column in config.extra_columns or ():
        if column in table.unusable:
            problem = f"column {column!r} {table.unusable[column]}, which JSON does not have"
            raise DataError(problem, "Convert it.", file=table.file, column=column, setting="data.extra_columns")
    return schema


_VERL_GROUND_TRUTH = ("reward_model", "ground_truth")


def _prompt_column(names: Sequence[str]) -> str:
    """The column of prompts; one that the table lacks if it has none of them."""
    if "question" in names and not {"prompt", "reward_model"} <= set(names):
        return "question"
    if "prompt" in names:
        return "prompt"
    if "messages" in names:
        return "messages"
    return "question" if "answer" in names else "prompt"


def left_out(table: Table, schema: Schema) -> str:
    """The columns that are not in `extra` because JSON cannot hold them, with reasons; empty if there are none."""
    names = [name for name in table.unusable if name not in schema.used] if schema.extra is None else []
    return listed((f"{name!r} ({table.unusable[name]})" for name in names), most=10)


def read_rows(table: Table, schema: Schema) -> Iterator[Row]:
    """The rows of the table in order. Raises DataError at the first unusable one."""
    for place, row in raw_rows(table, schema):
        yield parse_row(place, row, schema)


def raw_rows(table: Table, schema: Schema, texts: Collection[str] = ()) -> Iterator[tuple[Place, dict[str, Any]]]:
    """The columns that `parse_row` needs of each row, and `texts`. Raises DataError for a row that cannot be read."""
    needed = (schema.used | {*MEDIA_COLUMNS, *texts}) & set(table.columns)
    columns: set[str] | None = needed | set(schema.extra or ())
    if schema.extra is None:
        columns = None if needed.isdisjoint(table.unusable) else needed | set(table.columns) - set(table.unusable)
    yield from table.rows(columns, text=needed)


def parse_row(place: Place, row: Mapping[str, Any], schema: Schema) -> Row:
    """A row from its columns. Raises DataError if it is unusable."""
    refuse_media(place, row)
    if schema.prompt not in row:
        raise place.error("the column is missing", _FILL_IN, column=schema.prompt)
    prompt = row[schema.prompt]
    tools = row.get(schema.tools) if schema.tools else None
    messages, images = take_images(place, _prompt(place, prompt, schema), row, schema.images)
    return Row(
        place=place,
        messages=messages,
        images=images,
        tools=tools_of(place, tools, schema.tools or ""),
        ground_truth=_ground_truth(place, row, schema),
        data_source=_data_source(place, row, schema),
        extra=_extra(place, row, schema),
        is_question=schema.is_question and isinstance(prompt, str),
    )


def refuse_media(place: Place, row: Mapping[str, Any]) -> None:
    """Raises DataError for a row with media other than images."""
    for column in MEDIA_COLUMNS:
        if row.get(column):
            problem = "the prompt has media other than images"
            raise place.error(problem, "Drop the row, or draw a video as images.", column=column)


def _prompt(place: Place, prompt: Any, schema: Schema) -> tuple[Message, ...]:
    if schema.prompt == "question" and not isinstance(prompt, str):
        raise place.error("no question", _FILL_IN, column=schema.prompt)
    if isinstance(prompt, str) and prompt.strip():
        return ({"role": "user", "content": prompt},)
    messages = conversation(place, prompt, schema.prompt)
    if messages[-1]["role"] == "assistant":
        problem = "the conversation ends with an assistant's message"
        raise place.error(problem, "Drop that message: the response takes its place.", column=schema.prompt)
    return messages


def conversation(place: Place, value: Any, column: str) -> tuple[Message, ...]:
    """The messages of a column. Raises DataError if there are none, or one is invalid."""
    if not value or (isinstance(value, str) and not value.strip()):
        raise place.error("no question" if column == "question" else "no messages", _FILL_IN, column=column)
    if not isinstance(value, list):
        problem = f"neither text nor a list of messages: {shown(value)}"
        raise place.error(problem, "Give text, or messages with 'role' and 'content'.", column=column)
    return tuple(_message(place, message, column) for message in value)


def _message(place: Place, message: Any, column: str) -> Message:
    """A message without fields that are null."""
    if isinstance(message, dict):
        fields = {key: value for key, value in message.items() if value is not None}
        message = _without_nulls(fields) if place.is_padded else fields
    is_call = isinstance(message, dict) and message.get("role") == "assistant" and bool(message.get("tool_calls"))
    if isinstance(message, dict) and isinstance(message.get("content"), list):
        message = {**message, "content": content_of(place, message["content"], column)}
        if isinstance(message["content"], list):
            return {**_message(place, {**message, "content": ""}, column), "content": message["content"]}
    texts = ("role",) if is_call and "content" not in message else ("role", "content")
    if not isinstance(message, dict) or not all(isinstance(message.get(key), str) for key in texts):
        problem = f"a message without text in 'role' or 'content': {shown(message)}"
        raise place.error(problem, "Each message needs both.", column=column)
    if why := why_not_json(message):
        raise place.error(f"a message with {why}", "Fix it or drop the row.", column=column)
    return {"content": ""} | message if is_call else message


def tools_of(place: Place, value: Any, column: str) -> tuple[Tool, ...]:
    """The tools of a row. Raises DataError unless they are a list of JSON schemas."""
    is_padded = place.is_padded and not isinstance(value, str)
    if isinstance(value, str) and value:
        try:
            value = parse_json(value)
        except ValueError as error:
            problem = f"no list of tools: {first_line(error)}"
            raise place.error(problem, "Give a list of JSON schemas, or its JSON text.", column=column) from error
    tools = _without_nulls(value) if is_padded and value else value or []
    if not isinstance(tools, list) or not all(isinstance(tool, dict) and tool for tool in tools):
        raise place.error(f"no list of tools: {shown(value)}", "Give a list of JSON schemas.", column=column)
    if why := why_not_json(tools):
        raise place.error(f"a tool with {why}", "Fix it or drop the row.", column=column)
    return tuple(tools)


def _without_nulls(value: Any) -> Any:
    """A copy without the keys whose value is None."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def _ground_truth(place: Place, row: Mapping[str, Any], schema: Schema) -> str:
    """The answer as text, empty if there is none."""
    column, *fields = schema.ground_truth
    value = row.get(column)
    for name in fields:
        if value is None:
            return ""
        if not isinstance(value, dict) or name not in value:
            problem = f"{shown(value)}; it must be a struct with a field {name!r}"
            raise place.error(problem, "Fix the row.", column=column, setting="data.columns.ground_truth")
        value = value[name]
    text = _solution(value) if schema.is_solution else ground_truth_text(value)
    if text is not None:
        return text
    if schema.is_solution:
        problem, remedy = f"no answer; found {shown(value)}", "It must end in '#### n'; fill it in or drop the row."
        as_it_is = f"data.columns.ground_truth={column}"
        raise place.error(problem, remedy, column=column, setting=as_it_is)
    problem = f"its field {fields[-1]!r} is {shown(value)}" if fields else f"no answer: {shown(value)}"
    remedy = "Give text, a finite number, or a list or struct of these; or drop the row."
    raise place.error(problem, remedy, column=column)


def _solution(answer: object) -> str | None:
    """The text after the last `####` without commas and $; None for text without one and for other values."""
    if answer is None or answer == "":
        return ""
    if not isinstance(answer, str):
        return None
    _, marker, text = answer.rpartition("####")
    return text.replace(",", "").replace("$", "").strip() if marker else None


def ground_truth_text(value: Any) -> str | None:
    """The answer as text, empty if there is none; JSON for a list or struct. None for a value that has no text."""
    if value is None or isinstance(value, str):
        return (value or "").strip()
    if isinstance(value, (int, float, Decimal)):
        return None if why_not_json(value) and not isinstance(value, Decimal) else str(value)
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


def _data_source(place: Place, row: Mapping[str, Any], schema: Schema) -> str:
    value = row.get(schema.data_source) if schema.data_source else None
    if value is None:
        return GSM8K_DATA_SOURCE if schema.is_solution else ""
    if not isinstance(value, str):
        problem, remedy = f"no text: {shown(value)}", f"Name one, such as {GSM8K_DATA_SOURCE}."
        raise place.error(problem, remedy, column=schema.data_source)
    return value


def _extra(place: Place, row: Mapping[str, Any], schema: Schema) -> dict[str, Any]:
    names = schema.extra if schema.extra is not None else [name for name in row if name not in schema.used]
    for name in names:
        if name not in row:
            raise place.error("the column is missing", "Write null.", column=name, setting="data.extra_columns")
        if why := why_not_json(row[name]):
            problem = f"{why}, which JSON does not have"
            raise place.error(problem, "Write null or text.", column=name, setting="data.extra_columns")
    return {name: row[name] for name in names}
