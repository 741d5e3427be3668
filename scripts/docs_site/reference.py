"""Reference of a configuration as Markdown: what `--help` lists, for the documentation site."""

import re
from collections.abc import Iterator, Sequence

from run_kit.config.help import PresetFile, default_text
from run_kit.config.schema import MISSING, Key, Section, class_doc, entries, field_doc, type_text


def reference_text(
    cls: type, *, title: str, presets: Sequence[PresetFile] = (), overlays: Sequence[PresetFile] = ()
) -> str:
    """Every key of a config dataclass with type, default and documentation, as a Markdown page.

    A section is a heading, a key a term of a definition list whose anchor is its dotted path (`#trainer.seed`). The
    page needs the Markdown extensions `def_list` and `attr_list`.

    Args:
        title: heading of the page.
        presets: listed with the comments at their top.
        overlays: likewise.
    """
    blocks = [f"# {title}", _prose(class_doc(cls)), *_files("Presets", presets), *_files("Overlays", overlays)]
    return "\n\n".join(block for block in [*blocks, *_sections(cls)] if block) + "\n"


def _files(heading: str, files: Sequence[PresetFile]) -> Iterator[str]:
    if files:
        yield f"## {heading}"
        yield from (f"`{file.name}`\n:   {_prose(file.doc) or 'No description.'}" for file in files)


def _sections(cls: type) -> Iterator[str]:
    """Headings and keys; the keys of a section come together, before those of the sections inside it."""
    blocks: dict[str, list[str]] = {"": ["## Keys at the top"]}
    for entry in entries(cls):
        if isinstance(entry, Section):
            blocks[entry.path] = [_heading(entry)]
        else:
            blocks[entry.path.rpartition(".")[0]].append(_term(entry))
    for section in blocks.values():
        yield from section if len(section) > 1 else ()


def _heading(section: Section) -> str:
    note = "Off unless one of its keys is given." if section.off else ""
    return f"## {section.path}\n\n{' '.join(filter(None, (_prose(class_doc(section.cls)), note)))}".rstrip()


def _term(key: Key) -> str:
    default = "required" if key.default is MISSING else f"default `{default_text(key.default)}`"
    doc = _prose(field_doc(key.owner, key.name)) or "Not documented."
    return f"`{key.path}` {{: #{key.path} }}\n:   `{type_text(key.hint)}`, {default}. {doc}"


def _prose(text: str) -> str:
    """Text outside of code spans with `<` escaped: a placeholder such as <run folder> is no HTML."""
    return "".join(part if part.startswith("`") else part.replace("<", "&lt;") for part in re.split(r"(`[^`]*`)", text))
