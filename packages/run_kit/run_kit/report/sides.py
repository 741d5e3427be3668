"""A prompt with the responses of several runs or models in columns, as HTML."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Response:
    """One response: what was thought of it, and its text."""

    verdict: str
    """Such as `reward 1` or `right, 1`."""
    color: Literal["up", "down", "soft"]
    """Color of the verdict: green, red or gray."""
    text: str


@dataclass(frozen=True, kw_only=True)
class Side:
    """A column: the responses of one run or model."""

    title: str
    responses: Sequence[Response]


def side_by_side(title: str, note: str, prompt: str, sides: Sequence[Side]) -> str:
    """A title and a note, the prompt, and a column for each side; on a narrow page the columns follow each other."""
    columns = "".join(map(_column, sides))
    return (
        f'<article class="sample"><header><b>{escape(title)}</b><span>{escape(note)}</span></header>'
        f'<div class="text prompt">{escape(prompt)}</div><div class="sides">{columns}</div></article>'
    )


def _column(side: Side) -> str:
    texts = "".join(
        f'<div class="text response"><b class="{one.color}">{escape(one.verdict)}</b>\n{escape(one.text)}</div>'
        for one in side.responses
    )
    return f'<div><div class="text soft">{escape(side.title)}</div>{texts}</div>'
