"""Layouts of published data sets, and their rows as records of the training schema (docs/data.md lists them)."""

import json
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from ..config import ColumnsConfig, DataConfig
from ..errors import DataError, UnknownDataSourceError
from ..files.table import Place, Table
from ..images import with_markers
from ..messages import as_text, with_arguments
from ..rewards.registry import reward_for
from ..rows import Message, Schema, conversation, find_schema, parse_row, raw_rows
from .config import PrepareConfig

_COLUMNS: dict[str, tuple[str, tuple[str, ...]]] = {
    "question": ("question", ("answer",)),
    "math": ("problem", ("solution",)),
    "chat": ("messages", ()),
    "prompt": ("prompt", ("completion", "response")),
}
"""Layout -> column of the prompt, possible columns of the response."""
MEANINGFUL = {"question", "answer", "messages", "prompt", "completion", "ground_truth", "reward_model"}
MEANINGFUL |= {"data_source", "tools", "images"}
"""Columns that decide how the apps read a file; no other column may have such a name."""
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
Record = dict[str, Any]
"""A row of the training schema: `question` and `answer`, or `prompt` and `messages`; and the columns that all have."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The columns of one table that become the training schema; `response` is None if the conversation has it."""

    name: str
    schema: Schema
    response: str | None
    data_source: str
    read: set[str]


def prompt_of(record: Record) -> list[Message]:
    """The messages of the prompt."""
    return record["prompt"] if "prompt" in record else [{"role": "user", "content": record["question"]}]


def text_of(messages: Iterable[Message]) -> str:
    """The contents of messages, one after another; a message with tool calls as JSON text."""
    return "\n".join(str(message["content"]) or json_text(message) for message in messages)


def json_text(value: Any) -> str:
    """JSON text, which is equal for equal values."""
    return json.dumps(value, ensure_ascii=False, sort_keys=True)


def find_layout(table: Table, config: PrepareConfig) -> Layout:
    """The layout of a table. Raises DataError for a column that is missing, or if no layout fits."""
    name = _layout_name(table, config.prompt_column)
    if config.response_column is not None:
        table.require([config.response_column], "Name one of them: --response-column.")
    response = config.response_column or next((one for one in _COLUMNS[name][1] if one in table.columns), None)
    ground_truth = config.ground_truth_column
    if name == "math" and not ground_truth:  # in `answer` (MATH-500), or boxed in the solution
        ground_truth = "answer" if "answer" in table.columns else response
    columns = ColumnsConfig(prompt=config.prompt_column or _COLUMNS[name][0], ground_truth=ground_truth)
    schema = find_schema(table, DataConfig(columns=columns, extra_columns=config.extra_columns))
    data_source = config.data_source or ("lighteval/MATH" if name == "math" else "")
    read = schema.used | {response or schema.prompt} | ({"prompt", "messages"} if name == "chat" else set())
    return Layout(name=name, schema=schema, response=response, data_source=data_source, read=read)


def _layout_name(table: Table, prompt: str | None) -> str:
    """The layout that the names of the columns show. The values of a named prompt column may be conversations."""
    names = set(table.columns)
    if prompt is not None:
        table.require([prompt], "Name one of them: --prompt-column.")
        return "chat" if prompt == "messages" else "question"
    if "question" in names and not {"prompt", "reward_model"} <= names:
        return "question"
    if {"problem", "solution"} <= names:
        return "math"
    if "messages" in names or "prompt" in names:
        return "chat" if "messages" in names else "prompt"
    problem = f"no known layout; the columns are {', '.join(table.columns)[:1000]}"
    remedy = "Name columns: --prompt-column, --ground-truth-column, --response-column."
    raise DataError(problem, remedy, file=table.file)


def read_records(table: Table, layout: Layout) -> Iterator[tuple[Place, Record]]:
    """The rows of a table in the training schema; `table.on_bad` takes the errors of rows that cannot be used."""
    for place, raw in raw_rows(table, layout.schema, layout.read):
        try:
            record = _record(place, raw, layout)
            _check_scorable(place, record, layout.schema.ground_truth[0])
        except DataError as error:
            table.on_bad(error)
            continue
        yield place, record


def _record(place: Place, raw: dict[str, Any], layout: Layout) -> Record:
    schema, response = layout.schema, None
    if layout.response is None:
        raw, response = _split_chat(place, raw, schema.prompt)
    elif (value := raw.get(layout.response)) not in (None, ""):
        if not isinstance(value, str) or not value.strip():
            raise place.error("the response is no text", "Fill it in or drop the row.", column=layout.response)
        response = {"role": "assistant", "content": value}
    if layout.name == "math" and schema.ground_truth == (layout.response,):
        answer = last_boxed(response["content"]) if response else None
        if not answer:
            remedy = "Put the answer into \\boxed{}, name its column (--ground-truth-column), or drop the row."
            raise place.error("no answer in \\boxed{}", remedy, column=schema.ground_truth[0])
        raw = {**raw, schema.ground_truth[0]: answer}
    row = parse_row(place, raw, schema)
    if row.is_question and layout.name in ("question", "math"):
        record = {"question": row.messages[0]["content"], "answer": response["content"] if response else None}
    else:
        prompt = with_arguments(with_markers(row.messages), as_text)  # a struct would lose their nulls
        record = {"prompt": prompt, "messages": [*prompt, response] if response else None}
    return {
        **record,
        "ground_truth": row.ground_truth or None,
        "data_source": row.data_source or layout.data_source or None,
        **({"images": list(row.images)} if row.images else {}),
        "tools": json.dumps(row.tools, ensure_ascii=False) if row.tools else None,
        **{name: value for name, value in row.extra.items() if name not in layout.read | MEANINGFUL},
    }


def _split_chat(place: Place, raw: dict[str, Any], column: str) -> tuple[dict[str, Any], Message | None]:
    """The row with the conversation up to the response, and the response if there is one."""
    messages: Any = raw.get(column)
    if messages is None and column == "messages":  # as written here for rows without a response
        messages = raw.get("prompt")
    last = messages[-1] if isinstance(messages, list) and messages else None
    if not isinstance(last, dict) or last.get("role") != "assistant":
        return {**raw, column: messages}, None
    (response,) = conversation(place, [last], column)
    if not response["content"].strip() or "tool_calls" in response:
        problem = "the conversation ends with an assistant's message that is no text"
        raise place.error(problem, "Drop that message, or drop the row.", column=column)
    return {**raw, column: messages[:-1]}, response


def last_boxed(text: str) -> str | None:
    """The content of the last `\\boxed{...}` or `\\fbox{...}`, braces balanced; None if there is none."""
    start = max(text.rfind("\\boxed{"), text.rfind("\\fbox{"))
    first, depth = text.find("{", start), 0
    for brace in _BRACE.finditer(text, first) if start >= 0 else ():
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0:
            return text[first + 1 : brace.start()].strip()
    return None


def _check_scorable(place: Place, record: Record, column: str) -> None:
    """Raises DataError if the reward of the row's data source, where one is registered, can never score it."""
    with suppress(UnknownDataSourceError):  # the configuration of the run names the reward
        if problem := reward_for(record["data_source"] or "").problem(record["ground_truth"] or "", record):
            raise place.error(problem, "Fix it, drop the row, or give another --data-source.", column=column)
