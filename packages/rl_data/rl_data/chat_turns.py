"""The assistant turns of a conversation, whose tokens a model is trained on.

A template with `{% generation %}` markers says it itself (transformers' assistant mask). Without markers a turn is the
difference between two renderings: the messages before it with the generation prompt, which is what the model sees when
it generates, and the messages up to it. Where a template renders the same messages differently later in the
conversation (it drops the reasoning of earlier turns, for example), the difference is ambiguous and is refused.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from plinth_base.errors import shown

from .config import TurnsTrained
from .files.table import Place
from .prompts import dotted
from .rendering import Renderer
from .rows import Message, Tool
from .tokenizer import Tokenizer

_MARKER = re.compile(r"\{%-?\s*generation\s*-?%\}")
_TEXT_INSTEAD = (
    "Give the response as text beside the messages before it (columns `prompt` and `completion`), which follows the "
    "generation prompt as it is; or mark the turns in the template with {% generation %}."
)
_PROMPT_TAIL = 20
"""Characters at the end of a generation prompt that may belong to the message."""


@dataclass(frozen=True)
class Segment:
    """A part of a sequence's text, tokenized by itself as during generation."""

    text: str
    is_trained: bool


@dataclass(frozen=True, kw_only=True)
class Script:
    """A sequence before tokenization: segments, or the token ids that a template with markers gives."""

    segments: tuple[Segment, ...] = ()
    with_special_tokens: bool = False
    """The tokenizer adds its special tokens to the first segment: no template writes them."""
    ends: bool = False
    """The end-of-sequence token follows, and is trained on."""
    ids: tuple[int, ...] = ()
    mask: tuple[bool, ...] = ()
    rendered: str = ""
    """The text of `ids`."""

    @property
    def text(self) -> str:
        """The whole text."""
        return self.rendered or "".join(segment.text for segment in self.segments)


class ChatTurns:
    """Divides conversations into the text or tokens that the model writes, and the rest."""

    def __init__(self, tokenizer: Tokenizer, renderer: Renderer, turns: TurnsTrained, *, section: str = "") -> None:
        """`section`: the configuration section of `turns`, for errors; "": none."""
        self._tokenizer, self._renderer, self._turns = tokenizer, renderer, turns
        self._key = dotted(section, "turns")
        template = tokenizer.chat_template
        self.has_markers = renderer.with_template and isinstance(template, str) and bool(_MARKER.search(template))
        # Tokens that end turns in templates: the end-of-sequence token and other special ones.
        special = (token for token in tokenizer.added_tokens_decoder.values() if token.special)
        self._stops = tuple({str(token) for token in (tokenizer.eos_token, *special)})

    def scripts(
        self, messages: Sequence[Message], tools: Sequence[Tool], place: Place, *, first: int = 0
    ) -> list[Script]:
        """The sequences of a conversation that ends with an assistant's message.

        Args:
            first: index of the first message whose turn may be trained on.

        Raises:
            DataError: the template refuses the messages, or does not show where a turn begins and ends.
        """
        turns = [index for index, one in enumerate(messages) if one["role"] == "assistant" and index >= first]
        if self._turns == "all":
            wanted = [(messages, turns)]
        else:
            ends = turns if self._turns == "each" else turns[-1:]
            wanted = [(messages[: end + 1], [end]) for end in ends]
        make = self._by_markers if self.has_markers else self._by_difference
        return [make(part, tools, place, indices) for part, indices in wanted]

    def _by_markers(
        self, messages: Sequence[Message], tools: Sequence[Tool], place: Place, turns: Sequence[int]
    ) -> Script:
        """The marked runs of tokens after those of earlier turns; a turn may have several."""
        text = self._renderer(messages, tools, place, trained=turns)
        ids, mask = self._renderer.encode_marked(messages, tools, place)
        runs = _runs(mask)
        if any(message["role"] == "assistant" for message in messages[: turns[0]]):
            runs = runs[len(_runs(self._renderer.encode_marked(messages[: turns[0]], tools, place)[1])) :]
        if len(runs) < len(turns):
            problem = (
                f"the chat template marks {len(runs)} turns with {{% generation %}}, and {len(turns)} are trained on"
            )
            raise place.error(problem, "Fix the template or drop the row.", column="messages")
        trained = {index for run in runs for index in run}
        return Script(ids=tuple(ids), mask=tuple(index in trained for index in range(len(ids))), rendered=text)

    def _by_difference(
        self, messages: Sequence[Message], tools: Sequence[Tool], place: Place, turns: Sequence[int]
    ) -> Script:
        whole = self._renderer(messages, tools, place, trained=())  # `_turn` checks those that are trained on
        segments: list[Segment] = []
        done, ends = 0, False
        for index in turns:
            before, text = self._turn(messages, tools, place, index)
            if not whole.startswith(before + text):
                problem = f"the chat template renders message {index} (counted from 0) differently in the conversation"
                seen = f"{shown(text)} follows its own prompt, and the whole has {shown(whole[len(before) :])}"
                remedy = (
                    f"Train on each turn with its own prompt ({self._key}=each) or on the last one ({self._key}=last), "
                    "or mark the turns in the template with {% generation %}."
                )
                raise place.error(f"{problem}: {seen}", remedy, column="messages")
            written = text.rstrip()
            ends = not written.endswith(self._stops)
            if ends and index < len(messages) - 1:
                written = text  # without a token that ends a turn, its line break does
            segments += [Segment(whole[done : len(before)], False), Segment(written, True)]
            done = len(before) + len(written)
        return Script(segments=tuple(segments), with_special_tokens=not self._renderer.with_template, ends=ends)

    def _turn(self, messages: Sequence[Message], tools: Sequence[Tool], place: Place, index: int) -> tuple[str, str]:
        """The text that the model sees before the turn `index`, and the text that it writes."""
        before = self._renderer.unchecked(messages[:index], tools, place, for_response=True)
        text = self._renderer.unchecked(messages[: index + 1], tools, place, for_response=False)
        problem = f"the chat template does not show message {index} (counted from 0) after its generation prompt"
        if not text.startswith(before):
            raise place.error(f"{problem}, which ends in {shown(before[-20:])}", _TEXT_INSTEAD, column="messages")
        turn = text[len(before) :]
        # A generation prompt may have the beginning of the message already, such as <think>.
        seen = before[-_PROMPT_TAIL:] + turn
        self._renderer.require_shown([messages[index]], seen, place, trained=[index], first=index)
        return before, turn


def _runs(mask: Sequence[bool]) -> list[list[int]]:
    """The indices of each unbroken run of marked tokens."""
    return [list(run) for marked, run in groupby(range(len(mask)), key=mask.__getitem__) if marked]
