"""Renders a page from tables, figures and texts: one self-contained HTML file that loads nothing, as on a phone."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A picture (an `<svg>` element, such as `curves.line_svg` makes) with a title and a unit."""

    title: str
    svg: str
    unit: str = ""
    wide: bool = False


@dataclass(frozen=True, kw_only=True)
class Table:
    """Rows of a name and cells; the cells are aligned to the right."""

    head: Sequence[str]
    rows: Sequence[tuple[str, Sequence[str]]]


@dataclass(frozen=True, kw_only=True)
class Section:
    """A part of a page. Whatever is empty is left out."""

    key: str
    """Anchor of the section."""
    title: str
    note: str = ""
    figures: Sequence[Figure] = ()
    table: Table | None = None
    folded: Mapping[str, str] = field(default_factory=dict)
    """Title -> a text that is shown when the reader opens it."""
    has_records: bool = False
    """The section searches the records of the page."""

    @property
    def is_empty(self) -> bool:
        """True if there is nothing to show but a title."""
        return not (any(one.svg for one in self.figures) or self.table or self.folded or self.has_records)


def render(
    title: str, sections: Sequence[Section], *, note: str = "", records: Sequence[Mapping[str, Any]] = ()
) -> str:
    """The page as text.

    Args:
        records: rollouts that the reader can search: `step`, `prompt`, `response`, `reward` and more, without nan.
    """
    shown = [section for section in sections if not section.is_empty]
    values = {"title": title, "sections": shown, "note": note, "records": list(records)}
    return f"{_template().render(values)}\n"


@cache
def _template() -> Any:
    from jinja2 import Environment

    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.policies["json.dumps_kwargs"] = {"default": str}
    environment.filters["breakable"] = _breakable
    return environment.from_string(Path(__file__).with_suffix(".html").read_text(encoding="utf-8"))


def _breakable(name: str) -> str:
    """A name that a narrow table may break after `/`, `_` and `.`."""
    from markupsafe import Markup, escape

    return Markup(re.sub(r"([/_.])(?=\w)", r"\1<wbr>", str(escape(name))))
