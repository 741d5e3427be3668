"""Layouts of published data sets, and their rows as samples of the training schema.

| layout | columns read | columns written |
| --- | --- | --- |
| question | `question`, `answer` ending in `#### n` (GSM8K), or `ground_truth` | `question`, `answer`, `ground_truth` |
| math | `problem`, `solution` with `\\boxed{}`; `answer` if there is one | the same |
| chat | `messages`; the assistant's last message is the response | `prompt`, `messages`, `ground_truth` |
| prompt | `prompt`, `reward_model` or `ground_truth`, `completion` | the same |

All write `data_source`, and `tools` if a row has any.
"""

import json
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from ..config import ColumnsConfig, DataConfig
from ..errors import DataError, UnknownDataSourceError
from ..files.table import Place, Table, while_opening
from ..rewards.base import Reward
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
_MEANINGFUL = {"question", "answer", "messages", "prompt", "completion", "ground_truth", "reward_model"}
_MEANINGFUL |= {"data_source", "tools"}
"""Columns that decide how the apps read a file; no other column may have such a name."""
_MATH_DATA_SOURCE = "lighteval/MATH"
Record = dict[str, Any]
"""A row of the training schema: `question` and `answer`, or `prompt` and `messages`; and the columns that all have."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The columns of one table that become the columns of the training schema."""

    name: str
    schema: Schema
    response: str | None
    """Column of the response; None if the conversation has it."""
    data_source: str
    """Of rows that have none."""

    @property
    def is_question(self) -> bool:
        """Prompts are written as texts in `question`, which the apps' `data.question_template` applies to."""
        return self.name in ("question", "math")

    @cached_property
    def read(self) -> set[str]:
        """The columns that become part of the training schema."""
        columns = self.schema.used | {self.response or self.schema.prompt}
        return columns | {"prompt", "messages"} if self.name == "chat" else columns

    @cached_property
    def reserved(self) -> set[str]:
        """Columns that are left out because of their names."""
        return _MEANINGFUL - self.read


def prompt_of(record: Record) -> list[Message]:
    """The messages of the prompt."""
    return record["prompt"] if "prompt" in record else [{"role": "user", "content": record["question"]}]


def response_of(record: Record) -> str:
    """The text of the response; empty without one."""
    if "question" in record:
        return str(record["answer"] or "")
    return str(record["messages"][-1]["content"]) if record["messages"] else ""


def text_of(messages: Iterable[Message]) -> str:
    """The contents of messages, one after another; a message with tool calls as JSON text."""
    return "\n".join(str(message["content"]) or json_text(message) for message in messages)


def json_text(value: Any) -> str:
    """JSON text, which is equal for equal values."""
    return json.dumps(value, ensure_ascii=False, sort_keys=True)


def find_layout(table: Table, config: PrepareConfig) -> Layout:
    """The layout of a table. Raises DataError for a column that is missing or whose name is reserved."""
    name = _layout_name(table, config) if config.layout == "auto" else config.layout
    if config.response_column is not None:
        table.require([config.response_column], "Name one of them: --response-column.")
    ground_truth = config.ground_truth_column
    if name == "math" and not ground_truth:  # in `answer` (MATH-500), or boxed in the solution
        ground_truth = "answer" if "answer" in table.columns else config.response_column or "solution"
    columns = ColumnsConfig(prompt=config.prompt_column or _COLUMNS[name][0], ground_truth=ground_truth)
    layout = Layout(
        name=name,
        schema=find_schema(table, DataConfig(columns=columns, extra_columns=config.extra_columns)),
        response=config.response_column
        or next((column for column in _COLUMNS[name][1] if column in table.columns), None),
        data_source=config.data_source or (_MATH_DATA_SOURCE if name == "math" else ""),
    )
    if reserved := sorted(layout.reserved & {*(config.extra_columns or ())}):
        problem = f"the column {reserved[0]!r} would change how the apps read the files"
        remedy = "Rename it, or take it out of --extra-columns."
        raise DataError(problem, remedy, file=table.file, column=reserved[0])
    return layout


def _layout_name(table: Table, config: PrepareConfig) -> str:
    """The layout that the names of the columns show; for a named prompt column, its first value."""
    names = set(table.columns)
    if config.prompt_column is not None:
        table.require([config.prompt_column], "Name one of them: --prompt-column.")
        table = replace(table, on_bad=while_opening(table.on_bad))
        first = next((row.get(config.prompt_column) for _, row in table.rows([config.prompt_column])), None)
        return "chat" if isinstance(first, list) else "question"
    if "question" in names and not {"prompt", "reward_model"} <= names:
        return "question"
    if {"problem", "solution"} <= names:
        return "math"
    if "messages" in names or "prompt" in names:
        return "chat" if "messages" in names else "prompt"
    raise DataError(
        f"no known layout; the columns are {', '.join(table.columns)[:1000]}",
        "Known are question (GSM8K), problem and solution (MATH), messages, and prompt; name other columns: "
        "--prompt-column, --ground-truth-column, --response-column.",
        file=table.file,
    )


def read_records(table: Table, layout: Layout) -> Iterator[tuple[Place, Record]]:
    """The rows of a table in the training schema; `table.on_bad` takes the errors of rows that cannot be used."""
    rewards: dict[str, Reward | None] = {}
    for place, raw in raw_rows(table, layout.schema, layout.read):
        try:
            record = _record(place, raw, layout)
            _check_scorable(place, record, layout, rewards)
        except DataError as error:
            table.on_bad(error)
            continue
        yield place, record


def _record(place: Place, raw: dict[str, Any], layout: Layout) -> Record:
    schema, response = layout.schema, None
    if layout.name == "chat":
        raw, response = _split_chat(place, raw, layout)
    elif layout.response is not None and (value := raw.get(layout.response)) not in (None, ""):
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
    if layout.is_question and not row.is_question:
        raise place.error("a list of messages, not a text", "Give --layout chat.", column=schema.prompt)
    if layout.is_question:
        record = {"question": row.messages[0]["content"], "answer": response["content"] if response else None}
    else:
        record = {"prompt": list(row.messages), "messages": [*row.messages, response] if response else None}
    return {
        **record,
        "ground_truth": row.ground_truth or None,
        "data_source": row.data_source or layout.data_source or None,
        "tools": json.dumps(row.tools, ensure_ascii=False) if row.tools else None,
        **{name: value for name, value in row.extra.items() if name not in layout.read and name not in layout.reserved},
    }


def _split_chat(place: Place, raw: dict[str, Any], layout: Layout) -> tuple[dict[str, Any], Message | None]:
    """The row with the conversation up to the response, and the response if there is one."""
    column = layout.schema.prompt
    messages = raw.get(column)
    if messages is None and column == "messages":  # as written here for rows without a response
        messages = raw.get("prompt")
    response = None
    if isinstance(messages, list) and messages and isinstance(messages[-1], dict):
        *before, last = messages
        if last.get("role") == "assistant":
            messages, response = before, conversation(place, [last], column)[0]
    if response is not None and (not response["content"].strip() or "tool_calls" in response):
        problem = "the conversation ends with an assistant's message that is no text"
        raise place.error(problem, "Drop that message, or drop the row.", column=column)
    return {**raw, column: messages}, response


def last_boxed(text: str) -> str | None:
    """The content of the last `\\boxed{...}` or `\\fbox{...}`, braces balanced; None if there is none."""
    start = max(text.rfind("\\boxed{"), text.rfind("\\fbox{"))
    if start < 0:
        return None
    first = text.index("{", start) + 1
    depth, is_escaped = 1, False
    for position in range(first, len(text)):
        character = text[position]
        depth += 0 if is_escaped else (character == "{") - (character == "}")
        is_escaped = character == "\\" and not is_escaped
        if depth == 0:
            return text[first:position].strip()
    return None


def _check_scorable(place: Place, record: Record, layout: Layout, rewards: dict[str, Reward | None]) -> None:
    """Raises DataError if the reward of the row's data source, where one is registered, can never score it."""
    source = record["data_source"]
    if source not in rewards:
        rewards[source] = None
        with suppress(UnknownDataSourceError):  # the configuration of the run names the reward
            rewards[source] = reward_for(source or "")
    reward = rewards[source]
    if reward is not None and (problem := reward.problem(record["ground_truth"] or "", record)):
        column = layout.schema.ground_truth[0]
        raise place.error(problem, "Fix it, drop the row, or give another --data-source.", column=column)
