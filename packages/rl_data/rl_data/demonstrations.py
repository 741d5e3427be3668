"""Demonstrations for a supervised warm start: a question and the full text of its answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .config import DataConfig
from .errors import DataError
from .parquet import GSM8K_DATA_SOURCE, Row, open_parquet, require_columns
from .prompts import conversation, encode, render, report_filtered, too_long, uses_chat_template
from .tokenizer import TokenizerLike

__all__ = ["Demonstration", "check_demonstrations", "load_demonstrations"]

_HELP = "Demonstrations need the text columns `question` and `answer` (the whole response); rename the columns."


@dataclass(frozen=True)
class Demonstration:
    """One training example; `response_ids` ends with the end-of-sequence token."""

    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]


def _rows(file: str | Path) -> list[tuple[Row, str]]:
    parquet = open_parquet(file)
    require_columns(parquet, file, ("question", "answer"), _HELP)
    rows = []
    for index, row in enumerate(parquet.read(columns=["question", "answer"]).to_pylist()):
        for column in ("question", "answer"):
            if not isinstance(row[column], str) or not row[column].strip():
                raise DataError(
                    f"{file}: row {index} (counted from 0), column {column!r}: no text. Fill it in or drop the row.",
                    file=str(file),
                    row=index,
                    column=column,
                )
        message = {"role": "user", "content": row["question"]}
        described = Row(
            file=str(file),
            row=index,
            messages=(message,),
            ground_truth="",
            data_source=GSM8K_DATA_SOURCE,
            is_question=True,
        )
        rows.append((described, row["answer"]))
    return rows


def check_demonstrations(files: Sequence[str | Path]) -> int:
    """Read every file once, without a tokenizer, and return the number of rows.

    Raises DataError for a file that is missing, empty or not parquet, for a missing column, and for a row without text.
    """
    return sum(len(_rows(file)) for file in files)


def load_demonstrations(
    files: Sequence[str | Path], tokenizer: TokenizerLike, config: DataConfig
) -> list[Demonstration]:
    """The demonstrations of all files, in order. The prompt is built exactly as `load_prompts` builds it.

    Overlong prompts are left out or refused as configured. Raises DataError naming file, row, column and remedy.
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
        responses = encode([answer for _, answer in rows], tokenizer, False)
        for (row, _), prompt_ids, response_ids in zip(rows, prompts, responses, strict=True):
            if too_long(row, len(prompt_ids), config):
                num_filtered += 1
                continue
            demonstrations.append(Demonstration(prompt_ids, (*response_ids, end)))
    report_filtered(num_filtered, len(demonstrations), files, config)
    return demonstrations
