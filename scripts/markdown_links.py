"""Links, anchors and code blocks of a Markdown file, as GitHub reads them."""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token


@dataclass(frozen=True, kw_only=True)
class CodeBlock:
    """A fenced block: the word after the fence, its text, and the line of its fence (from 1)."""

    language: str
    text: str
    line: int


@cache
def tokens(markdown: str) -> list[Token]:
    """The parsed text; GitHub's tables on, its automatic links off."""
    return MarkdownIt("commonmark").enable("table").parse(markdown)


def slug(heading: str) -> str:
    """GitHub's anchor of a heading: lower case, no punctuation, a hyphen for each space."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def anchors(markdown: str) -> list[str]:
    """Anchors of all headings; GitHub numbers repeated ones: `name`, `name-1`."""
    seen: Counter[str] = Counter()
    names = []
    all_tokens = tokens(markdown)
    for opening, inline in pairwise(all_tokens):
        if opening.type == "heading_open":
            name = slug("".join(part.content for part in inline.children or () if part.type in ("text", "code_inline")))
            names.append(f"{name}-{seen[name]}" if seen[name] else name)
            seen[name] += 1
    return names


def links(markdown: str) -> list[str]:
    """Targets of all links and pictures."""
    return [str(part.attrs[key]) for part in _inline(markdown) for key in ("href", "src") if key in part.attrs]


def code_blocks(markdown: str) -> list[CodeBlock]:
    """All fenced code blocks."""
    return [
        CodeBlock(language=token.info.strip(), text=token.content, line=token.map[0] + 1)
        for token in tokens(markdown)
        if token.type == "fence" and token.map is not None
    ]


def targets(file: Path) -> Iterator[tuple[str, Path, str]]:
    """Links of a file to files of the repository: (the link, the path it names, its anchor).

    Links to other sites are left out. A folder stands for its README.md if there is one.
    """
    for link in dict.fromkeys(links(file.read_text(encoding="utf-8"))):
        if re.match(r"[a-z][a-z+.-]*:", link):
            continue
        path, _, anchor = link.partition("#")
        yield link, page_of((file.parent / path).resolve() if path else file.resolve()), anchor


def page_of(path: Path) -> Path:
    """The page that GitHub shows for a path: the README.md of a folder that has one, else the path."""
    readme = path / "README.md"
    return readme if readme.is_file() else path


def _inline(markdown: str) -> Iterator[Token]:
    for token in tokens(markdown):
        yield from token.children or ()
