"""Help text of an app: every key with type, default and documentation; presets; examples. Imports nothing heavy."""

import dataclasses
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .field_docs import class_doc, field_doc
from .loader import plain_tree
from .schema import MISSING, Key, Section, entries, field_default, nearest_paths, type_text

_WIDTH = 110


@dataclass(frozen=True, kw_only=True)
class PresetFile:
    """A named YAML file of an app."""

    name: str
    path: Path
    doc: str


def list_presets(folder: Path | None) -> list[PresetFile]:
    """YAML files of a folder by name; the doc is the comment at their top. Empty for no folder."""
    if folder is None or not folder.is_dir():
        return []
    files = sorted(path for path in folder.iterdir() if path.suffix in (".yaml", ".yml"))
    return [PresetFile(name=path.stem, path=path, doc=_top_comment(path)) for path in files]


def help_text(
    cls: type,
    *,
    app_name: str = "app",
    doc: str = "",
    presets: Sequence[PresetFile] = (),
    overlays: Sequence[PresetFile] = (),
    examples: Sequence[str] = (),
    under: str = "",
) -> str:
    """Help as plain text, at most 110 columns.

    Args:
        cls: the config dataclass.
        app_name: the app's command, as in `python -m apps.grpo.main`.
        under: list only the keys whose dotted path contains this text.
    """
    listing = _key_lines(cls, under)
    if under:
        if not listing:
            near = nearest_paths(cls, under)
            listing = [f"No key matches {under!r}." + (f" Nearest: {', '.join(near)}" if near else "")]
        return "\n".join(listing) + "\n"
    lines = [f"usage: {app_name} [preset=NAME] [overlay=NAME] [config=FILE.yaml] [key=value ...]", ""]
    if doc := (doc or class_doc(cls)):
        lines += [*textwrap.wrap(doc, _WIDTH), ""]
    lines += [
        "  preset=NAME        start from the app's preset NAME; several are merged left to right",
        "  overlay=NAME       then merge the overlay or preset NAME (a smaller size, another machine)",
        "  config=FILE.yaml   merge your own file; overlays and files go left to right",
        "  key=value          then single keys; value is YAML: 1e-4, true, null, text, [a, b], ${other.key}",
        "  --help [KEY]       print this text, or only the keys that match KEY",
        "  --print-config     print the resolved configuration and stop",
        "",
    ]
    lines += _preset_lines("Presets", presets) + _preset_lines("Overlays", overlays)
    if examples:
        lines += ["Examples", *(f"  {app_name} {example}".rstrip() for example in examples), ""]
    return "\n".join([*lines, "Keys", *listing]) + "\n"


def _preset_lines(title: str, files: Sequence[PresetFile]) -> list[str]:
    if not files:
        return []
    width = max(len(file.name) for file in files) + 2
    lines = [title]
    for file in files:
        lines += textwrap.wrap(
            file.doc or str(file.path),
            _WIDTH,
            initial_indent=f"  {file.name:<{width}}",
            subsequent_indent=" " * (width + 2),
        )
    return [*lines, ""]


def _key_lines(cls: type, under: str) -> list[str]:
    """Keys grouped by section, under the section's heading."""
    shown = [e for e in entries(cls) if isinstance(e, Key) and _matches(e.path, under)]
    sections = {e.path: e for e in entries(cls) if isinstance(e, Section)}
    by_section: dict[str, list[Key]] = {}
    for key in shown:
        by_section.setdefault(key.path.rpartition(".")[0], []).append(key)
    order = ["", *sections]
    lines: list[str] = []
    for path in order:
        keys = by_section.get(path, [])
        if not keys:
            continue
        if path:
            section = sections[path]
            note = " (off unless given)" if _off_by_default(cls, path) else ""
            doc = class_doc(section.cls)
            lines += ["", f"{path}{note}" + (f"  -  {doc}" if doc else "")]
        for key in keys:
            lines += _entry_lines(key, _shown_default(cls, key))
    return lines


def _matches(path: str, under: str) -> bool:
    return under in path if under else True


def _entry_lines(key: Key, default: Any) -> list[str]:
    required = default is MISSING
    head = f"  {key.path}: {type_text(key.hint)}" + (" (required)" if required else f" = {_default_text(default)}")
    lines = textwrap.wrap(head, _WIDTH, subsequent_indent=" " * 8, break_long_words=False)
    doc = field_doc(key.owner, key.name)
    return lines + textwrap.wrap(doc, _WIDTH, initial_indent=" " * 6, subsequent_indent=" " * 6)


def _default_text(value: Any) -> str:
    if dataclasses.is_dataclass(value):
        value = plain_tree(value)
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, tuple):
        return "[" + ", ".join(_default_text(item) for item in value) + "]"
    return '""' if value == "" else str(value)


def _shown_default(cls: type, key: Key) -> Any:
    """The effective default in `cls`: a section's default instance may differ from its class's own defaults."""
    value: Any = cls
    for word in key.path.split("."):
        if value is MISSING or value is None:
            return key.default
        value = field_default(value, word) if isinstance(value, type) else getattr(value, word)
    return value


def _off_by_default(cls: type, path: str) -> bool:
    value: Any = cls
    for word in path.split("."):
        if value is MISSING:
            return False
        value = field_default(value, word) if isinstance(value, type) else getattr(value, word)
        if value is None:
            return True
    return False


def _top_comment(path: Path) -> str:
    words: list[str] = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        if not line.startswith("#"):
            break
        words.append(line.lstrip("#").strip())
    text = " ".join(words)
    return text.partition(". ")[0].rstrip(".") if text else ""
