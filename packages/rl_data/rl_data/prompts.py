"""Prompts from rows of data: the conversation, its text and its token ids.

A conversation becomes text

- with the tokenizer's chat template if it has one (`chat_template="auto"`), with the row's tools, up to the start of
  the assistant's turn;
- otherwise as plain text: the content of each message followed by a line break. A GSM8K question `Q` becomes `Q\\n`,
  and the response starts on the next line. The tokenizer adds its usual special tokens, such as a
  beginning-of-sequence token.
"""

import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from .config import DataConfig
from .errors import DataError
from .files.opening import open_table
from .files.table import Place, first_line
from .rows import Message, Row, Tool, find_schema, left_out, read_rows
from .tokenizer import TokenizerLike

T = TypeVar("T")

_logger = logging.getLogger(__name__)
#: Rows tokenized in one call.
_BATCH_SIZE = 1024


@dataclass(frozen=True)
class Prompt:
    """One prompt, ready for rollout.

    `id` is `<file stem>:<row>`, unique among the files loaded together and the same in every run; the row is counted as
    in errors: lines of text files from 1, rows of others from 0.
    """

    id: str
    text: str
    token_ids: tuple[int, ...]
    ground_truth: str
    """Text; JSON text of a list (accepted answers) or struct; empty if the row has none."""
    data_source: str
    extra: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """The other columns of the row as JSON values: text, numbers, bools, lists, dicts and None."""
    messages: tuple[Message, ...] = field(default=(), hash=False)
    """The conversation that `text` renders."""
    tools: tuple[Tool, ...] = field(default=(), hash=False)
    """JSON schemas of the tools that `text` describes."""


def dotted(section: str, key: str) -> str:
    """The name of a configuration key; `section` is empty if it has none."""
    return f"{section}.{key}" if section else key


def file_labels(files: Sequence[str | Path]) -> list[str]:
    """A label for each file: its stem, with its position if several files have the same stem."""
    stems = [Path(file).stem for file in files]
    counts = Counter(stems)
    return [stem if counts[stem] == 1 else f"{stem}~{index}" for index, stem in enumerate(stems)]


def with_configured(messages: Sequence[Message], config: DataConfig, *, is_question: bool) -> tuple[Message, ...]:
    """The messages of a row with the configured system prompt and question template."""
    if is_question:
        # str.replace, not str.format: questions contain braces.
        text = config.question_template.replace("{question}", messages[0]["content"])
        messages = [{**messages[0], "content": text}, *messages[1:]]
    if config.system_prompt is not None and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": config.system_prompt}, *messages]
    return tuple(messages)


def uses_chat_template(tokenizer: TokenizerLike, config: DataConfig) -> bool:
    """Whether to use the tokenizer's chat template. Raises DataError for "always" if it has none."""
    has_template = bool(tokenizer.chat_template)
    if config.chat_template == "always" and not has_template:
        raise DataError(
            "data.chat_template=always, but the model's tokenizer has no chat template. Set it to auto or never, or "
            "add chat_template.jinja to the model folder."
        )
    if config.chat_template_kwargs and not has_template:
        raise DataError(
            "data.chat_template_kwargs is given, but the model's tokenizer has no chat template. Remove it."
        )
    return has_template and config.chat_template != "never"


class Renderer:
    """Renders conversations as text, with the tokenizer's chat template or plain."""

    def __init__(self, tokenizer: TokenizerLike, config: DataConfig) -> None:
        """Raises DataError for `chat_template="always"` if the tokenizer has no template."""
        self._tokenizer, self._kwargs = tokenizer, dict(config.chat_template_kwargs)
        self._choice = config.chat_template
        self.with_template = uses_chat_template(tokenizer, config)
        self._shows_tools = self._has_rendered = False

    def __call__(
        self, messages: Sequence[Message], tools: Sequence[Tool], place: Place, *, for_response: bool = True
    ) -> str:
        """The text up to the start of the response, or of the messages alone (`for_response=False`).

        Raises DataError for what the template does not take.
        """
        self._has_rendered = True
        self._require_tools(messages, tools, place)
        if self.with_template:
            return str(self._apply(messages, tools, place, tokenize=False, add_generation_prompt=for_response))
        if any("tool_calls" in message for message in messages):
            raise place.error("tool calls, which need a chat template", "Drop the row, or add a template to the model.")
        return "".join(f"{message['content']}\n" for message in messages)

    def encode(self, texts: list[str]) -> list[tuple[int, ...]]:
        """Token ids of rendered texts; a template writes its special tokens itself."""
        return encode(texts, self._tokenizer, add_special_tokens=not self.with_template)

    def encode_marked(
        self, messages: Sequence[Message], tools: Sequence[Tool], place: Place
    ) -> tuple[list[int], list[bool]]:
        """Token ids of a conversation and the mask of a template with `{% generation %}` markers."""
        self._require_tools(messages, tools, place)
        options = {"return_dict": True, "return_assistant_tokens_mask": True}
        found = self._apply(messages, tools, place, tokenize=True, add_generation_prompt=False, **options)
        return [int(token) for token in found["input_ids"]], [bool(one) for one in found["assistant_masks"]]

    def report(self) -> None:
        """Log how messages became text, if there were any: a warning where the tokenizer lacks a template."""
        if not self._has_rendered:
            return
        plain = "as plain text, the content of each and a line break, without roles"
        if self.with_template:
            _logger.info(
                "messages are rendered with the tokenizer's chat template (data.chat_template=%s; never: plain text)",
                self._choice,
            )
        elif self._choice == "never":
            _logger.info("messages are rendered %s (data.chat_template=never)", plain)
        else:
            _logger.warning(
                "messages are rendered %s: the tokenizer has no chat template (data.chat_template=auto; always refuses "
                "this). To use a template, put chat_template.jinja into the model folder",
                plain,
            )

    def _require_tools(self, messages: Sequence[Message], tools: Sequence[Tool], place: Place) -> None:
        """Raises DataError for tools that the template does not show."""
        if not tools or self._shows_tools:
            return
        if self.with_template:
            options = {"tokenize": False, "add_generation_prompt": True}
            with_tools, without = (self._apply(messages, some, place, **options) for some in (tools, ()))
            self._shows_tools = with_tools != without
        if not self._shows_tools:
            raise place.error("tools, which the chat template does not show", "Use a model whose template has tools.")

    def _apply(self, messages: Sequence[Message], tools: Sequence[Tool], place: Place, **options: Any) -> Any:
        try:
            return self._tokenizer.apply_chat_template(
                list(messages), tools=list(tools) or None, **options, **self._kwargs
            )
        except Exception as error:  # templates raise what they like, such as "roles must alternate"
            what = f"the chat template refuses the messages ({type(error).__name__}: {first_line(error)})"
            raise place.error(what, "Fix the messages, or set data.chat_template=never.") from error


def encode(texts: list[str], tokenizer: TokenizerLike, *, add_special_tokens: bool) -> list[tuple[int, ...]]:
    """Token ids of each text."""
    ids = tokenizer(texts, add_special_tokens=add_special_tokens)["input_ids"]
    return [tuple(int(token) for token in row) for row in ids]


def batches(rows: Iterable[T]) -> Iterator[list[T]]:
    """The rows in lists that are tokenized in one call."""
    iterator = iter(rows)
    while batch := list(islice(iterator, _BATCH_SIZE)):
        yield batch


def too_long(place: Place, length: int, config: DataConfig) -> bool:
    """Whether to drop the prompt as overlong. Raises DataError instead for `overlong="refuse"`."""
    if length <= config.max_prompt_length:
        return False
    if config.overlong == "refuse":
        what = f"the prompt has {length} tokens, data.max_prompt_length={config.max_prompt_length}"
        raise place.error(what, "Raise the limit, drop the row, or set data.overlong=filter.")
    return True


def report_filtered(
    num_filtered: int,
    num_kept: int,
    files: Sequence[str | Path],
    config: DataConfig,
    *,
    max_length: int | None = None,
    section: str = "",
) -> None:
    """Log the number of dropped prompts, or demonstrations (`max_length`). Raises DataError if none is left."""
    what, limit = "prompts", f"data.max_prompt_length={config.max_prompt_length} tokens"
    if max_length is not None:
        what, limit = (
            "demonstrations",
            f"{dotted(section, 'max_length')}={max_length} tokens, or their prompts than {limit}",
        )
    if num_kept == 0:
        raise DataError(
            f"{', '.join(map(str, files))}: all {num_filtered} {what} are longer than {limit}. Raise the limit."
        )
    if num_filtered:
        total = num_filtered + num_kept
        _logger.warning("%d of %d %s are longer than %s and are dropped", num_filtered, total, what, limit)


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
        raise DataError("no files were given. Name at least one.")
    renderer = Renderer(tokenizer, config)
    prompts: list[Prompt] = []
    num_filtered = 0
    for file, label in zip(files, file_labels(files), strict=True):
        table = open_table(file)
        schema = find_schema(table, config)
        if line := left_out(table, schema):
            _logger.warning(line)
        for rows in batches(read_rows(table, schema)):
            conversations = [with_configured(row.messages, config, is_question=row.is_question) for row in rows]
            texts = [
                renderer(messages, row.tools, row.place) for messages, row in zip(conversations, rows, strict=True)
            ]
            for row, messages, text, ids in zip(rows, conversations, texts, renderer.encode(texts), strict=True):
                if too_long(row.place, len(ids), config):
                    num_filtered += 1
                    continue
                prompts.append(_prompt(label, row, messages, text, ids))
                if len(prompts) == max_prompts:
                    renderer.report()
                    return prompts
    report_filtered(num_filtered, len(prompts), files, config)
    renderer.report()
    return prompts


def _prompt(label: str, row: Row, messages: tuple[Message, ...], text: str, ids: tuple[int, ...]) -> Prompt:
    return Prompt(
        id=f"{label}:{row.place.number}",
        text=text,
        token_ids=ids,
        ground_truth=row.ground_truth,
        data_source=row.data_source,
        extra=row.extra,
        messages=messages,
        tools=row.tools,
    )
