"""From parquet rows to prompts: the conversation, its text, its token ids.

How a conversation becomes text:

- With the tokenizer's chat template when it has one (`chat_template="auto"`), ending where the assistant begins.
- Otherwise as plain text: the content of each message followed by a line break. A GSM8K question `Q` becomes `Q\\n`,
  and the response follows on the next line. Special tokens (such as a beginning-of-sequence token) are added as the
  tokenizer does by itself.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from .config import DataConfig
from .errors import DataError
from .parquet import Message, Row, iter_rows
from .tokenizer import TokenizerLike

__all__ = ["Prompt", "load_prompts"]

_logger = logging.getLogger(__name__)
#: Rows tokenised in one call.
_BATCH_SIZE = 1024


@dataclass(frozen=True)
class Prompt:
    """One prompt, ready for rollout.

    `id` is unique among the files loaded together and stays the same between runs: `<file stem>:<row>`.
    """

    id: str
    text: str
    token_ids: tuple[int, ...]
    ground_truth: str
    data_source: str


def file_labels(files: Sequence[str | Path]) -> list[str]:
    """A short label for each file, its stem; files that share a stem get their position as well."""
    stems = [Path(file).stem for file in files]
    counts = Counter(stems)
    return [stem if counts[stem] == 1 else f"{stem}~{index}" for index, stem in enumerate(stems)]


def conversation(row: Row, config: DataConfig) -> list[Message]:
    """The row's messages with the configured system prompt and question template applied."""
    messages = [dict(message) for message in row.messages]
    if row.is_question:
        # str.replace, not str.format: questions contain braces.
        messages[0]["content"] = config.question_template.replace("{question}", messages[0]["content"])
    if config.system_prompt is not None and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": config.system_prompt})
    return messages


def uses_chat_template(tokenizer: TokenizerLike, config: DataConfig) -> bool:
    """Whether conversations go through the tokenizer's chat template. Raises DataError for "always" without one."""
    has_template = bool(tokenizer.chat_template)
    if config.chat_template == "always" and not has_template:
        raise DataError(
            "chat_template='always', but the model's tokenizer has no chat template. Set it to 'auto' or 'never', or "
            "add chat_template.jinja to the model folder."
        )
    return has_template and config.chat_template != "never"


def render(messages: Sequence[Message], tokenizer: TokenizerLike, with_template: bool) -> str:
    """The text of a conversation, ending where the response begins."""
    if with_template:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
    return "".join(f"{message['content']}\n" for message in messages)


def encode(texts: list[str], tokenizer: TokenizerLike, add_special_tokens: bool) -> list[tuple[int, ...]]:
    """Token ids of each text."""
    ids = tokenizer(texts, add_special_tokens=add_special_tokens)["input_ids"]
    return [tuple(int(token) for token in row) for row in ids]


def _batches(rows: Iterable[Row]) -> Iterator[list[Row]]:
    iterator = iter(rows)
    while batch := list(islice(iterator, _BATCH_SIZE)):
        yield batch


def too_long(row: Row, length: int, config: DataConfig) -> bool:
    """True when the prompt exceeds the limit and is to be filtered; DataError when it is to be refused."""
    if length <= config.max_prompt_length:
        return False
    if config.overlong == "refuse":
        raise DataError(
            f"{row.file}: row {row.row} (counted from 0): the prompt has {length} tokens, "
            f"max_prompt_length={config.max_prompt_length}. Raise the limit, drop the row, or set overlong='filter'.",
            file=row.file,
            row=row.row,
        )
    return True


def report_filtered(num_filtered: int, num_kept: int, files: Sequence[str | Path], config: DataConfig) -> None:
    """Log how many prompts were filtered; DataError when none is left."""
    if num_kept == 0:
        raise DataError(
            f"{', '.join(map(str, files))}: all {num_filtered} prompts are longer than "
            f"max_prompt_length={config.max_prompt_length} tokens. Raise the limit."
        )
    if num_filtered:
        _logger.warning(
            "%d of %d prompts are longer than max_prompt_length=%d tokens and are left out",
            num_filtered,
            num_filtered + num_kept,
            config.max_prompt_length,
        )


def load_prompts(
    files: Sequence[str | Path],
    tokenizer: TokenizerLike,
    config: DataConfig,
    *,
    max_prompts: int | None = None,
) -> list[Prompt]:
    """The prompts of all files, in file and row order; overlong ones left out or refused as configured.

    `max_prompts` stops after so many. Raises DataError naming file, row, column and remedy.
    """
    if not files:
        raise DataError("no files were given. Name at least one parquet file.")
    with_template = uses_chat_template(tokenizer, config)
    prompts: list[Prompt] = []
    num_filtered = 0
    for file, label in zip(files, file_labels(files), strict=True):
        for rows in _batches(iter_rows(file)):
            texts = [render(conversation(row, config), tokenizer, with_template) for row in rows]
            for row, text, ids in zip(rows, texts, encode(texts, tokenizer, not with_template), strict=True):
                if too_long(row, len(ids), config):
                    num_filtered += 1
                    continue
                prompts.append(Prompt(f"{label}:{row.row}", text, ids, row.ground_truth, row.data_source))
                if len(prompts) == max_prompts:
                    return prompts
    report_filtered(num_filtered, len(prompts), files, config)
    return prompts
