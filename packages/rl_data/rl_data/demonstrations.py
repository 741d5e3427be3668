"""Demonstrations for supervised fine-tuning: a prompt and the response to learn, from rows of data files.

The columns of each file determine its format:

- `question` and `answer`: the answer follows the rendered question. It is a text, or a list of texts that alternate
  between the model and a tool, starting with the model.
- `messages` (and `tools`): a conversation that ends with the assistant; `chat_turns` says what is trained on.
- `prompt` and `completion`: a text follows a text, without a template; or text or the assistant's messages follow the
  messages of a prompt.
- `text`: plain text, all of it trained on.

Parts are tokenized one by one, as during generation, and a response ends with the end-of-sequence token unless the
template has ended it.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .chat_turns import ChatTurns, Script, Segment
from .config import DataConfig, TurnsTrained
from .errors import DataError
from .files.opening import open_table
from .files.table import Place, Table
from .images import VisionProcessor, as_parts, ids_with_images, take_images
from .lost_characters import compared
from .messages import leaves
from .prompts import batches, dotted, report_filtered, too_long
from .rendering import Renderer, encode, with_configured
from .rows import IMAGES, MEDIA_COLUMNS, Message, Tool, conversation, refuse_media, tools_of
from .tokenizer import Tokenizer

_HELP = (
    "Demonstrations need the columns `question` and `answer`, or `messages`, or `prompt` and `completion`, or `text`; "
    "rename the columns."
)
_FILL_IN = "Fill it in or drop the row."


@dataclass(frozen=True, kw_only=True)
class AnsweredRow:
    """A row with a response, before it is rendered and tokenized."""

    place: Place
    messages: tuple[Message, ...] = ()
    """Messages that a template renders; empty for plain text."""
    tools: tuple[Tool, ...] = ()
    is_question: bool = False
    prompt: str = ""
    """Plain text before the response."""
    parts: tuple[str, ...] | None = None
    """The response as texts of the model and a tool in turn; None: it is in the messages."""
    num_before: int = 0
    """Without parts: number of messages before those that are trained on."""
    images: tuple[str, ...] = ()
    """Files, in the order of their places in the messages."""
    columns: tuple[str, str]
    """The columns of the prompt and of the response; the same for a conversation."""

    def column_of(self, characters: Collection[str]) -> str:
        """The column that has some of these `compared` characters; that of the prompt if a template adds them."""
        response = self.messages[self.num_before :] if self.parts is None else self.parts
        has_some = any(not compared(text).keys().isdisjoint(characters) for text in leaves(list(response)))
        return self.columns[has_some]


@dataclass(frozen=True)
class Demonstration:
    """One training sequence; the loss is on the response. `prompt_ids` has at least one token."""

    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    response_mask: tuple[bool, ...] | None = None
    """False for response tokens that the model does not write (a user's, a tool's); None if it writes them all."""
    images: tuple[str, ...] = ()
    """Files of the images whose placeholders the ids have."""

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and response."""
        return len(self.prompt_ids) + len(self.response_ids)


# ------------------------------------------------------------------------ rows


def is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _parts(answer: Any) -> tuple[str, ...] | None:
    """The texts of an answer; None if it is not text or starts with an empty one."""
    parts = answer if isinstance(answer, list) else [answer]
    if not parts or not all(isinstance(part, str) for part in parts) or not parts[0].strip():
        return None
    return tuple(parts)


def _format(table: Table) -> tuple[list[str], Callable[[Place, dict[str, Any]], AnsweredRow]]:
    """The columns of the table's format, and the function that reads a row."""
    names = table.columns
    with_tools = ["tools"] if "tools" in names else []
    if "question" in names:
        return ["question", "answer"], of_question
    if "messages" in names:
        return ["messages", *with_tools], of_messages
    if "completion" in names:
        return ["prompt", "completion", *with_tools], of_completion
    if "text" in names:
        return ["text"], _of_text
    return ["question", "answer"], of_question


def _rows(file: str | Path) -> Iterator[AnsweredRow]:
    table = open_table(file)
    columns, parse = _format(table)
    table.require(columns, _HELP)
    for place, row in table.rows([*columns, *media_of(table)], text=columns):
        yield with_images(parse(place, row), row)


def media_of(table: Table) -> list[str]:
    """The table's columns of images and other media."""
    return [name for name in (IMAGES, *MEDIA_COLUMNS) if name in table.columns]


def with_images(row: AnsweredRow, columns: dict[str, Any]) -> AnsweredRow:
    """The row with the images of its messages or of the column `images`. Raises DataError for other media."""
    refuse_media(row.place, columns)
    messages, images = take_images(row.place, row.messages, columns, IMAGES)
    if images and not messages:
        raise row.place.error("images beside plain text", "Give the prompt as messages.", column=IMAGES)
    return replace(row, messages=messages, images=images)


def of_question(place: Place, row: dict[str, Any], answer: str = "answer") -> AnsweredRow:
    """A question and its answer in the column `answer`."""
    question, parts = row.get("question"), _parts(row.get(answer))
    if not is_text(question) or parts is None:
        raise place.error("no text", _FILL_IN, column=answer if is_text(question) else "question")
    messages = ({"role": "user", "content": question},)
    return AnsweredRow(place=place, messages=messages, is_question=True, parts=parts, columns=("question", answer))


def of_messages(place: Place, row: dict[str, Any], column: str = "messages") -> AnsweredRow:
    """A conversation in `column`."""
    messages = conversation(place, row.get(column), column)
    _require_response(place, messages, column)
    tools = tools_of(place, row.get("tools"), "tools")
    return AnsweredRow(place=place, messages=messages, tools=tools, columns=(column, column))


def of_completion(place: Place, row: dict[str, Any], column: str = "completion") -> AnsweredRow:
    """A prompt and what follows it in `column`."""
    prompt, completion, columns = row.get("prompt"), row.get(column), ("prompt", column)
    if is_text(prompt):
        if not is_text(completion):
            raise place.error("no text after a prompt that is text", _FILL_IN, column=column)
        return AnsweredRow(place=place, prompt=str(prompt), parts=(str(completion),), columns=columns)
    before, tools = conversation(place, prompt, "prompt"), tools_of(place, row.get("tools"), "tools")
    if is_text(completion):
        return AnsweredRow(place=place, messages=before, tools=tools, parts=(str(completion),), columns=columns)
    messages = (*before, *conversation(place, completion, column))
    _require_response(place, messages, column)
    return AnsweredRow(place=place, messages=messages, tools=tools, num_before=len(before), columns=columns)


def _of_text(place: Place, row: dict[str, Any]) -> AnsweredRow:
    if not is_text(row.get("text")):
        raise place.error("no text", _FILL_IN, column="text")
    return AnsweredRow(place=place, parts=(row["text"],), columns=("text", "text"))


def _require_response(place: Place, messages: Sequence[Message], column: str) -> None:
    last, roles = messages[-1], [message["role"] for message in messages]
    if roles[-1] != "assistant" or not (is_text(last["content"]) or last.get("tool_calls")) or roles[0] == "assistant":
        problem = "the conversation does not end with an assistant's text that answers another message"
        if roles[0] == "assistant":
            problem = "the conversation begins with an assistant's message, which answers none"
        raise place.error(problem, "Drop the messages around it, or drop the row.", column=column)


def check_demonstrations(files: Sequence[str | Path]) -> int:
    """Read every file once, without a tokenizer, and return the number of rows.

    Raises DataError for a file that is missing, empty or damaged, for a missing column, and for a row without text.
    """
    return sum(1 for file in files for _ in _rows(file))


# --------------------------------------------------------------------- loading


def load_demonstrations(
    files: Sequence[str | Path],
    tokenizer: Tokenizer,
    config: DataConfig,
    *,
    turns: TurnsTrained = "all",
    max_length: int | None = None,
    section: str = "",
    vision: VisionProcessor | None = None,
) -> list[Demonstration]:
    """The demonstrations of all files, in order. Prompts are identical to those of `load_prompts`.

    `config.overlong` decides whether overlong ones are dropped or raise. Raises DataError naming file, row, column and
    remedy.

    Args:
        turns: which assistant turns of a conversation are trained on.
        max_length: maximum tokens of prompt and response; None: no limit. Prompts alone have `max_prompt_length`, but
            for plain text.
        section: the configuration section of `turns` and `max_length`, for errors.
        vision: gives the token ids of rows with images.
    """
    encoder = RowEncoder(files, tokenizer, config, turns, max_length=max_length, section=section, vision=vision)
    read = batches(row for file in files for row in _rows(file))
    demonstrations = [one for rows in read for row, one in encoder(rows) if not encoder.drops(row.place, one)]
    encoder.report(len(demonstrations))
    return demonstrations


class RowEncoder:
    """Renders and tokenizes the rows of files; arguments as those of `load_demonstrations`."""

    def __init__(
        self,
        files: Sequence[str | Path],
        tokenizer: Tokenizer,
        config: DataConfig,
        turns: TurnsTrained,
        *,
        max_length: int | None,
        section: str,
        vision: VisionProcessor | None = None,
    ) -> None:
        if not files:
            raise DataError("no files were given", "Name at least one.")
        self.renderer = Renderer(tokenizer, config)
        self._chat = ChatTurns(tokenizer, self.renderer, turns, section=section)
        self._tokenizer, self._config, self._vision = tokenizer, config, vision
        self._files, self._max_length, self._section = files, max_length, section
        self._num_dropped = 0
        self._known: dict[int, int] = {}
        """One object per token id, which all sequences share: 8 bytes per token instead of 36."""

    def __call__(self, rows: Sequence[AnsweredRow]) -> Iterator[tuple[AnsweredRow, Demonstration]]:
        """The sequences of each row, in order: several if each turn is one. Raises DataError."""
        made = [(row, one) for row in rows for one in self._scripts(row)]
        for (row, script), (ids, mask, images) in zip(made, self._encode(made), strict=True):
            if not images:  # placeholders are no characters of the text
                self.renderer.lost.check(script.text, ids, row.place, row.column_of)
            # Nothing predicts the first token of the sequence.
            trained = [index for index, one in enumerate(mask) if one and index > 0]
            if not trained:
                raise row.place.error("it has no token to train on", _FILL_IN)
            first, end = trained[0], trained[-1] + 1
            response_mask = tuple(mask[first:end])
            marked = None if all(response_mask) else response_mask
            yield row, Demonstration(tuple(ids[:first]), tuple(ids[first:end]), marked, images)

    def _scripts(self, row: AnsweredRow) -> list[Script]:
        """The sequences of a row."""
        messages = with_configured(row.messages, self._config, is_question=row.is_question) if row.messages else ()
        messages = as_parts(messages, len(row.images))
        if row.images and self._chat.has_markers and row.parts is None:
            problem = "images in a conversation whose template marks turns with {% generation %}"
            raise row.place.error(problem, "Give `prompt` and `completion`.", column=IMAGES)
        if row.parts is None:
            first = row.num_before + len(messages) - len(row.messages)
            return self._chat.scripts(messages, row.tools, row.place, first=first)
        before = self.renderer(messages, row.tools, row.place) if messages else row.prompt
        responses = [Segment(part, index % 2 == 0) for index, part in enumerate(row.parts)]
        return [
            Script(
                segments=(*([Segment(before, False)] if before else []), *responses),
                with_special_tokens=not (messages and self.renderer.with_template),
                ends=len(row.parts) % 2 == 1,
            )
        ]

    def _encode(
        self, made: Sequence[tuple[AnsweredRow, Script]]
    ) -> Iterator[tuple[list[int], list[bool], tuple[str, ...]]]:
        """Token ids of each sequence, whether they are trained on, and the images that it has."""
        tokenizer, vision, known = self._tokenizer, self._vision, self._known
        scripts = [script for _, script in made]
        firsts = [script.segments[0].text for script in scripts if script.with_special_tokens]
        rests = [segment.text for script in scripts for segment in script.segments[int(script.with_special_tokens) :]]
        first = iter(encode(firsts, tokenizer, add_special_tokens=True) if firsts else [])
        rest = iter(encode(rests, tokenizer, add_special_tokens=False) if rests else [])
        end = int(tokenizer.eos_token_id)
        for row, script in made:
            ids, mask, num_images = list(script.ids), list(script.mask), 0
            for index, segment in enumerate(script.segments):
                tokens = next(first if index == 0 and script.with_special_tokens else rest)
                if row.images and not segment.is_trained:
                    count = vision.count(segment.text) if vision is not None else len(row.images)
                    images = row.images[num_images : num_images + count]
                    num_images += count
                    tokens = ids_with_images(segment.text, images, vision, row.place, IMAGES) if count else tokens
                ids += tokens
                mask += [segment.is_trained] * len(tokens)
            if script.ends and not (mask and mask[-1] and ids[-1] == end):
                ids, mask = [*ids, end], [*mask, True]
            yield [known.setdefault(token, token) for token in ids], mask, row.images[:num_images]

    def drops(self, place: Place, sequence: Demonstration) -> bool:
        """True for a sequence that is dropped as overlong. Raises DataError instead for `overlong="refuse"`."""
        limit = self._max_length
        is_long = limit is not None and sequence.num_tokens > limit
        if not too_long(place, len(sequence.prompt_ids), self._config) and not is_long:
            return False
        if is_long and self._config.overlong == "refuse":
            limits = f"{dotted(self._section, 'max_length')}={limit}"
            problem = f"the demonstration has {sequence.num_tokens} tokens, {limits}"
            raise place.error(problem, "Raise the limit or drop the row.", setting="data.overlong=filter")
        self._num_dropped += 1
        return True

    def report(self, num_kept: int) -> None:
        """Log the number of what was dropped. Raises DataError if nothing is left."""
        limit, section = self._max_length, self._section
        report_filtered(self._num_dropped, num_kept, self._files, self._config, max_length=limit, section=section)
        self.renderer.report()
