"""Demonstrations for supervised fine-tuning before RL: a question and the whole response to it.

The response is a text, or a list of texts that alternate between the model and a tool, starting with the model. The
parts are tokenized one by one, as during generation.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .config import DataConfig
from .errors import DataError
from .parquet import Row, open_parquet, question_row, records, require_columns, row_error
from .prompts import conversation, encode, render, report_filtered, too_long, uses_chat_template
from .tokenizer import TokenizerLike

_HELP = "Demonstrations need the columns `question` and `answer` (the whole response); rename the columns."


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


def _rows(file: str | Path) -> list[tuple[Row, list[str]]]:
    parquet = open_parquet(file)
    require_columns(parquet, file, ("question", "answer"), _HELP)
    rows = []
    for index, row in enumerate(records(parquet, file, ("question", "answer"))):
        question, parts = row["question"], _parts(row["answer"])
        has_question = isinstance(question, str) and bool(question.strip())
        if not has_question or parts is None:
            column = "answer" if has_question else "question"
            raise row_error(str(file), index, column, "no text", "Fill it in or drop the row.")
        rows.append((question_row(str(file), index, question), parts))
    return rows


def check_demonstrations(files: Sequence[str | Path]) -> int:
    """Read every file once, without a tokenizer, and return the number of rows.

    Raises DataError for a file that is missing, empty or not parquet, for a missing column, and for a row without text.
    """
    return sum(len(_rows(file)) for file in files)


def load_demonstrations(
    files: Sequence[str | Path], tokenizer: TokenizerLike, config: DataConfig
) -> list[Demonstration]:
    """The demonstrations of all files, in order. Prompts are identical to those of `load_prompts`.

    `config.overlong` decides whether overlong prompts are dropped or raise. Raises DataError naming file, row, column
    and remedy.
    """
    if not files:
        raise DataError("no files were given. Name at least one parquet file.")
    with_template = uses_chat_template(tokenizer, config)
    end = int(tokenizer.eos_token_id)
    demonstrations: list[Demonstration] = []
    num_filtered = 0
    for file in files:
        rows = _rows(file)
        texts = [render(conversation(row, config), tokenizer, with_template) for row, _ in rows]
        prompts = encode(texts, tokenizer, not with_template)
        encoded = iter(encode([part for _, parts in rows for part in parts], tokenizer, False))
        for (row, parts), prompt_ids in zip(rows, prompts, strict=True):
            response = [next(encoded) for _ in parts]
            if too_long(row, len(prompt_ids), config):
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
