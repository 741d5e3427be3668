"""Demonstrations for supervised fine-tuning before RL: a prompt and the whole response to it.

A file has the columns `question` and `answer`, or `messages` (and `tools`), whose last message is the assistant's
response. An answer is a text, or a list of texts that alternate between the model and a tool, starting with the model.
The parts are tokenized one by one, as during generation.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .config import DataConfig
from .errors import DataError
from .files.opening import open_table
from .files.table import Place
from .prompts import Renderer, encode, report_filtered, too_long, with_configured
from .rows import Message, Tool, conversation, tools_of
from .tokenizer import TokenizerLike

_HELP = (
    "Demonstrations need the columns `question` and `answer` (the whole response), or `messages`, the last of them the "
    "response; rename the columns."
)
_FILL_IN = "Fill it in or drop the row."


@dataclass(frozen=True, kw_only=True)
class _Row:
    place: Place
    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    parts: list[str]
    is_question: bool


@dataclass(frozen=True)
class Demonstration:
    """One training example; `response_ids` ends with the end-of-sequence token if the last part is the model's."""

    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    response_mask: tuple[bool, ...] | None = None
    """False for response tokens of a tool; None if all tokens are the model's."""


def _parts(answer: Any) -> list[str] | None:
    """The texts of an answer; None if it is not text or starts with an empty one."""
    parts = answer if isinstance(answer, list) else [answer]
    if not parts or not all(isinstance(part, str) for part in parts) or not parts[0].strip():
        return None
    return parts


def _rows(file: str | Path) -> Iterator[_Row]:
    table = open_table(file)
    if "messages" in table.columns and "question" not in table.columns:
        columns = [name for name in ("messages", "tools") if name in table.columns]
        parse = _of_messages
    else:
        columns, parse = ["question", "answer"], _of_question
    table.require(columns, _HELP)
    for place, row in table.rows(columns, text=columns):
        yield parse(place, row)


def _of_question(place: Place, row: dict[str, Any]) -> _Row:
    question, parts = row.get("question"), _parts(row.get("answer"))
    has_question = isinstance(question, str) and bool(question.strip())
    if not has_question or parts is None:
        raise place.error("no text", _FILL_IN, column="answer" if has_question else "question")
    messages = ({"role": "user", "content": question},)
    return _Row(place=place, messages=messages, parts=parts, is_question=True)


def _of_messages(place: Place, row: dict[str, Any]) -> _Row:
    *messages, response = conversation(place, row.get("messages"), "messages")
    if response["role"] != "assistant" or not response["content"].strip() or "tool_calls" in response or not messages:
        what = "the conversation does not end with an assistant's text that answers another message"
        raise place.error(what, "Drop the messages after it, or drop the row.", column="messages")
    return _Row(
        place=place,
        messages=tuple(messages),
        tools=tools_of(place, row.get("tools"), "tools"),
        parts=[response["content"]],
        is_question=False,
    )


def check_demonstrations(files: Sequence[str | Path]) -> int:
    """Read every file once, without a tokenizer, and return the number of rows.

    Raises DataError for a file that is missing, empty or damaged, for a missing column, and for a row without text.
    """
    return sum(1 for file in files for _ in _rows(file))


def load_demonstrations(
    files: Sequence[str | Path], tokenizer: TokenizerLike, config: DataConfig
) -> list[Demonstration]:
    """The demonstrations of all files, in order. Prompts are identical to those of `load_prompts`.

    `config.overlong` decides whether overlong prompts are dropped or raise. Raises DataError naming file, row, column
    and remedy.
    """
    if not files:
        raise DataError("no files were given. Name at least one.")
    renderer = Renderer(tokenizer, config)
    end = int(tokenizer.eos_token_id)
    demonstrations: list[Demonstration] = []
    num_filtered = 0
    for file in files:
        rows = list(_rows(file))
        conversations = [with_configured(row.messages, config, is_question=row.is_question) for row in rows]
        texts = [renderer(messages, row.tools, row.place) for messages, row in zip(conversations, rows, strict=True)]
        parts = [part for row in rows for part in row.parts]
        encoded = iter(encode(parts, tokenizer, add_special_tokens=False))
        for row, prompt_ids in zip(rows, renderer.encode(texts), strict=True):
            response = [next(encoded) for _ in row.parts]
            if too_long(row.place, len(prompt_ids), config):
                num_filtered += 1
                continue
            demonstrations.append(_demonstration(prompt_ids, response, end))
    report_filtered(num_filtered, len(demonstrations), files, config)
    return demonstrations


def _demonstration(prompt_ids: tuple[int, ...], parts: Sequence[tuple[int, ...]], end: int) -> Demonstration:
    """Join the parts; the first, third, … are the model's."""
    ids = [token for part in parts for token in part]
    mask = [index % 2 == 0 for index, part in enumerate(parts) for _ in part]
    if len(parts) % 2:
        ids, mask = [*ids, end], [*mask, True]
    return Demonstration(prompt_ids, tuple(ids), None if all(mask) else tuple(mask))
