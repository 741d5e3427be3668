"""Conversations as text and token ids.

A conversation becomes text

- with the tokenizer's chat template if it has one (`chat_template="auto"`), with the row's tools, up to the start of
  the assistant's turn;
- otherwise as plain text: the content of each message followed by a line break. A GSM8K question `Q` becomes `Q\\n`,
  and the response starts on the next line. The tokenizer adds its usual special tokens, such as a
  beginning-of-sequence token.
"""

import json
import logging
from collections.abc import Collection, Sequence
from contextlib import suppress
from typing import Any

from plinth_base.errors import shown

from .config import DataConfig
from .errors import DataError
from .files.table import Place, first_line
from .lost_characters import LostCharacters
from .messages import Convert, arguments_of, as_object, as_text, first_lost, unchanged, with_arguments
from .rows import Message, Tool
from .tokenizer import Tokenizer

_SHOW = "Use a model whose template shows it, or remove it from the row."
_logger = logging.getLogger(__name__)


def with_configured(messages: Sequence[Message], config: DataConfig, *, is_question: bool) -> tuple[Message, ...]:
    """The messages of a row with the configured system prompt, question template and instruction."""
    if is_question:
        # str.replace, not str.format: questions contain braces.
        text = config.question_template.replace("{question}", messages[0]["content"])
        text += f" {config.instruction}" if config.instruction else ""
        messages = [{**messages[0], "content": text}, *messages[1:]]
    if config.system_prompt is not None and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": config.system_prompt}, *messages]
    return tuple(messages)


def uses_chat_template(tokenizer: Tokenizer, config: DataConfig) -> bool:
    """True if the tokenizer's chat template is used. Raises DataError for "always" if it has none."""
    has_template = bool(tokenizer.chat_template)
    if config.chat_template == "always" and not has_template:
        problem = "data.chat_template=always, but the model's tokenizer has no chat template"
        raise DataError(problem, "Set it to auto or never, or add chat_template.jinja to the model folder.")
    if config.chat_template_kwargs and not has_template:
        problem = "data.chat_template_kwargs is given, but the model's tokenizer has no chat template"
        raise DataError(problem, "Remove it.")
    return has_template and config.chat_template != "never"


class Renderer:
    """Renders conversations as text, with the tokenizer's chat template or plain."""

    def __init__(self, tokenizer: Tokenizer, config: DataConfig) -> None:
        """Raises DataError for `chat_template="always"` if the tokenizer has no template."""
        self.tokenizer, self._kwargs = tokenizer, dict(config.chat_template_kwargs)
        self._choice, self._system_prompt = config.chat_template, config.system_prompt
        self.with_template = uses_chat_template(tokenizer, config)
        self._shows_tools = self._has_rendered = False
        self._conversions: dict[frozenset[type], Convert] = {}
        self.lost = LostCharacters(tokenizer)
        """Characters of the texts that their token ids lack."""

    def __call__(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool],
        place: Place,
        *,
        trained: Collection[int] | None = None,
    ) -> str:
        """The text up to the start of the response, or of the messages alone.

        Raises DataError for what the template does not take or does not show.

        Args:
            trained: indices of the messages that are trained on; None: the response follows the messages.
        """
        text = self.unchecked(messages, tools, place, for_response=trained is None)
        self.require_shown(messages, text, place, trained=trained or ())
        return text

    def unchecked(self, messages: Sequence[Message], tools: Sequence[Tool], place: Place, *, for_response: bool) -> str:
        """The text of a part of a conversation that is checked as a whole."""
        self._has_rendered = True
        self._require_tools(messages, tools, place)
        if self.with_template:
            return str(self._apply(messages, tools, place, tokenize=False, add_generation_prompt=for_response))
        if any("tool_calls" in message for message in messages):
            raise place.error("tool calls, which need a chat template", "Drop the row, or add a template to the model.")
        if any(isinstance(message["content"], list) for message in messages):
            raise place.error("images, which need a chat template", "Drop the row, or add a template to the model.")
        return "".join(f"{message['content']}\n" for message in messages)

    def require_shown(
        self, messages: Sequence[Message], text: str, place: Place, *, trained: Collection[int] = (), first: int = 0
    ) -> None:
        """Raises DataError if a rendering lacks a message's text, thought, call or an argument's value.

        A template that knows thoughts may drop those of messages that are not trained on.

        Args:
            first: index of the first message, for the error.
        """
        template = str(self.tokenizer.chat_template)
        if not self.with_template:  # it has the contents and nothing else
            text, template, messages = "", "", [{**message, "content": ""} for message in messages]
        lost = first_lost(messages, text, trained={index - first for index in trained}, template=template)
        if lost is None:
            return
        index, field = lost
        problem = f"the rendered text lacks or changes {field!r} of message {first + index} (counted from 0)"
        is_configured = messages[index] == {"role": "system", "content": self._system_prompt}
        setting = "data.system_prompt=null" if is_configured else None
        raise place.error(f"{problem}: {shown(text)}", _SHOW, column="messages", setting=setting)

    def encode(self, texts: list[str]) -> list[tuple[int, ...]]:
        """Token ids of rendered texts; a template writes its special tokens itself."""
        return encode(texts, self.tokenizer, add_special_tokens=not self.with_template)

    def encode_marked(
        self, messages: Sequence[Message], tools: Sequence[Tool], place: Place
    ) -> tuple[list[int], list[bool]]:
        """Token ids of a conversation and the mask of a template with `{% generation %}` markers."""
        self._require_tools(messages, tools, place)
        options = {"return_dict": True, "return_assistant_tokens_mask": True}
        tokenized = self._apply(messages, tools, place, tokenize=True, add_generation_prompt=False, **options)
        return [int(token) for token in tokenized["input_ids"]], [bool(one) for one in tokenized["assistant_masks"]]

    def report(self) -> None:
        """Log lost characters, and how messages became text, if there were any: a warning where the tokenizer lacks a
        template."""
        self.lost.report()
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
        kwargs = {"tools": list(tools) or None, **self._kwargs}
        try:
            convert = self._conversion(messages, kwargs)
            return self.tokenizer.apply_chat_template(with_arguments(messages, convert), **kwargs, **options)
        except Exception as error:  # templates raise what they like, such as "roles must alternate"
            problem = f"the chat template refuses the messages ({type(error).__name__}: {first_line(error)})"
            raise place.error(problem, "Fix the messages.", setting="data.chat_template=never") from error

    def _conversion(self, messages: Sequence[Message], kwargs: dict[str, Any]) -> "Convert":
        """The form of calls' arguments that the template writes as JSON, not as a quoted text or as Python does.

        Data has objects or their JSON text (OpenAI's form), and templates expect one or the other.
        """
        kinds = frozenset(map(type, arguments_of(messages)))
        if kinds and kinds not in self._conversions:
            for convert in (unchanged, as_object, as_text):
                converted = with_arguments(messages, convert)
                with suppress(Exception):  # a template that adds text and objects; the caller's call raises it
                    text = self.tokenizer.apply_chat_template(
                        converted, tokenize=False, add_generation_prompt=False, **kwargs
                    )
                    if not any(_is_miswritten(one, text) for one in arguments_of(converted)):
                        self._conversions[kinds] = convert
                        break
        return self._conversions.get(kinds, unchanged)


def _is_miswritten(arguments: Any, text: str) -> bool:
    """True for JSON text in quotes, and for an object as Python writes it."""
    if isinstance(arguments, str):
        return json.dumps(arguments, ensure_ascii=False) in text
    return str(arguments) != json.dumps(arguments, ensure_ascii=False) and str(arguments) in text


def encode(texts: list[str], tokenizer: Tokenizer, *, add_special_tokens: bool) -> list[tuple[int, ...]]:
    """Token ids of each text."""
    ids = tokenizer(texts, add_special_tokens=add_special_tokens)["input_ids"]
    return [tuple(int(token) for token in row) for row in ids]
