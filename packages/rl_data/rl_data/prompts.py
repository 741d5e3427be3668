"""Prompts from parquet rows: the conversation, its text and its token ids.

A conversation becomes text

- with the tokenizer's chat template if it has one (`chat_template="auto"`), up to the start of the assistant's turn;
- otherwise as plain text: the content of each message followed by a line break. A GSM8K question `Q` becomes `Q\\n`,
  and the response starts on the next line. The tokenizer adds its usual special tokens, such as a
  beginning-of-sequence token.
"""

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

_logger = logging.getLogger(__name__)
#: Rows tokenized in one call.
_BATCH_SIZE = 1024


@dataclass(frozen=True)
class Prompt:
    """One prompt, ready for rollout.

    `id` is `<file stem>:<row>`, unique among the files loaded together and the same in every run. `ground_truth` is
    text; of a list (accepted answers) or a struct it is the JSON text.
    """

    id: str
    text: str
    token_ids: tuple[int, ...]
    ground_truth: str
    data_source: str


def file_labels(files: Sequence[str | Path]) -> list[str]:
    """A label for each file: its stem, with its position if several files have the same stem."""
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
    """Whether to use the tokenizer's chat template. Raises DataError for "always" if it has none."""
    has_template = bool(tokenizer.chat_template)
    if config.chat_template == "always" and not has_template:
        raise DataError(
            "chat_template='always', but the model's tokenizer has no chat template. Set it to 'auto' or 'never', or "
            "add chat_template.jinja to the model folder."
        )
    return has_template and config.chat_template != "never"


def render(messages: Sequence[Message], tokenizer: TokenizerLike, with_template: bool) -> str:
    """The text of a conversation up to the start of the response."""
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
    """Whether to drop the prompt as overlong. Raises DataError instead for `overlong="refuse"`."""
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
    """Log the number of dropped prompts. Raises DataError if none is left."""
    if num_kept == 0:
        raise DataError(
            f"{', '.join(map(str, files))}: all {num_filtered} prompts are longer than "
            f"max_prompt_length={config.max_prompt_length} tokens. Raise the limit."
        )
    if num_filtered:
        _logger.warning(
            "%d of %d prompts are longer than max_prompt_length=%d tokens and are dropped",
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
    """The prompts of all files, in the order of files and rows.

    `config.overlong` decides whether overlong prompts are dropped or raise; `max_prompts` limits the number of prompts.
    Raises DataError naming file, row, column and remedy.
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
