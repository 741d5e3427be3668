"""Help text of an app: every key with type, default and documentation; presets; examples. Imports nothing heavy."""

import dataclasses
import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from types import MappingProxyType
from typing import Any

from .schema import MISSING, Key, class_doc, entries, field_doc, nearest_paths, type_text
from .trees import plain_tree

_WIDTH = 110
ALL = "all"
"""The word after --help for every key."""


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
    common: Sequence[str] = (),
    file_keys: Mapping[str, str] = MappingProxyType({}),
    under: str = "",
) -> str:
    """Help as plain text, at most 110 columns.

    Args:
        cls: the config dataclass.
        app_name: the app's command, as in `python -m apps.grpo.main`.
        common: keys that are listed in place of all, before presets with one sentence each; unknown ones are left out.
        file_keys: key of a file with settings in another format -> its documentation.
        under: list only the keys whose dotted path contains this text; `all` lists every key.
    """
    if under == ALL:
        common = under = ""
    listing = _common_lines(cls, common) if common and not under else ["Keys", *_key_lines(cls, under)]
    if under:
        listing = listing[1:]
        if not listing:
            near = nearest_paths(cls, under)
            listing = [f"No key matches {under!r}." + (f" Nearest: {', '.join(near)}" if near else "")]
        return "\n".join(listing) + "\n"
    named = ("[preset=NAME] " if presets else "") + ("[overlay=NAME] " if overlays else "")
    lines = [f"usage: {app_name} {named}[config=FILE.yaml] [key=value ...]", ""]
    if doc := (doc or class_doc(cls)):
        lines += [*textwrap.wrap(doc, _WIDTH), ""]
    lines += [
        *(["  preset=NAME           start from a preset; several are merged left to right"] if presets else []),
        *(f"  {key + '=FILE':<21} then merge {text}" for key, text in file_keys.items()),
        *(["  overlay=NAME          then merge the overlay or preset NAME, for another size"] if overlays else []),
        "  config=FILE.yaml      merge your own file; overlays and files go left to right",
        "  key=value             then single keys; value is YAML: 1e-4, true, null, text, [a, b], ${other.key}",
        "  --help [KEY|all]      print this text, only the keys that match KEY, or this text with every key",
        "  --print-config        print the merged configuration and stop; a run chooses what is null",
        "",
    ]
    if examples:
        lines += ["Examples", *(f"  {app_name} {example}".rstrip() for example in examples), ""]
    whole = not common
    files = _preset_lines("Presets", presets, whole=whole) + _preset_lines("Overlays", overlays, whole=whole)
    lines += [*files, *listing] if whole else [*listing, "", *files]
    return "\n".join(lines).rstrip() + "\n"


def _preset_lines(title: str, files: Sequence[PresetFile], *, whole: bool) -> list[str]:
    """Names with their comments, or with the first sentence of each."""
    if not files:
        return []
    width = max(len(file.name) for file in files) + 2
    lines = [title]
    for file in files:
        lines += textwrap.wrap(
            (file.doc if whole else re.split(r"\.(?: (?=[A-Z])|$)", file.doc)[0]) or str(file.path),
            _WIDTH,
            initial_indent=f"  {file.name:<{width}}",
            subsequent_indent=" " * (width + 2),
        )
    return [*lines, ""]


def _common_lines(cls: type, common: Sequence[str]) -> list[str]:
    """The common keys in their order, and how to list the others."""
    keys: dict[str, Key] = {}
    off: set[str] = set()
    for entry in entries(cls):
        if isinstance(entry, Key):
            keys[entry.path] = entry
        elif entry.off:
            off.add(entry.path)
    given = {path: path.rpartition(".")[0] in off for path in common if path in keys}
    lines = [line for path, is_off in given.items() for line in _entry_lines(keys[path], is_off=is_off)]
    more = f"  --help {ALL}: all {len(keys)} keys and the presets in full; --help lora: keys with lora in their name"
    return ["Common keys", *lines, "", more]


def _key_lines(cls: type, under: str) -> list[str]:
    """Keys grouped by section, under the section's heading."""
    headings: dict[str, list[str]] = {"": []}
    keys: dict[str, list[str]] = {"": []}
    for entry in entries(cls):
        if isinstance(entry, Key):
            keys[entry.path.rpartition(".")[0]] += _entry_lines(entry) if under in entry.path else []
        else:
            note = " (off unless given)" if entry.off else ""
            doc = class_doc(entry.cls)
            headings[entry.path] = ["", f"{entry.path}{note}" + (f"  -  {doc}" if doc else "")]
            keys[entry.path] = []
    return [line for path, lines in keys.items() if lines for line in (*headings[path], *lines)]


def _entry_lines(key: Key, *, is_off: bool = False) -> list[str]:
    """The key with its default; `is_off`: its section has no effect unless one of its keys is given."""
    default = " (required)" if key.default is MISSING else f" = {default_text(key.default)}"
    default = " (off unless given)" if is_off else default
    head = f"  {key.path}: {type_text(key.hint)}{default}"
    lines = textwrap.wrap(head, _WIDTH, subsequent_indent=" " * 8, break_long_words=False)
    doc = field_doc(key.owner, key.name)
    return lines + textwrap.wrap(doc, _WIDTH, initial_indent=" " * 6, subsequent_indent=" " * 6)


def default_text(value: Any) -> str:
    """A default as it is written in a YAML file or an override."""
    if dataclasses.is_dataclass(value):
        value = plain_tree(value)
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, (tuple, list)):
        return "[" + ", ".join(default_text(item) for item in value) + "]"
    return '""' if value == "" else str(value)


def _top_comment(path: Path) -> str:
    """The comment at the top of a file, on one line."""
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    comment = takewhile(lambda line: line.startswith("#"), lines)
    return " ".join(line.lstrip("#").strip() for line in comment)
